# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a model, and which of their blocks a prefix needs.

vLLM gives layers of one kind one block table: a group. What a group needs to continue a prefix depends on its kind: full attention
every block of the prefix, a sliding window or a chunk the last few, recurrent layers the one block with the state at its end. So a prefix
is cached when every group has what it needs, and only that is published, pinned and pulled. The rules are those of vLLM's own managers
(`get_num_skipped_tokens`, `find_longest_cache_hit`); a test holds them against these.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ..options import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


# Engines with blocks of up to so many tokens find the windows that an engine publishes for others.
_LARGEST_BLOCK_TOKENS = 128


class Kind(Enum):
    """What of a prefix a group needs."""

    FULL = "full"
    """All blocks."""
    WINDOW = "window"
    """Those of the last `reach_tokens` - 1 tokens."""
    CHUNK = "chunk"
    """Those of the chunk of `reach_tokens` tokens that is not complete."""
    STATE = "state"
    """The block that ends with the prefix."""


@dataclass(frozen=True)
class Group:
    """One group."""

    index: int
    """Its number in vLLM's list of groups and in block tables."""
    layer_names: tuple[str, ...]
    block_tokens: int
    """Tokens of a block as it lies in the pool. All numbers of blocks are of these."""
    kind: Kind
    reach_tokens: int = 0
    is_draft: bool = False
    """Its layers guess tokens ahead: the last block of a match may hold guesses that followed other tokens."""
    slices: int = 1
    """Blocks in the pool that make one of vLLM's. Block `n` of a request is slice `n % slices` of vLLM's block `n // slices`."""

    def places(self, block_ids: Sequence[int], blocks: Iterable[int]) -> list[int]:
        """Where blocks of a request lie: number and slice of vLLM's block in one, `id * slices + slice`. `block_ids`: vLLM's blocks of the
        request."""
        return [block_ids[block // self.slices] * self.slices + block % self.slices for block in blocks]

    def skipped_tokens(self, tokens: int) -> int:
        """Leading tokens whose KV is not needed any more once `tokens` are computed."""
        if self.kind is Kind.WINDOW:
            return max(tokens - self.reach_tokens + 1, 0)
        if self.kind is Kind.CHUNK:
            return tokens // self.reach_tokens * self.reach_tokens
        return max(tokens - 1, 0) if self.kind is Kind.STATE else 0

    def needed_blocks(self, tokens: int) -> range:
        """The blocks that are needed to continue after `tokens` tokens. The last one may be filled in part. They begin with one of vLLM's:
        vLLM serves that to other requests as a whole."""
        return range(self.first_needed(tokens), -(-tokens // self.block_tokens))

    def first_needed(self, tokens: int) -> int:
        """The first of them."""
        return max(self.skipped_tokens(tokens), 0) // (self.block_tokens * self.slices) * self.slices


def blocks_of(places: Iterable[int], slices: int) -> list[int]:
    """Numbers of vLLM's blocks that these places (`Group.places`) lie in."""
    return [place // slices for place in places]


@dataclass(frozen=True)
class Hit:
    """A prefix of which every group has what it needs."""

    tokens: int
    needed: tuple[range, ...]
    """Blocks of each group, in the order of `Shape.groups`."""


@dataclass(frozen=True)
class Shape:
    """The groups of an engine that hold parts of a prefix."""

    groups: tuple[Group, ...]
    hash_tokens: int
    """Tokens between two of vLLM's hashes of a request."""
    align_tokens: int
    """Prefixes end at multiples of this many tokens, or with the prompt."""
    drops_last: bool = False
    """Speculative layers want the last block of a match computed again."""
    ends_with_blocks: bool = False
    """A prefix cannot end within a block: layers keep several tokens in one state, or tokens between two states where no other engine
    finds it."""
    slack_tokens: int = 0
    """Tokens before a window that are published with it: engines with other blocks end prefixes, and begin windows, at other places."""

    @classmethod
    def plain(cls, block_tokens: int) -> "Shape":
        """One group of full attention."""
        return cls((Group(0, (), block_tokens, Kind.FULL),), block_tokens, block_tokens)

    @property
    def is_plain(self) -> bool:
        """One group of full attention: every prefix needs every block."""
        return len(self.groups) == 1 and self.groups[0].kind is Kind.FULL and not self.drops_last

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers."""
        return any(group.kind is Kind.STATE for group in self.groups)

    @property
    def takes_tails(self) -> bool:
        """Whether a prompt's last, partly filled block can be cached: where all groups end their blocks together, and none keeps a state
        between tokens, which would be that of another place."""
        same = all(group.block_tokens == self.hash_tokens for group in self.groups)
        return same and not (self.drops_last or self.has_states or self.ends_with_blocks)

    @property
    def recomputes_last(self) -> bool:
        """vLLM computes the last token of a prompt again, whose window begins one token before that of the next. Where that matters, a
        prefix ends one token before the prompt does."""
        return any(group.kind is not Kind.FULL for group in self.groups)

    def longest(
        self, have: Sequence[Sequence[bool]], most_tokens: int, tail_tokens: int = 0, is_prompt: bool = False
    ) -> Hit | None:
        """The longest prefix of a request with `most_tokens` tokens of which every group has what it needs.

        have: for each group, which of its blocks are there, from the first on; with `tail_tokens`, the last one is the prompt's tail.
        is_prompt: the prompt has `most_tokens`, and a prefix may end with it.
        """
        runs = [_runs(blocks) for blocks in have]
        if is_prompt and self.takes_tails and (hit := self._hit(runs, most_tokens, most_tokens)):
            return hit
        full = min((len(blocks) * group.block_tokens for group, blocks in zip(self.groups, have)), default=0)
        last = min(full, most_tokens - tail_tokens) // self.align_tokens
        for count in range(last, 0, -1):
            if hit := self._hit(runs, count * self.align_tokens, most_tokens):
                return hit
        return None

    def longest_known(self, have: Sequence[Sequence[bool]], most_tokens: int) -> int:
        """Tokens of the longest prefix of which full attention has every block: other groups may lack their windows, or states, at its
        end. 0 for a model without full attention."""
        if all(group.kind is not Kind.FULL for group in self.groups):
            return 0
        there = [
            blocks if group.kind is Kind.FULL else [True] * (most_tokens // group.block_tokens) for group, blocks in zip(self.groups, have)
        ]
        hit = self.longest(there, most_tokens)
        return hit.tokens if hit else 0

    def reach(self, prompt_tokens: int, with_tail: bool) -> int:
        """Tokens of a prompt that are found again once all of it is published."""
        with_tail &= self.takes_tails
        tail_tokens = prompt_tokens % self.hash_tokens if with_tail else 0
        there = [[True] * (prompt_tokens // group.block_tokens + (tail_tokens > 0)) for group in self.groups]
        hit = self.longest(there, prompt_tokens, tail_tokens, with_tail)
        return hit.tokens if hit else 0

    def _hit(self, runs: Sequence[Sequence[int]], end: int, most_tokens: int) -> Hit | None:
        """The hit whose match ends at `end`, where it is one."""
        tokens = end - self.align_tokens if self.drops_last else end
        if self.recomputes_last and tokens >= most_tokens:
            if self.has_states:
                return None
            tokens = most_tokens - 1
        if tokens <= 0:
            return None
        needed = tuple(group.needed_blocks(tokens) for group in self.groups)
        for group, run, blocks in zip(self.groups, runs, needed):
            stop = blocks.stop + group.slices if group.is_draft else blocks.stop
            if blocks and (stop > len(run) or run[stop - 1] < stop - blocks.start):
                return None
        return Hit(tokens, needed)

    def worth_storing(
        self, group: Group, begin: int, end: int, prompt_tokens: int, every_tokens: int, shared_tokens: int = 0
    ) -> list[int]:
        """The full blocks of a group that a later prefix may need, once the tokens `begin` to `end` of a request are computed.

        Full attention: all. The others: what prefixes need that end with the prompt, after it, every `every_tokens` before, and at
        `shared_tokens`.
        """
        stop = end // group.block_tokens
        if group.kind is Kind.FULL:
            return list(range(begin // group.block_tokens, stop))
        found: set[int] = set()
        # vLLM frees blocks before a window when the step that computes its end begins.
        ahead = min(end + self.slack_tokens, prompt_tokens)
        dropped = self.align_tokens if self.drops_last else 0
        shared = shared_tokens + dropped if shared_tokens else 0
        for boundary in self._boundaries(begin, max(end, ahead), prompt_tokens, every_tokens, shared):
            # A prefix may end before what it matches: a block where the last one is computed again, a token at the end of a prompt.
            end_of_prefix = boundary - dropped
            if boundary <= prompt_tokens:
                end_of_prefix = min(end_of_prefix, prompt_tokens - 1)
            first = group.first_needed(max(end_of_prefix - self.slack_tokens, 0))
            found.update(range(first, boundary // group.block_tokens))
        return sorted(block for block in found if block < stop)

    def _boundaries(self, begin: int, end: int, prompt_tokens: int, every_tokens: int, shared: int) -> Iterable[int]:
        """Where later prefixes may end, in (begin, end]."""
        align = self.align_tokens
        last = prompt_tokens // align * align
        for boundary in range((begin // align + 1) * align, end // align * align + 1, align):
            if boundary >= last or boundary % max(every_tokens, align) == 0 or boundary == shared:
                yield boundary


def _runs(blocks: Sequence[bool]) -> list[int]:
    """For each block, how many are there without a gap up to it."""
    runs, run = [], 0
    for there in blocks:
        run = run + 1 if there else 0
        runs.append(run)
    return runs


# What vLLM has


def shape_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", stored_block_tokens: int = 0) -> Shape:
    """The shape of an engine's KV cache, in blocks as they lie in the pool; `stored_block_tokens` 0: those of vLLM. Raises `ConfigError`
    for groups whose blocks cannot be shared, or not in such blocks."""
    shape = _shape_of_vllm(vllm_config, kv_cache_config)
    return _slice_shape(shape, stored_block_tokens) if stored_block_tokens else shape


def _shape_of_vllm(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Shape:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    align_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    speculative = vllm_config.speculative_config
    drops_last = speculative is not None and speculative.use_eagle()
    groups = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        kind, reach_tokens = kind_of(group.kv_cache_spec)
        # Drafts have no recurrent layers.
        is_draft = kind is not Kind.STATE and _is_draft(group, kv_cache_config, drops_last)
        groups.append(Group(index, tuple(group.layer_names), group.kv_cache_spec.block_size, kind, reach_tokens, is_draft))
    if not groups:
        raise ConfigError("CxlConnector finds no KV cache group whose blocks depend on the tokens before them alone")
    return Shape(tuple(groups), hash_tokens, align_tokens, drops_last, _ends_with_blocks(kv_cache_config))


def _ends_with_blocks(kv_cache_config: "KVCacheConfig") -> bool:
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
    return any(not spec.prefix_cacheable or spec.tokens_per_state > 1 for spec in specs)


def _slice_shape(shape: Shape, tokens: int) -> Shape:
    """The same with blocks of `tokens` tokens in the pool."""
    if shape.has_states:
        raise ConfigError("CxlConnector: states of recurrent layers cannot be divided by tokens; leave stored_block_tokens out")
    sizes = sorted({group.block_tokens for group in shape.groups})
    if any(size % tokens for size in sizes):
        raise ConfigError(
            f"CxlConnector: stored_block_tokens is {tokens}, and vLLM's blocks have {', '.join(map(str, sizes))} tokens here, which is no "
            "multiple of it: name the smallest --block-size of all engines, of which the others are multiples"
        )
    groups = tuple(replace(group, block_tokens=tokens, slices=group.block_tokens // tokens) for group in shape.groups)
    slack_tokens = 2 * max(shape.align_tokens, _LARGEST_BLOCK_TOKENS)
    return replace(shape, groups=groups, hash_tokens=tokens, slack_tokens=slack_tokens)


def _is_draft(group: "KVCacheGroupSpec", kv_cache_config: "KVCacheConfig", drops_last: bool) -> bool:
    """Where no group is named as the draft's, its layers are among those of the others."""
    named = any(each.is_eagle_group for each in kv_cache_config.kv_cache_groups)
    return drops_last and (group.is_eagle_group or not named)


def specs_of(spec: "KVCacheSpec") -> list["KVCacheSpec"]:
    """The specs of a group's layers where they differ, else the one of all."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def kind_of(spec: "KVCacheSpec") -> tuple[Kind, int]:
    """The kind of a group, with the tokens that it looks back."""
    kinds = {_kind_of_layer(each) for each in specs_of(spec)}
    if len(kinds) != 1:
        raise ConfigError(f"CxlConnector does not support a KV cache group with layers of several kinds: {sorted(map(str, kinds))}")
    return kinds.pop()


def _kind_of_layer(spec: "KVCacheSpec") -> tuple[Kind, int]:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        HiddenStateCacheSpec,
        MambaSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, MambaSpec):
        return Kind.STATE, 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Kind.CHUNK, spec.attention_chunk_size
    if isinstance(spec, SlidingWindowSpec):
        return Kind.WINDOW, spec.sliding_window + spec.extra_retained_tokens
    others = (HiddenStateCacheSpec, RSWASpec, SinkFullAttentionSpec)
    # With bidirectional attention vLLM says so here, and turns its own prefix caching off.
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, others) and not spec.non_causal:
        return Kind.FULL, 0
    raise ConfigError(
        f"CxlConnector does not support a KV cache of type {type(spec).__name__}: its blocks do not depend on the tokens before them alone"
    )
