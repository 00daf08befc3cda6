#!/usr/bin/env python3
"""Times Hugging Face transformers' Gemma 4 with the shapes of E2B and random weights, on one NVIDIA GPU.

    python3 benches/peers/gemma4_transformers.py [generate] [train] [--lengths 4096,16384] [--last 1024]

`generate` prints tokens/s of prompts (logits of the last token) and of greedy decoding. `train` prints tokens/s, TFLOP and
peak memory of a training step in bf16, for each of these, so that a row can be compared with one that does the same work:
all weights or all but the embedding tables; the loss on all positions or on the last `--last` ones; AdamW (states in
bf16) or SGD; with and without gradient checkpointing. transformers computes every layer for all positions in any case.
"""
import argparse
import json
import time

import torch
import transformers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

VOCABULARY = 262144
HEADS, WINDOW = 8, 512
HEAD_DIM, GLOBAL_HEAD_DIM = 256, 512


SHAPES = {
    "e2b": dict(
        hidden_size=1536, num_hidden_layers=35, intermediate_size=6144, num_key_value_heads=1, num_kv_shared_layers=20,
        use_double_wide_mlp=True, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7),
    "e4b": dict(
        hidden_size=2560, num_hidden_layers=42, intermediate_size=10240, num_key_value_heads=2, num_kv_shared_layers=18,
        use_double_wide_mlp=False, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7),
    "31b": dict(
        hidden_size=5376, num_hidden_layers=60, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, num_kv_shared_layers=0, use_double_wide_mlp=False, attention_k_eq_v=True,
        sliding_window=1024, hidden_size_per_layer_input=0, max_position_embeddings=262144,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10),
}


def config(shapes="e2b"):
    common = dict(
        num_attention_heads=HEADS, head_dim=HEAD_DIM, global_head_dim=GLOBAL_HEAD_DIM, sliding_window=WINDOW,
        hidden_size_per_layer_input=256, vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY,
        final_logit_softcapping=30.0, attention_k_eq_v=False, enable_moe_block=False, max_position_embeddings=131072,
        tie_word_embeddings=True)
    made = Gemma4TextConfig(**(common | SHAPES[shapes]))
    made._attn_implementation = "sdpa"
    return made


def build(shapes="e2b"):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Gemma4ForCausalLM(config(shapes))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def timed(work, runs):
    torch.cuda.synchronize()
    start = time.time()
    for _ in range(runs):
        work()
    torch.cuda.synchronize()
    return (time.time() - start) / runs


def report(row, work):
    """Prints `row` with what `work` adds to it, or with the error that it ends in."""
    try:
        row |= work()
    except Exception as error:
        row["error"] = str(error).strip().split("\n")[-1][:120]
    print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()


@torch.no_grad()
def prefill(model, length):
    tokens = torch.randint(5, VOCABULARY, (1, length), device="cuda")
    run = lambda: model(tokens, logits_to_keep=1, use_cache=True)
    timed(run, 2)
    seconds = timed(run, 3)
    return {"tokens_per_second": round(length / seconds), "ms": round(1e3 * seconds, 1)}


@torch.no_grad()
def decode(model, batch, context, count=64):
    tokens = torch.randint(5, VOCABULARY, (batch, context), device="cuda")
    generate = lambda n: model.generate(tokens, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    generate(4)
    one = timed(lambda: generate(1), 1)
    seconds = timed(lambda: generate(count), 1) - one
    return {"tokens_per_second": round(batch * (count - 1) / seconds, 1), "ms_per_step": round(1e3 * seconds / (count - 1), 2)}


def flops(model, length, last):
    """Multiply-adds of products and attention of one step's forward, times 2 and times 3 for the backward, without recomputation."""
    c = model.config
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n)
    full, sliding = (c.layer_types.count(kind) for kind in ("full_attention", "sliding_attention"))
    window = min(WINDOW, length)
    pairs = [length * (length + 1) / 2, window * (window + 1) / 2 + (length - window) * window]
    attention = 2 * HEADS * (full * GLOBAL_HEAD_DIM * pairs[0] + sliding * HEAD_DIM * pairs[1])
    head = last * c.hidden_size * c.vocab_size
    return 2 * (3 * (matrices * length + head) + 3.5 * attention)


def train(length, last, optimizer, tables, checkpointing):
    model = build().train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(tables or "embed_tokens" not in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    steps = kind(trained, lr=1e-5, fused=optimizer == "adamw")
    tokens = torch.randint(5, VOCABULARY, (1, length + 1), device="cuda")

    def step():
        hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state[:, -last:]
        logits = model.lm_head(hidden).float()
        logits = 30 * torch.tanh(logits / 30)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -last:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        steps.step()
        steps.zero_grad()

    timed(step, 1)
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, 3)
    work = flops(model, length, last)
    return {"tokens_per_second": round(length / seconds), "seconds": round(seconds, 3), "tflop": round(work / 1e12, 1),
            "tflop_per_second": round(work / seconds / 1e12), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="`generate`, `train` [default: both]")
    parser.add_argument("--lengths", default="4096,16384", help="tokens of a training step")
    parser.add_argument("--last", type=int, default=1024, help="positions of the loss that is not on all")
    arguments = parser.parse_args()
    what = arguments.what or ["generate", "train"]
    print(f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}, PyTorch {torch.__version__}", flush=True)
    if "generate" in what:
        model = build()
        for length in (2048, 8192, 32768):
            report({"prefill": length}, lambda: prefill(model, length))
        for batch, context in ((1, 128), (1, 8192), (8, 8192)):
            report({"decode": batch, "context": context}, lambda: decode(model, batch, context))
        del model
    if "train" in what:
        for length in map(int, arguments.lengths.split(",")):
            for last, optimizer, tables, checkpointing in ((length, "adamw", True, True), (arguments.last, "adamw", True, True),
                                                           (length, "adamw", True, False), (arguments.last, "sgd", False, True)):
                row = {"train": length, "loss_on": last, "optimizer": optimizer, "tables": tables, "checkpointing": checkpointing}
                report(row, lambda: train(length, last, optimizer, tables, checkpointing))


if __name__ == "__main__":
    main()
