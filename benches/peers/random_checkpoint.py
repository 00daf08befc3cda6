#!/usr/bin/env python3
"""Writes a checkpoint with the shapes of E2B, E4B or 31B and random bf16 weights, to measure a server without a download.

    python3 benches/peers/random_checkpoint.py DIR [e2b|e4b|31b]

The tokenizer is the one of the embedded model, with a made-up token for every other id of the vocabulary. Needs an NVIDIA
GPU, and 10 GB of disk (15 GB for E4B, 61 GB for 31B).
"""
import json
import os
import sys

from gemma4_transformers import VOCABULARY, build

folder, *shapes = sys.argv[1:]
model = build(*shapes)
model.save_pretrained(folder, max_shard_size="20GB")

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "../../crates/burn-gemma4/embedded/tokenizer.json")) as file:
    tokenizer = json.load(file)
vocabulary = tokenizer["model"]["vocab"]
known = set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]}
vocabulary.update({f"<made-up {token}>": token for token in range(VOCABULARY) if token not in known})
with open(os.path.join(folder, "tokenizer.json"), "w") as file:
    json.dump(tokenizer, file, ensure_ascii=False)
