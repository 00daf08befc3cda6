#!/usr/bin/env python3
"""Times PyTorch's FlexAttention on the masks and scores of `cargo bench --bench attention -- cliffs-`, on one NVIDIA GPU.

    python3 benches/peers/masks.py [WORD ...] [--json FILE]

Prints one row for each case: forward and backward in ms, or the error. A WORD selects the cases that contain it. The times are
medians of single launches by CUDA events, as in the benchmark. The creation of the block mask is not timed.

The cases do the same work as the benchmark's cases of the same name:
    images     causal attention in which each fourth block of 256 tokens sees all of its block
    alibi      causal attention with ALiBi as a score_mod
    packed     256 documents of 1,024 tokens in one sequence, each causal
    varlen     packed causal prompts of 512 to 4,096 tokens, 61,440 tokens in all
    blocks     32,768 causal tokens; each block of 128 queries reads up to 32 of 256 blocks of keys
    dropout    FlexAttention has none; scaled_dot_product_attention with dropout 0.1 is timed
"""
import argparse
import json

import torch
import torch.nn.functional as F
from attention import milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

RAGGED = [(1, 4096), (4, 2048), (16, 1024), (64, 512)]


def documents(lengths):
    """A causal mask within each document."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])


def images(b, h, q, k):
    return (q >= k) | ((q // 256 % 4 == 3) & (q // 256 == k // 256))


def causal(b, h, q, k):
    return q >= k


def alibi(heads):
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def listed_blocks(tokens):
    """The key blocks that the benchmark's case `blocks` lists for each block of 128 queries, as a block mask."""
    count = tokens // 128
    visible = torch.zeros(count, count, dtype=torch.bool)
    for row in range(count):
        visible[row, row] = True
        for entry in range(31):
            visible[row, (row * 7919 + entry * 104729) % (row + 1)] = True
    numbers = visible.sum(-1).int()
    indices = torch.argsort(visible.int(), dim=-1, descending=True, stable=True).int()
    numbers, indices = numbers[None, None].cuda(), indices[None, None].cuda()
    return BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=128, mask_mod=causal)


# name, [batch, heads, tokens, head size], mask, score_mod
CASES = [
    ("images-d128", [1, 32, 8192, 128], lambda: images, None),
    ("images-d256", [1, 16, 8192, 256], lambda: images, None),
    ("alibi-d128", [4, 16, 4096, 128], lambda: causal, alibi),
    ("packed-d128", [1, 8, 262144, 128], lambda: documents([1024] * 256), None),
    ("blocks-d128", [1, 8, 32768, 128], None, None),
    ("blocks-d256", [1, 4, 32768, 256], None, None),
    (
        "varlen-d128",
        [1, 8, 61440, 128],
        lambda: documents([length for count, length in RAGGED for _ in range(count)]),
        None,
    ),
]
# name, [batch, heads, tokens, head size]
DROPOUT = [("dropout-d128", [4, 16, 4096, 128]), ("dropout-d256", [4, 8, 4096, 256])]


def timed(name, peer, shape, run):
    """Times forward and backward of `run(q, k, v)`."""
    operands = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    row = {"case": name, "peer": peer}
    try:
        with torch.no_grad():
            row["forward_ms"] = round(milliseconds(lambda: run(*operands)), 4)
        output = run(*operands)
        backward = lambda: torch.autograd.grad(output, operands, gradient, retain_graph=True)
        row["backward_ms"] = round(milliseconds(backward), 4)
    except Exception as error:
        row["error"] = str(error).strip().split("\n")[-1][:110]
    print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases [default: all cases]")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    chosen = lambda name: not arguments.words or any(word in name for word in arguments.words)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    rows = []
    for name, shape, mask, score in CASES:
        if not chosen(name):
            continue
        torch._dynamo.reset()
        _, heads, tokens, _ = shape
        if mask is None:
            block_mask = listed_blocks(tokens)
        else:
            block_mask = torch.compile(create_block_mask)(mask(), None, None, tokens, tokens, device="cuda")
        flex = torch.compile(flex_attention, dynamic=False)
        score_mod = score(heads) if score else None
        run = lambda q, k, v: flex(q, k, v, score_mod=score_mod, block_mask=block_mask)
        rows.append(timed(name, "flex", shape, run))
    for name, shape in DROPOUT:
        if not chosen(name):
            continue

        def run(q, k, v):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)

        rows.append(timed(name, "sdpa-flash (FA2)", shape, run))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
