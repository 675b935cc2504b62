# SPDX-License-Identifier: Apache-2.0
"""The round that shows what the pool does: one prompt, then another with the same beginning, and where each block of them came from."""

import time
from dataclasses import dataclass

from . import counters
from .client import Answer
from .counters import COMPUTED, PULLED, REUSED, Counts
from .model import BLOCK_TOKENS, tiny_sentences

# The plugin tells the pool twice a second what it has counted.
PLUGIN_TELLS_S = 5


@dataclass(frozen=True)
class Length:
    """How long prompts and answers are; `shared_blocks` is the least that two prompts have in common."""

    prefix_sentences: int
    ending_sentences: int
    max_tokens: int
    # Texts have to share whole blocks, so the shared part is some blocks long and ends somewhere within one.
    shared_blocks: int


USUAL = Length(22, 3, 16, shared_blocks=4)
# Where processors are emulated: as short as shows the same.
SHORT = Length(5, 1, 4, shared_blocks=1)


def length(graph) -> Length:
    """Of the prompts and answers of a round."""
    return USUAL if graph.options.slowness == 1 else SHORT


@dataclass(frozen=True)
class Asked:
    """One request: what it was answered, and what the workers of each role counted meanwhile."""

    prompt: str
    answer: Answer
    prefill: Counts
    decode: Counts

    @property
    def blocks(self) -> int:
        """Of the prompt, the tail among them."""
        return -(-self.answer.prompt_tokens // BLOCK_TOKENS)


def prompts(graph) -> list[str]:
    """Two prompts with one beginning: the same ones for a pool of our own, new ones for a pool that may hold answers of yesterday."""
    seed = 1 if graph.pool is None or graph.pool.fresh else time.time_ns() % (1 << 31)
    long = length(graph)
    prefix = " ".join(tiny_sentences(long.prefix_sentences, seed))
    return [f"{prefix} {' '.join(tiny_sentences(long.ending_sentences, seed + ending))}" for ending in (1, 2)]


def ask(graph, prompt: str) -> Asked:
    """Asks while no other client does, so that all counts belong to this request."""
    before = counters.read(graph)
    answer = graph.ask(prompt, length(graph).max_tokens)
    after = counters.wait_settled(graph, before)
    spent = {name: count - before.get(name, Counts()) for name, count in after.items()}
    return Asked(prompt, answer, counters.of_role(spent, "prefill"), counters.of_role(spent, "decode"))


def _blocks(tokens: int) -> str:
    full, tail = divmod(tokens, BLOCK_TOKENS)
    parts = [f"{full} block" + ("" if full == 1 else "s")] if full else []
    return f"{tokens} tokens ({' + '.join(parts + ([f'{tail} tokens'] if tail else []))})"


def _describe_copies(what: str, blocks: int, len_bytes: int, seconds: float) -> str:
    blocks_said = f"{blocks} block{'' if blocks == 1 else 's'}, " if blocks else ""
    return f"{what} {blocks_said}{len_bytes / 1e6:.2f} MB in {seconds * 1e3:.1f} ms"


def describe(asked: Asked) -> list[str]:
    """Lines for people."""
    lines = [f"prompt of {_blocks(asked.answer.prompt_tokens)}"]
    for role, count in (("prefill", asked.prefill), ("decode", asked.decode)):
        sources = ((COMPUTED, "computed"), (PULLED, "pulled"), (REUSED, "reused from its own cache"))
        parts = [f"{word} {_blocks(count.tokens[source])}" for source, word in sources if count.tokens[source]]
        if count.published_bytes:
            parts.append(_describe_copies("published", count.published_blocks, count.published_bytes, count.published_s))
        if count.pulled_bytes:
            parts.append(_describe_copies("moved", count.pulled_blocks, count.pulled_bytes, count.pulled_s))
        lines.append(f"  {role:8}" + "; ".join(parts))
    answer = asked.answer
    lines.append(f"  answer  {answer.text!r}, first token after {answer.ttft_s * 1e3:.0f} ms, all after {answer.total_s * 1e3:.0f} ms")
    return lines


def verify(graph, round_: list[Asked], expected: list[str]) -> list[str]:
    """Deviations from the expected counts; empty if there are none."""
    wrong = []

    def has_to_be(what: str, is_: object, wanted: object) -> None:
        if is_ != wanted:
            wrong.append(f"{what}: {is_!r}, and has to be {wanted!r}")

    first, second = round_
    for number, (asked, text) in enumerate(zip(round_, expected, strict=True), 1):
        has_to_be(f"text {number}", asked.answer.text, text)
        has_to_be(f"request {number}: tokens that decode computed", asked.decode.tokens[COMPUTED], 0)
        has_to_be(f"request {number}: failed", asked.prefill.failed + asked.decode.failed, 0)
    tokens = first.answer.prompt_tokens
    has_to_be("request 1: tokens that prefill computed", first.prefill.tokens[COMPUTED], tokens)
    has_to_be("request 1: tokens that decode pulled", first.decode.tokens[PULLED], tokens)
    if graph.options.connector == "cxl":
        has_to_be("request 1: blocks that prefill published, the tail among them", first.prefill.published_blocks, first.blocks)
        has_to_be("request 1: blocks that decode pulled, the tail among them", first.decode.pulled_blocks, first.blocks)
    else:
        has_to_be("request 1: decode counted transfers", first.decode.transfers > 0 and first.decode.pulled_bytes > 0, True)
    if graph.options.connector == "nixl-cxl":
        has_to_be("bytes that the plugin read, as vLLM and as we count them", *_read_bytes(graph))
    shared = _shared_tokens(graph, first.prompt, second.prompt)
    reused = second.prefill.tokens[REUSED] + second.prefill.tokens[PULLED]
    has_to_be("the shared prefix is some blocks long", shared >= length(graph).shared_blocks * BLOCK_TOKENS, True)
    if graph.options.connector == "cxl" or graph.options.prefill == 1:
        has_to_be("request 2: tokens of the shared prefix that prefill reused", reused, shared)
    # What an earlier graph left in a pool that was named is not this round's.
    if graph.pool is not None and graph.pool.fresh:
        found = graph.pool.fsck()["counts"]
        has_to_be("errors and warnings of cxlctl fsck", found["errors"] + found["warnings"], 0)
    return wrong


def _read_bytes(graph) -> tuple[int, int]:
    """Of all transfers so far: what our plugin counted, and what vLLM did."""
    told = counters.of_role(counters.read(graph), "decode").pulled_bytes
    deadline = time.monotonic() + PLUGIN_TELLS_S
    while True:
        counted = counters.of_plugin(graph.pool)
        ours = counted["staged_read_bytes"] + counted["pool_read_bytes"]
        if ours == told or time.monotonic() > deadline:
            return ours, told
        time.sleep(0.1)


def _shared_tokens(graph, one: str, other: str) -> int:
    tokenizer = graph.model.tokenizer()
    pairs = zip(tokenizer.encode(one).ids, tokenizer.encode(other).ids, strict=False)
    same = next((at for at, (left, right) in enumerate(pairs) if left != right), 0)
    return same // BLOCK_TOKENS * BLOCK_TOKENS
