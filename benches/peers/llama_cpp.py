#!/usr/bin/env python3
"""Times decoding of llama.cpp and the products of a decoded token of this project, in turn, on E2B's shapes in Q4_0.

    benches/peers/llama_cpp.sh FOLDER
    python3 benches/peers/llama_cpp.py FOLDER [--threads N] [--rounds N]

Both programs run on the same cores. The CPU time of a token is the difference of two runs of different length, so the
time to load the model does not count. Other processes lengthen the elapsed time of a token, but hardly its CPU time.
"""
import argparse
import os
import re
import resource
import statistics
import subprocess

SHORT, LONG = 8, 40

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()
root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")


def run(command: list[str]) -> tuple[float, str]:
    """Runs a command on the first cores. Returns its CPU time in seconds, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: args.threads])
    output = subprocess.run(["taskset", "-c", cores, *command], check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def llama(tokens: int) -> tuple[float, float]:
    """Returns the CPU time of llama-bench, and the elapsed milliseconds of a token."""
    model = os.path.join(args.folder, "e2b-q4_0.gguf")
    command = [os.path.join(args.folder, "bin/llama-bench"), "-m", model, "-t", str(args.threads), "-p", "0"]
    seconds, output = run([*command, "-n", str(tokens), "-r", "1", "-fa", "1", "-o", "csv"])
    names, values = (line.split(",") for line in output.strip().splitlines()[-2:])
    rate = dict(zip(names, values))["avg_ts"].strip('"')
    return seconds, 1e3 / float(rate)


def ours(program: str, tokens: int, dtype: str) -> tuple[float, float]:
    """Returns the CPU time of the benchmark, and the median of the elapsed milliseconds of a token."""
    seconds, output = run([program, str(tokens), dtype])
    row = next(line for line in output.splitlines() if line.startswith(f"| {dtype} "))
    return seconds, float(row.split("|")[3])


build = ["cargo", "bench", "-q", "--package=cpu-gemv", "--bench=decode", "--no-run", "--message-format=json"]
messages = subprocess.run(build, check=True, capture_output=True, text=True, cwd=root).stdout
program = re.findall(r'"executable":"([^"]*decode-[^"]*)"', messages)[-1]

programs = {
    "llama.cpp": llama,
    "products, f32": lambda tokens: ours(program, tokens, "f32"),
    "products, bf16": lambda tokens: ours(program, tokens, "bf16"),
}
results: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
for _ in range(args.rounds):
    for name, program_of in programs.items():
        short, (long, elapsed) = program_of(SHORT)[0], program_of(LONG)
        results[name].append((1e3 * (long - short) / (LONG - SHORT), elapsed))
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)

print(f"\nMedians of {args.rounds} rounds, {args.threads} threads:\n")
print("| | CPU ms a token | elapsed ms a token | llama.cpp's CPU time / this |\n|---|---|---|---|")
peer = statistics.median(cpu for cpu, _ in results["llama.cpp"])
for name, runs in results.items():
    cpu, elapsed = (statistics.median(column) for column in zip(*runs))
    print(f"| {name} | {cpu:.1f} | {elapsed:.1f} | {peer / cpu:.2f} |")
