"""Times requests whose prompts share a prefix: python3 prefix_times.py ADDRESS MODEL [TOKENS ...]

Sends prompts of random tokens to a running server, one after the other. For each number of tokens, eight prompts begin with
the same tokens and end with 40 tokens of their own. Each answer has one token. Prints the time of each request in
milliseconds, and the number of reused tokens that the server reports.
"""

import json
import random
import sys
import time
import urllib.request

# The number of tokens after the shared prefix.
OWN_TOKENS = 40
# Token ids below are special tokens. Ids from the second number on may not exist in a small vocabulary.
TOKENS = (5, 200_000)


def ask(address, model, prompt):
    """Returns the time of a request in milliseconds and the number of reused tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        usage = json.load(response)["usage"]
    return (time.perf_counter() - start) * 1e3, usage["prompt_tokens_details"]["cached_tokens"]


def main(address, model, *counts):
    generator = random.Random(5)

    def draw(count):
        return [generator.randrange(*TOKENS) for _ in range(count)]

    for count in map(int, counts or (1000, 4000, 8000, 32000)):
        # The first requests of a length compile kernels.
        for _ in range(3):
            ask(address, model, draw(count))
        prefix = draw(count)
        times = [ask(address, model, prefix + draw(OWN_TOKENS)) for _ in range(8)]
        print(f"{count} tokens:", ", ".join(f"{ms:.1f} ms ({reused})" for ms, reused in times))


if __name__ == "__main__":
    main(*sys.argv[1:])
