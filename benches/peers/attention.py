#!/usr/bin/env python3
"""Times other libraries' attention on the cases of `cargo bench --bench attention`, on one NVIDIA GPU.

    python3 benches/peers/attention.py [WORD ...] [--backends WORD ...] [--json FILE]

Prints one row for each case and backend: forward and backward in ms and TFLOP/s, or the error. A WORD selects the cases that
contain it. FLOPs are counted on the visible pairs as the benchmark counts them: 4 * pairs * head size forward, 2.5 times
that backward. Times are medians of single launches by CUDA events after a warm-up and a second's rest, as in the benchmark.

Backends: PyTorch's scaled_dot_product_attention (flash = FlashAttention-2, cudnn, memory-efficient), FlexAttention with its
own tiles and with tiles chosen by hand, and, where installed, FlashAttention-3 (`flash_attn_interface`), flash-attn-4
(`flash_attn.cute`) and FFPA (`ffpa_attn`).
"""
import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# name, batch, query heads, key heads, queries, keys, head size, causal, window, backward
CASES = [
    ("D64 causal B4 H64 S4096", 4, 64, 64, 4096, 4096, 64, True, None, True),
    ("D64 full B4 H64 S4096", 4, 64, 64, 4096, 4096, 64, False, None, True),
    ("D128 causal B4 H32 S4096", 4, 32, 32, 4096, 4096, 128, True, None, True),
    ("D128 full B4 H32 S4096", 4, 32, 32, 4096, 4096, 128, False, None, True),
    ("D256 causal B4 H16 S4096", 4, 16, 16, 4096, 4096, 256, True, None, True),
    ("D256 full B4 H16 S4096", 4, 16, 16, 4096, 4096, 256, False, None, True),
    ("D320 causal B1 H16 S8192", 1, 16, 16, 8192, 8192, 320, True, None, True),
    ("D512 causal B4 H8 S4096", 4, 8, 8, 4096, 4096, 512, True, None, True),
    ("D512 full B4 H8 S4096", 4, 8, 8, 4096, 4096, 512, False, None, True),
    ("D512 causal B1 H32 S8192", 1, 32, 32, 8192, 8192, 512, True, None, True),
    ("D512 full B1 H32 S8192", 1, 32, 32, 8192, 8192, 512, False, None, True),
    ("D512 causal gqa8:1 B1 S16384", 1, 8, 1, 16384, 16384, 512, True, None, True),
    ("D256 window512 gqa8:1 B1 S16384", 1, 8, 1, 16384, 16384, 256, True, 512, True),
    ("D256 window1024 gqa32:16 B1 S8192", 1, 32, 16, 8192, 8192, 256, True, 1024, True),
    ("decode D256 gqa32:16 B8 T32768", 8, 32, 16, 1, 32768, 256, False, None, False),
    ("decode D512 gqa32:4 B8 T32768", 8, 32, 4, 1, 32768, 512, False, None, False),
    ("decode D512 gqa8:1 B1 T32768", 1, 8, 1, 1, 32768, 512, False, None, False),
]


def optional(load):
    """A peer that need not be installed, or None."""
    try:
        return load()
    except Exception as error:
        print(f"not installed: {str(error)[:100]}", flush=True)
        return None


def load_fa3():
    from flash_attn_interface import flash_attn_func

    return flash_attn_func


def load_fa4():
    from flash_attn.cute.interface import flash_attn_func

    return flash_attn_func


def load_ffpa():
    from ffpa_attn import ffpa_attn_func

    return ffpa_attn_func


def milliseconds(work, launches=20):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    time.sleep(1.0)
    times = []
    for _ in range(launches):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def visible_pairs(queries, keys, causal, window):
    if not causal:
        return queries * keys
    offset = keys - queries
    last = range(offset + 1, offset + queries + 1)
    return sum(end - max(0, end - window if window else 0) for end in last)


