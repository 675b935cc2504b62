# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: the longest prefix of a request in the pool, found and pinned."""

from dataclasses import dataclass, field

import kvbm_cxl

from .block_names import BlockNames
from .corrupt_blocks import CorruptBlocks
from .groups import Hit, Kind
from .pool_access import PoolAccess
from .request_state import PinnedLookup, RequestState


@dataclass
class PrefixSearch:
    """One lookup. Groups of full attention are pinned as chains, as far as they go; of the others it is asked which blocks are there, and
    those that the longest prefix needs are pinned. A block evicted in between counts as absent, and the search continues without it.
    """

    access: PoolAccess
    names: BlockNames
    corrupt: CorruptBlocks
    tracked: RequestState
    computed_tokens: int
    """Tokens that vLLM has: a multiple of the shape's alignment."""
    with_tail: bool
    """Whether the prompt's tail may have been published."""
    limit_tokens: int | None = None
    """The prefix is to end here at the latest, and not within a block."""
    _pins: list["kvbm_cxl.Pins"] = field(default_factory=list)

    def run(self) -> PinnedLookup:
        """The result. Raises `CxlError` with nothing pinned."""
        try:
            return self._run()
        except kvbm_cxl.CxlError:
            self._release()
            raise

    def _run(self) -> PinnedLookup:
        shape, request = self.names.shape, self.tracked.request
        with_tail = self._takes_tail()
        tail_tokens = request.num_prompt_tokens % shape.hash_tokens if with_tail else 0
        most_tokens = request.num_prompt_tokens if with_tail else request.num_tokens
        keys = [self._keys(position, tail_tokens) for position in range(len(shape.groups))]
        have = self._have(keys)
        known_tokens = shape.longest_known(have, most_tokens)
        while True:
            hit = shape.longest(have, most_tokens, tail_tokens, with_tail)
            if hit is None or hit.tokens <= self.computed_tokens:
                self._release()
                return PinnedLookup(self.computed_tokens, self.computed_tokens, 0, [], known_tokens)
            if self._pin_others(hit, keys, have):
                break
        is_tail = tail_tokens > 0 and hit.tokens > most_tokens - tail_tokens
        return PinnedLookup(self.computed_tokens, hit.tokens, tail_tokens if is_tail else 0, self._pins, known_tokens)

    def _takes_tail(self) -> bool:
        """Whether the prefix may end with the prompt, within one of vLLM's blocks."""
        shape, prompt_tokens = self.names.shape, self.tracked.request.num_prompt_tokens
        # A preempted request may have generated full blocks, which lie over the tail.
        is_last = self.names.hashed_tokens(self.tracked) == prompt_tokens // shape.hash_tokens * shape.hash_tokens
        if self.limit_tokens is not None:
            return False
        is_there = self.with_tail or prompt_tokens % shape.hash_tokens == 0
        return is_there and shape.takes_tails and is_last and prompt_tokens % shape.align_tokens > 0

    def _first(self, position: int) -> int:
        """The first block of a group that vLLM does not have."""
        return self.computed_tokens // self.names.shape.groups[position].block_tokens

    def _keys(self, position: int, tail_tokens: int) -> list[bytes]:
        group, hashed = self.names.shape.groups[position], self.names.hashed_tokens(self.tracked)
        if self.limit_tokens is not None:
            hashed = min(hashed, self.limit_tokens)
        keys = self.names.keys(self.tracked, self._first(position), hashed // group.block_tokens, position)
        if tail_tokens:
            keys.append(self.names.tail(self.tracked, position))
        return self.corrupt.intact(keys)

    def _have(self, keys: list[list[bytes]]) -> list[list[bool]]:
        """For each group which blocks are there on every rank. Those of full attention are pinned."""
        shape = self.names.shape
        have: list[list[bool]] = [[] for _ in shape.groups]
        most: int | None = None
        for position in sorted(range(len(shape.groups)), key=lambda position: shape.groups[position].kind is not Kind.FULL):
            group, first, asked = shape.groups[position], self._first(position), keys[position]
            if most is not None:  # No prefix is longer than what full attention has of it.
                asked = asked[: max(-(-most // group.block_tokens) + group.is_draft * group.slices - first, 0)]
            if group.kind is Kind.FULL:
                found = [True] * self._pin_chain(position, asked)
                reached = (first + len(found)) * group.block_tokens
                most = reached if most is None else min(most, reached)
            else:
                found = self._there(position, asked)
            # What vLLM has of a group with a state may end before its attention does.
            local = group.kind is Kind.FULL or all(each.kind is not Kind.STATE for each in shape.groups)
            have[position] = [local] * first + found
        return have

    def _pin_chain(self, position: int, keys: list[bytes]) -> int:
        """Pins the leading blocks that every rank has; how many."""
        found = len(keys)
        for namespace in self.names.by_group[position]:
            if found:
                self._pins.append(self.access.call(lambda cache: cache.pin_chain(namespace, keys[:found])))
                found = min(found, len(self._pins[-1]))
        return found

    def _there(self, position: int, keys: list[bytes]) -> list[bool]:
        there = [True] * len(keys)
        for namespace in self.names.by_group[position]:
            found = self.access.call(lambda cache: cache.has(namespace, keys))
            there = [before and now for before, now in zip(there, found)]
        return there

    def _pin_others(self, hit: Hit, keys: list[list[bytes]], have: list[list[bool]]) -> bool:
        """Pins what groups without full attention need for a hit. False: a block has gone, and `have` knows."""
        taken: list[kvbm_cxl.Pins] = []
        for position, (group, needed) in enumerate(zip(self.names.shape.groups, hit.needed)):
            if group.kind is Kind.FULL:
                continue
            first = self._first(position)
            start = max(needed.start, first)
            wanted = keys[position][start - first : needed.stop - first]
            for namespace in self.names.by_group[position] if wanted else ():
                try:
                    taken.append(self.access.call(lambda cache: cache.pin_chain(namespace, wanted)))
                except kvbm_cxl.CxlError:
                    _release(taken)
                    raise
                if len(taken[-1]) < len(wanted):
                    have[position][start + len(taken[-1])] = False
                    _release(taken)
                    return False
        self._pins += taken
        return True

    def _release(self) -> None:
        _release(self._pins)
        self._pins = []


def _release(pins: list["kvbm_cxl.Pins"]) -> None:
    for each in pins:
        each.release()
