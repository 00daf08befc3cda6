#!/usr/bin/env python3
"""Draws docs/precision.png: precision.py [PROGRAMS], the folder of the compiled examples
(target/release/examples).

The script fine-tunes the model in the program on the text of a licence, in f32, bf16 and f16, on the
CPU: 300 steps of an adapter, of all weights, and of all weights at a tenth of the rate. It prints the
differences of the losses from f32, by step and over 20 steps, and of the validation losses. A run in
f32 with half batches shows the effect of rounding alone.
Needs matplotlib; compile with: cargo build --release --features training --examples
"""
import json, os, subprocess, sys, tempfile
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "target/release/examples"
STEPS, SMOOTH, WITHIN = 300, 20, 0.5
RUNS = {"an adapter, 2e-4": ["--learning-rate", "2e-4"], "all weights, 1e-4": ["--full", "--learning-rate", "1e-4"],
        "all weights, 1e-5": ["--full", "--learning-rate", "1e-5"]}
WAYS = {"f32": ["--dtype", "f32"], "f32 by halves": ["--dtype", "f32", "--batch", "1", "--accumulate", "2"],
        "bf16": ["--dtype", "bf16"], "f16": ["--dtype", "f16"]}


def losses(output, kind):
    lines = (line for line in output.splitlines() if line.startswith("step ") and kind in line)
    return np.array([float(line.split(kind)[1].split()[0]) for line in lines])


def train(folder, arguments):
    """The losses of all steps, and those of validation."""
    data = folder / "data.jsonl"
    lines = map(str.strip, (ROOT / "LICENSE-APACHE").read_text().splitlines())
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if 20 <= len(line) < 200))
    command = [PROGRAMS / "finetune", "--model", ROOT / "crates/burn-gemma4/embedded", "--data", data, "--out", folder / "out", "--device", "flex",
               "--length", 64, "--batch", 2, "--steps", STEPS, "--checkpoint-every", 30, "--log-every", 1, "--lines", *arguments]
    # Burn restores an optimizer on its default device.
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "BURN_DEVICE": "flex"})
    assert ended.returncode == 0, ended.stderr
    steps, validation = losses(ended.stdout, "  loss "), losses(ended.stdout, "  validation loss ")
    assert len(steps) == STEPS and len(validation) == 10
    return steps, validation


def smooth(values):
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")


def main():
    figure, rows = plt.subplots(2, len(RUNS), figsize=(12, 7), sharex=True, sharey="row", gridspec_kw={"height_ratios": [3, 2]})
    for (run, arguments), above, below in zip(RUNS.items(), *rows):
        exact = None
        for color, (way, dtype) in enumerate(WAYS.items()):
            with tempfile.TemporaryDirectory() as folder:
                steps, validation = train(Path(folder), [*arguments, *dtype])
            over = np.arange(SMOOTH, STEPS + 1)
            if way != "f32 by halves":
                above.plot(over, smooth(steps), color=f"C{color}", linestyle="-" if exact is None else "--", label=way)
            if exact is None:
                exact = steps, validation
                continue
            single, validated = (100 * np.abs(found / expected - 1) for found, expected in zip((steps, validation), exact))
            smoothed = 100 * (smooth(steps) / smooth(exact[0]) - 1)
            below.plot(over, smoothed, color=f"C{color}", label=way)
            print(f"{run}, {way}: from {exact[0][:SMOOTH].mean():.3f} to {exact[0][-SMOOTH:].mean():.3f}; apart from f32: at once {single[0]:.4f} %, "
                  f"a step {single.max():.3f} % at most and {single.mean():.3f} % on average, more than {WITHIN} % in {(single > WITHIN).sum()}; "
                  f"over {SMOOTH} steps {np.abs(smoothed).max():.3f} %; validation {validated.max():.3f} %", flush=True)
        above.set_title(run)
        below.axhspan(-WITHIN, WITHIN, color="0.9")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(alpha=0.3)
            axes.legend()
    rows[0][0].set_ylabel(f"cross entropy a token over {SMOOTH} steps, nats")
    rows[1][0].set_ylabel(f"apart from f32 over {SMOOTH} steps, %")
    figure.tight_layout()
    figure.savefig(ROOT / "docs/precision.png", dpi=100)


if __name__ == "__main__":
    main()
