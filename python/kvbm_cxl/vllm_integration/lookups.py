# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: looks up the longest cached prefix of a request, pins it, and turns it into a load."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import kvbm_cxl

from . import movers
from .audited_hits import AuditedHits
from .block_names import BlockNames
from .coming_blocks import ComingBlocks
from .config import ConnectorConfig
from .corrupt_blocks import CorruptBlocks
from .diagnosis import Reasons, differences
from .handover import Expected, expected_of
from .log import logger
from .metadata import Blocks
from .pool_access import PoolAccess
from .prefix_search import PrefixSearch
from .recording import Recording
from .request_state import PinnedLookup, RequestState
from .second_level import SecondLevel
from .stats import Tally
from .support import can_be_cached

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

# How long decode looks for blocks that prefill says it publishes and the pool does not know yet.
HANDOVER_WAIT_MS = 50


@dataclass
class Lookups:
    """Lookups of requests, the pins that they took, and the loads that they became."""

    config: ConnectorConfig
    access: PoolAccess
    names: BlockNames
    tally: Tally
    reasons: Reasons
    corrupt: CorruptBlocks
    is_producer: bool
    reads: bool = True
    """False: the engine computes whole prompts, and nothing is looked up."""
    recording: Recording | None = None
    second: SecondLevel | None = None
    audited: AuditedHits = field(default_factory=AuditedHits)
    pinned: int = 0
    """Blocks that requests of this engine have pinned."""
    loading: Counter[bytes] = field(default_factory=Counter)
    """Keys of full blocks that are being loaded, and for how many requests."""
    _unallocated: dict[str, RequestState] = field(default_factory=dict)
    """Requests with a pinned lookup for which vLLM has not allocated blocks."""
    _loads: list[Blocks] = field(default_factory=list)

    def match(self, tracked: RequestState, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` (whole blocks that vLLM has itself) that can be loaded, and that they are loaded during the
        forward pass. None: ask again in the next step.
        """
        request = tracked.request
        self.unpin(tracked)
        tracked.reused_tokens = computed_tokens
        if tracked.load_failed or request.skip_reading_prefix_cache or not (self.reads and can_be_cached(request)):
            self.tally.count("lookups", "skipped")
            return 0, False
        has_names = self.names.has_names(tracked)
        if has_names is None:
            self.tally.count("lookups", "deferred")
            return None, False
        if not has_names:
            self.tally.count("lookups", "skipped")
            return 0, False
        first_block = computed_tokens // self.names.shape.groups[0].block_tokens
        is_loading = any(key in self.loading for key in self.names.keys(tracked, first_block, first_block + 1))
        if is_loading or (self.second and self.second.is_coming(tracked)):
            self.tally.count("lookups", "deferred")
            return None, False
        is_first = tracked.first_lookup_s is None
        if is_first:
            tracked.first_lookup_s = time.monotonic()
            tracked.expected = self._expectation(tracked)
        started_s = time.perf_counter()
        try:
            lookup = self._look_up(tracked, computed_tokens)
        except kvbm_cxl.CxlError as error:
            logger.debug("lookup for request %s: %s", request.request_id, error)
            self.tally.count("lookups", "error")
            return 0, False
        finally:
            self.tally.time("lookup_seconds", time.perf_counter() - started_s)
        if is_first and tracked.expected is None and self.names.hashed_tokens(tracked) and self.names.namespaces:
            self.reasons.looked_up(lookup.tokens > 0, str(self.names.namespaces[0]))
        if self.is_producer and self.names.may_publish(tracked):
            self._mark_shared(tracked, lookup)
        external = lookup.tokens - computed_tokens
        # A prompt of one token is computed anyway, and vLLM would take it for one that was never looked up.
        wanted = external >= self.config.min_load_tokens and request.num_tokens > 1
        # Loads under way will unpin theirs. Without any, even a request beyond the bound has its turn.
        too_many = wanted and self.pinned > 0 and self.pinned + lookup.pinned > self.config.max_pinned_blocks
        if too_many or self._still_written(tracked, lookup) or (self.second and self.second.brings(tracked, lookup, self.names)):
            lookup.release()
            self.tally.count("lookups", "deferred")
            return None, False
        self.tally.count("lookups", "none" if external <= 0 else "full" if lookup.tokens >= request.num_prompt_tokens else "partial")
        if wanted and (limit := self.audited.limit(tracked, lookup, self.names.shape)) is not None:
            tracked.found_tokens = lookup.tokens
            lookup = self._without_end(tracked, lookup, limit)
            external = lookup.tokens - computed_tokens
            wanted = external > 0
        if not wanted:
            lookup.release()
            return 0, False
        self.pinned += lookup.pinned
        tracked.lookup = lookup
        self._unallocated[request.request_id] = tracked
        return external, True

    def _look_up(self, tracked: RequestState, computed_tokens: int, limit_tokens: int | None = None) -> PinnedLookup:
        """Pins the longest prefix of which every group on every rank has what it needs, beyond the tokens that vLLM has."""
        has_limit = limit_tokens is not None and limit_tokens <= computed_tokens
        if has_limit or computed_tokens % self.names.shape.align_tokens or not self.names.namespaces:
            return PinnedLookup(computed_tokens, computed_tokens, 0, [])
        # A tail is published for a hand-over alone.
        with_tail = tracked.expected is not None or not self.is_producer
        return PrefixSearch(self.access, self.names, self.corrupt, tracked, computed_tokens, with_tail, limit_tokens).run()

    def _without_end(self, tracked: RequestState, lookup: PinnedLookup, limit_tokens: int) -> PinnedLookup:
        """A hit that ends at `limit_tokens` at the latest, in place of `lookup`."""
        lookup.release()
        try:
            return self._look_up(tracked, lookup.computed_tokens, limit_tokens)
        except kvbm_cxl.CxlError as error:
            logger.debug("lookup for request %s: %s", tracked.request.request_id, error)
            return PinnedLookup(lookup.computed_tokens, lookup.computed_tokens, 0, [])

    def _mark_shared(self, tracked: RequestState, lookup: PinnedLookup) -> None:
        """Notes where a prefix of the request ends that the pool, or vLLM's own cache, has seen, and the pool does not find."""
        found = lookup.tokens if lookup.tokens > lookup.computed_tokens else 0
        seen = max(lookup.known_tokens, lookup.computed_tokens)
        tracked.shared_tokens = seen if seen > found else 0
        if self.names.shape.has_states and tracked.shared_tokens > lookup.computed_tokens:
            _keep_state(tracked.request, tracked.shared_tokens)

    def _expectation(self, tracked: RequestState) -> Expected | None:
        """What prefill published for a request, where this engine can find it."""
        expected = expected_of(tracked.request.kv_transfer_params)
        if expected is None or not self.names.namespaces:
            return expected
        theirs, mine = {**expected.facts, "namespace": expected.namespace}, self.names.facts(tracked)
        found = differences(theirs, mine)
        if not found:
            # Blocks of another size may end prefixes at other places.
            most = self.names.shape.reach(tracked.request.num_prompt_tokens, with_tail=True)
            return replace(expected, tokens=min(expected.tokens, most)) if most else None
        self.tally.count("handovers", "foreign")
        self.reasons.foreign(tracked.request.request_id, found, expected.namespace, mine["namespace"])
        return None

    def _still_written(self, tracked: RequestState, lookup: PinnedLookup) -> bool:
        """Whether prefill said that it publishes more, and may still be writing it: the pool may not know of it yet, or knows that it
        comes. It stops coming when prefill's host dies, at the latest once that is fenced."""
        if tracked.expected is None or tracked.first_lookup_s is None or lookup.tokens >= tracked.expected.tokens:
            return False
        waited_ms = (time.monotonic() - tracked.first_lookup_s) * 1000
        if waited_ms < HANDOVER_WAIT_MS:
            return True
        return waited_ms < self._longest_wait_ms(tracked.expected) and ComingBlocks(self.access, self.names, tracked, lookup).all_come()

    def _longest_wait_ms(self, expected: Expected) -> int:
        """No longer than it takes to compute the prompt, but long enough to find out whether prefill's host lives."""
        pool, most_ms = self.access.pool, movers.COPY_TIMEOUT_MS
        if expected.computed_ms is None or pool is None:
            return most_ms
        return min(most_ms, max(expected.computed_ms, pool.suspect_ms))

    def unpin(self, tracked: RequestState) -> None:
        """Ends the load of a request, or what its last lookup pinned."""
        lookup, tracked.lookup, tracked.loading = tracked.lookup, None, False
        if tracked.loading_keys:
            self.loading -= Counter(tracked.loading_keys)
            tracked.loading_keys = []
        if lookup:
            self.pinned -= lookup.pinned
            lookup.release()
        self._unallocated.pop(tracked.request.request_id, None)

    def note_allocation(self, tracked: RequestState, blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM admitted the request, and will have `external_tokens` of it loaded."""
        request = tracked.request
        self._count_admission(tracked, external_tokens)
        lookup = tracked.lookup
        if external_tokens <= 0 or lookup is None or tracked.loading:
            return
        tokens = lookup.computed_tokens + external_tokens
        tail_tokens = lookup.tail_tokens if tokens == lookup.tokens else 0  # vLLM may take less, and takes whole blocks then.
        block_ids, keys = blocks.get_block_ids(), []
        for position, group in enumerate(self.names.shape.groups):
            needed = group.needed_blocks(tokens)
            start = max(needed.start, lookup.computed_tokens // group.block_tokens)
            full = needed.stop - (tail_tokens > 0)
            part = self.names.keys(tracked, start, full, position)
            # Other requests do not wait for a tail: vLLM shares no block that is not full.
            keys += part
            if tail_tokens:
                part = [*part, self.names.tail(tracked, position)]
            if part:
                places = group.places(block_ids[group.index], range(start, start + len(part)))
                parent = self.names.parent(tracked, start, position)
                self._loads.append(Blocks(request.request_id, part, places, parent, tail_tokens, tracked.adapter_in_use, position))
        if request.lora_request:  # It has to be in memory when its blocks arrive.
            self.names.adapters.want(request.lora_request)
        tracked.loading = True
        tracked.loading_keys = keys
        self.loading.update(tracked.loading_keys)
        self._unallocated.pop(request.request_id, None)

    def _count_admission(self, tracked: RequestState, external_tokens: int) -> None:
        """Where the prompt's tokens come from, once for each request. What a load then fails to bring is counted by `loads`."""
        if tracked.counted:
            return
        tracked.counted = True
        prompt_tokens = tracked.request.num_prompt_tokens
        reused = min(tracked.reused_tokens, prompt_tokens)
        self.tally.count("prompt_tokens", "pulled", external_tokens)
        self.tally.count("prompt_tokens", "reused", reused)
        self.tally.count("prompt_tokens", "computed", max(prompt_tokens - external_tokens - reused, 0))
        if self.recording:
            self.recording.record_request(tracked, reused + external_tokens)
        if tracked.expected and prompt_tokens > 1:
            found = max(external_tokens + reused, tracked.found_tokens)
            self.tally.count("handovers", "complete" if found >= tracked.expected.tokens else "short")
            if not found:
                self.reasons.absent(tracked.request.request_id, tracked.expected.tokens, bool(tracked.expected.facts))

    def take_loads(self) -> list[Blocks]:
        """The loads of the step that was just scheduled. Blocks looked up and not allocated are unpinned."""
        for tracked in list(self._unallocated.values()):
            self.unpin(tracked)
        loads, self._loads = self._loads, []
        return loads


def _keep_state(request: "Request", tokens: int) -> None:
    """Makes vLLM end a chunk at `tokens`. It then keeps the state there, and offers it to be published, as it does for a prefix that its
    own cache has without a state. It has set the field just before the lookup."""
    known = getattr(request, "shared_prefix_boundary", None)
    if known is not None and tokens > known:
        request.shared_prefix_boundary = tokens
