# SPDX-License-Identifier: Apache-2.0
"""Requests as the papers describe them, in the format of cxl-plan: what a paper does not say is assumed here, and said in the docstring."""

import json
import math
import random

BLOCK_TOKENS = 64


def lines(requests):
    """A trace's text: `requests` are (time in s, tokens of the input, tokens of the answer, ids of blocks)."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, (int(at * 1000), *rest), strict=True))) + "\n" for at, *rest in requests)


def static(tokens, count, every_s):
    """Requests of one length that share nothing, one each `every_s` seconds (TraCT figures 5 and 6)."""
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    return [(number * every_s, tokens, 3, list(range(number * blocks, (number + 1) * blocks))) for number in range(count)]


def _lognormal(source, mean, deviation):
    spread = math.log(1 + (deviation / mean) ** 2)
    return source.lognormvariate(math.log(mean) - spread / 2, math.sqrt(spread))


# TraCT's table 1: tokens that a request has alone, mean and deviation, by workload; and those of all inputs and answers.
TRACT_UNIQUE = {"A": (1073, 1549), "B": (1215, 1693), "C": (1631, 2027)}
TRACT_INPUT, TRACT_ANSWER = (4449, 2424), (215, 263)


def tract(unique_mean, unique_deviation, count, per_second, seed=1):
    """TraCT's table 1, with a unique part as given; lognormal, at random times.

    The table has no more. Assumed: the shared part begins one of 300 contexts, by Zipf's law with exponent 0.9; every eighth context has
    the same system prompt in its first quarter.
    """
    source, at = random.Random(seed), 0.0
    weights = [1 / (rank + 1) ** 0.9 for rank in range(300)]
    number, requests = 1 << 40, []
    for _ in range(count):
        at += source.expovariate(per_second)
        total = max(2 * BLOCK_TOKENS, int(_lognormal(source, *TRACT_INPUT)))
        unique = min(total, int(_lognormal(source, unique_mean, unique_deviation)))
        context = source.choices(range(300), weights)[0]
        shared = (total - unique) // BLOCK_TOKENS
        ids = [((context % 8 if place < shared // 4 else 8 + context) << 20) + place for place in range(shared)]
        more = math.ceil(total / BLOCK_TOKENS) - shared
        requests.append((at, total, max(1, int(_lognormal(source, *TRACT_ANSWER))), ids + list(range(number, number + more))))
        number += more
    return requests


def twice(tokens, prompts, every_s, begins_s, share=0.3, seed=1):
    """Beluga's two runs: (cache-populate, cache-hit). Prompts of one length, `share` of each at the beginning of three others'; then all of
    them again in another order, from `begins_s` on, when the first run is over."""
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    common = int(blocks * share)
    chains = []
    for number in range(prompts):
        shared, own = (number // 4) << 20, (1 << 40) + number * blocks
        chains.append([*range(shared, shared + common), *range(own, own + blocks - common)])
    first = [(number * every_s, tokens, 64, chain) for number, chain in enumerate(chains)]
    random.Random(seed).shuffle(chains)
    return first, [(begins_s + number * every_s, tokens, 64, chain) for number, chain in enumerate(chains)]


def working_set(gib, chunk_kib=128, chunk_tokens=256, chunks=64):
    """CXL-SSD's two passes over a working set, chunks of 256 tokens and 128 KB, 64 a request: stored, then retrieved in the same order.

    A request every 10 s, which is longer than it takes, and than a tick of the caches' recency.
    """
    count = max(1, int(gib * 2**20 / chunk_kib / chunks))
    numbers = [number % count for number in range(2 * count)]
    return [
        (10.0 * at, chunks * chunk_tokens, 1, list(range(number * chunks, (number + 1) * chunks))) for at, number in enumerate(numbers)
    ]


def slides(contexts=10, turns=5, tokens=174_000, more=600):
    """The slides' 10 contexts of 174K tokens, 5 turns each, one request at a time: turn by turn over all contexts; a turn adds 600 tokens
    (assumed)."""
    requests = []
    for turn in range(turns):
        for context in range(contexts):
            length = tokens + turn * more
            requests.append((0.0, length, 300, [(context << 20) + place for place in range(math.ceil(length / BLOCK_TOKENS))]))
    return requests
