# SPDX-License-Identifier: Apache-2.0
"""Prompts as tokens, the same ones for a seed: beginnings in common, chosen by Zipf's law, and endings like no other."""

import math
import random
from collections.abc import Sequence

from paper.traces import TRACT_INPUT, TRACT_UNIQUE

# TraCT's table 1, workload B, and what its lengths are divided by here.
INPUT, UNIQUE, SCALE = TRACT_INPUT, TRACT_UNIQUE["B"], 4
MOST_TOKENS = 3000
FIRST_TOKEN, LAST_TOKEN = 300, 2040
# Of a prompt of one of several lengths, what it has in common with others; whole blocks of it.
COMMON = 0.75


def tokens(choose: random.Random, count: int) -> list[int]:
    """A prompt that is like no other."""
    return [choose.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def zipf(choose: random.Random, among: Sequence, count: int) -> list:
    """`count` of these: the first one most often, the second one half as often, and so on."""
    return choose.choices(among, [1 / (rank + 1) for rank in range(len(among))], k=count)


def _gamma(choose: random.Random, mean: float, deviation: float) -> int:
    return max(1, round(choose.gammavariate((mean / deviation) ** 2, deviation**2 / mean)))


def of_table_1(count: int, prefixes: int, seed: int = 1) -> list[list[int]]:
    """Prompts with the lengths of TraCT's workload B at a quarter."""
    choose = random.Random(seed)
    (total, spread), (unique, unique_spread) = ([value / SCALE for value in each] for each in (INPUT, UNIQUE))
    shared_spread = math.sqrt(max(spread**2 - unique_spread**2, 1))
    shared = [tokens(choose, min(_gamma(choose, total - unique, shared_spread), MOST_TOKENS // 2)) for _ in range(prefixes)]
    chosen = zipf(choose, shared, count)
    return [prefix + tokens(choose, min(_gamma(choose, unique, unique_spread), MOST_TOKENS // 2)) for prefix in chosen]


def of_lengths(count: int, families: int, lengths: dict[int, float], block_tokens: int, seed: int, content: int) -> list[list[int]]:
    """Prompts of these lengths, by how often each comes. Those of a family begin alike: three quarters of the shorter one, in whole blocks.

    The same seed gives the same lengths and families in the same order; prompts of different `content` have nothing in common.
    """
    choose, words = random.Random(seed), random.Random(f"{seed} {content}")
    beginnings = [tokens(words, max(lengths)) for _ in range(families)]
    chosen = zip(zipf(choose, range(families), count), choose.choices(list(lengths), list(lengths.values()), k=count), strict=True)
    prompts = []
    for family, length in chosen:
        common = int(length * COMMON) // block_tokens * block_tokens
        prompts.append(beginnings[family][:common] + tokens(words, length - common))
    return prompts
