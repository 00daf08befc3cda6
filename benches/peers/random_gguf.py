#!/usr/bin/env python3
"""Writes a GGUF file with E2B's shapes and random weights, as llama.cpp's converter would: bf16, and norms in f32.

    python3 benches/peers/random_gguf.py OUT.gguf

Needs numpy and gguf of PyPI, and 9.3 GB of disk. All matrices repeat one random block at random offsets. The vocabulary
is made up, so the file serves only programs that need no text.
"""
import os
import sys

import gguf
import numpy as np

HIDDEN, FFN, LAYERS = 1536, 6144, 35
HEADS, HEAD, HEAD_FULL = 8, 256, 512
# The first layers have their own keys and values. The feed-forward networks of the others are twice as wide.
OWN_KEYS = 15
PER_LAYER = 256
VOCABULARY = 262_144

is_full = [layer % 5 == 4 for layer in range(LAYERS)]
ffn = [FFN if layer < OWN_KEYS else 2 * FFN for layer in range(LAYERS)]


def write_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("Gemma 4 E2B random")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(LAYERS)
    writer.add_context_length(131_072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([1] * LAYERS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(HEAD_FULL)
    writer.add_value_length(HEAD_FULL)
    writer.add_key_length_swa(HEAD)
    writer.add_value_length_swa(HEAD)
    writer.add_rope_dimension_count(HEAD_FULL)
    writer.add_rope_dimension_count_swa(HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(512)
    writer.add_sliding_window_pattern([not full for full in is_full])
    writer.add_shared_kv_layers(LAYERS - OWN_KEYS)
    writer.add_embedding_length_per_layer_input(PER_LAYER)
    writer.add_final_logit_softcapping(30.0)

    # Special tokens and bytes have the ids of Gemma 4.
    kind = gguf.TokenType
    tokens = [f"t{token}".encode() for token in range(VOCABULARY)]
    kinds = [kind.NORMAL] * VOCABULARY
    special = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 105: "<|turn>", 106: "<turn|>"}
    for token, text in special.items():
        tokens[token], kinds[token] = text.encode(), kind.UNKNOWN if text == "<unk>" else kind.CONTROL
    tokens[107] = b"\n"
    for byte in range(256):
        tokens[238 + byte], kinds[238 + byte] = f"<0x{byte:02X}>".encode(), kind.BYTE
    for token, text in enumerate(["a", "b", "ab", "\u2581"], 500):
        tokens[token] = text.encode()
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(token) for token in range(VOCABULARY)])
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_mask_token_id(4)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


def tensors() -> list[tuple[str, tuple[int, ...], np.ndarray | None]]:
    """Returns the name, the shape as in PyTorch, and the values of each tensor. A random matrix has no values."""
    found: list[tuple[str, tuple[int, ...], np.ndarray | None]] = []

    def matrix(name: str, *shape: int) -> None:
        found.append((name + ".weight", shape, None))

    def norm(name: str, size: int) -> None:
        found.append((name + ".weight", (size,), np.ones(size, np.float32)))

    # A full layer rotates a quarter of its pairs. A huge factor stops the others.
    pairs = np.arange(HEAD_FULL // 2)
    factors = np.where(pairs < len(pairs) // 4, 1.0, 1e30).astype(np.float32)
    found.append(("rope_freqs.weight", factors.shape, factors))
    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("per_layer_token_embd", VOCABULARY, LAYERS * PER_LAYER)
    matrix("per_layer_model_proj", LAYERS * PER_LAYER, HIDDEN)
    norm("per_layer_proj_norm", PER_LAYER)
    for layer in range(LAYERS):
        head = HEAD_FULL if is_full[layer] else HEAD
        block = f"blk.{layer}."
        norm(block + "attn_norm", HIDDEN)
        matrix(block + "attn_q", HEADS * head, HIDDEN)
        norm(block + "attn_q_norm", head)
        if layer < OWN_KEYS:
            matrix(block + "attn_k", head, HIDDEN)
            norm(block + "attn_k_norm", head)
            matrix(block + "attn_v", head, HIDDEN)
        matrix(block + "attn_output", HIDDEN, HEADS * head)
        norm(block + "post_attention_norm", HIDDEN)
        norm(block + "ffn_norm", HIDDEN)
        matrix(block + "ffn_gate", ffn[layer], HIDDEN)
        matrix(block + "ffn_up", ffn[layer], HIDDEN)
        matrix(block + "ffn_down", HIDDEN, ffn[layer])
        norm(block + "post_ffw_norm", HIDDEN)
        matrix(block + "inp_gate", PER_LAYER, HIDDEN)
        matrix(block + "proj", HIDDEN, PER_LAYER)
        norm(block + "post_norm", HIDDEN)
        norm(block + "layer_output_scale", 1)
    norm("output_norm", HIDDEN)
    return found


def main() -> None:
    writer = gguf.GGUFWriter(sys.argv[1], "gemma4", use_temp_file=False)
    write_metadata(writer)
    for name, shape, values in tensors():
        count = int(np.prod(shape))
        if values is None:
            dtype = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, shape, np.dtype(np.uint16), 2 * count, dtype)
        else:
            writer.add_tensor_info(name, shape, values.dtype, values.nbytes, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]

    random = np.random.default_rng(0)
    block = random.standard_normal(2**24, np.float32) * np.float32(0.02)
    bits = (block.view(np.uint32) >> 16).astype(np.uint16)
    twice = memoryview(np.concatenate([bits, bits]).view(np.uint8))

    def align() -> None:
        file.write(bytes(writer.ggml_pad(file.tell(), writer.data_alignment) - file.tell()))

    for _, shape, values in tensors():
        align()
        if values is not None:
            file.write(values.tobytes())
            continue
        rest = 2 * int(np.prod(shape))
        while rest > 0:
            part = min(rest, bits.nbytes)
            first = 64 * int(random.integers(bits.nbytes // 64))
            file.write(twice[first : first + part])
            rest -= part
    align()
    file.close()
    print(f"{sys.argv[1]}: {os.path.getsize(sys.argv[1]) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