def backends(case, q, k, v, optional_peers):
    """The ways to compute the case: name and a function without arguments."""
    _, batch, heads, kv_heads, queries, keys, dim, causal, window, _ = case
    offset, grouped = keys - queries, heads != kv_heads
    swapped = lambda x: x.transpose(1, 2)
    first = lambda result: result[0] if isinstance(result, tuple) else result
    masked = bool(window) or (causal and queries != keys)

    def sdpa(backend, repeat=False):
        def run():
            keys_, values = (x.repeat_interleave(heads // kv_heads, 1) if repeat and grouped else x for x in (k, v))
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, keys_, values, is_causal=causal, enable_gqa=grouped and not repeat)

        return run

    found = {}
    if not masked:
        found["sdpa-flash (FA2)"] = sdpa(SDPBackend.FLASH_ATTENTION)
        found["sdpa-cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        found["sdpa-efficient (keys repeated)"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, repeat=True)

    def visible(b, h, query, key):
        seen = key <= query + offset
        return seen & (key > query + offset - window) if window else seen

    block_mask = create_block_mask(visible, None, None, queries, keys, device="cuda") if causal else None
    flex = torch.compile(flex_attention, dynamic=False)
    found["flex"] = lambda: flex(q, k, v, block_mask=block_mask, enable_gqa=grouped)
    if dim > 256:
        # Flex's own tile needs more shared memory than a multiprocessor has at these head sizes.
        tiles = dict(BLOCK_M=64, BLOCK_N=32, num_stages=1, num_warps=8, BLOCK_M1=32, BLOCK_N1=32, BLOCK_M2=32, BLOCK_N2=32)
        by_hand = torch.compile(flex_attention, dynamic=False)
        found["flex (tiles by hand)"] = lambda: by_hand(q, k, v, block_mask=block_mask, enable_gqa=grouped, kernel_options=tiles)
    fa3, fa4, ffpa = optional_peers
    if fa3 and dim <= 256:
        sides = (window - 1, 0) if window else (-1, -1)
        found["flash-attn-3"] = lambda: swapped(first(fa3(swapped(q), swapped(k), swapped(v), causal=causal, window_size=sides)))
    if fa4:
        sides4 = (window - 1, 0) if window else (None, None)
        found["flash-attn-4"] = lambda: swapped(first(fa4(swapped(q), swapped(k), swapped(v), causal=causal, window_size=sides4)))
    if ffpa and not window and dim >= 256:
        found["ffpa"] = lambda: ffpa(q, k, v, is_causal=causal, enable_gqa=grouped)
    return found


def measure(case, chosen, optional_peers):
    name, batch, heads, kv_heads, queries, keys, dim, causal, window, backward = case
    torch._dynamo.reset()
    shape = lambda h, n: torch.randn(batch, h, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    q, k, v = shape(heads, queries), shape(kv_heads, keys), shape(kv_heads, keys)
    gradient = torch.randn(batch, heads, queries, dim, device="cuda", dtype=torch.bfloat16)
    flops = 4.0 * batch * heads * visible_pairs(queries, keys, causal, window) * dim
    for peer, run in backends(case, q, k, v, optional_peers).items():
        if chosen and not any(word in peer for word in chosen):
            continue
        row = {"case": name, "peer": peer}
        try:
            with torch.no_grad():
                forward = milliseconds(run)
            row |= {"forward_ms": round(forward, 4), "forward_tflops": round(flops / forward / 1e9, 1)}
            if queries == 1:
                row["forward_gb_s"] = round(2 * (k.numel() + v.numel()) / forward / 1e6)
            if backward:
                output = run()
                grad = lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)
                time_ = milliseconds(grad)
                row |= {"backward_ms": round(time_, 4), "backward_tflops": round(2.5 * flops / time_ / 1e9, 1)}
        except Exception as error:
            row["error"] = str(error).strip().split("\n")[-1][:110]
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases [default: all cases]")
    parser.add_argument("--backends", nargs="*", default=[], help="parts of the names of backends [default: all backends]")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"matrix product 8192^3: {2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9:.0f} TFLOP/s", flush=True)
    del a, b
    peers = [optional(load) for load in (load_fa3, load_fa4, load_ffpa)]
    rows = []
    for case in CASES:
        if not arguments.words or any(word in case[0] for word in arguments.words):
            rows += measure(case, arguments.backends, peers)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
