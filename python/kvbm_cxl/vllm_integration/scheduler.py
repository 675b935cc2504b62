# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what is cached, what is promised and pinned, which blocks are to be saved.

A request's way: `matched` looks up the longest cached prefix and pins it; `allocated` turns the promise into a load; `step` hands loads
and saves to the workers; `report` ends loads and unpins; `finished` keeps blocks that are still being read. What was promised but not
allocated is unpinned at the end of the step and looked up again, so that pins only wait for copies, never for memory. A request whose
prefix is being loaded for another one waits for that: vLLM then has the blocks itself, once.
"""

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from .config import ConnectorConfig
from .events import PoolEvents
from .handover import Expected, expected_of, wants_publish
from .keys import block_keys, tail_key
from .log import logger
from .metadata import Blocks, StepMetadata, WorkerHello, WorkerReport
from .pool_access import PoolAccess
from .stats import CxlStats, Tally
from .support import can_be_cached

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# Spoilt blocks that are remembered. One that is forgotten fails one more load.
_MAX_SPOILT = 4096


@dataclass
class Promise:
    """What a lookup found beyond the tokens that vLLM has: blocks from `first_block` on, pinned."""

    first_block: int
    keys: list[bytes]
    tokens: int
    """Tokens of the request that are there when it is loaded, those before `first_block` included."""
    tail_tokens: int
    pins: list["kvbm_cxl.Pins"]

    def release(self) -> None:
        for pins in self.pins:
            pins.release()

    @property
    def pinned(self) -> int:
        return sum(map(len, self.pins))


@dataclass
class Tracked:
    """What is known of a request until it is finished."""

    request: "Request"
    promise: Promise | None = None
    loading: bool = False
    loading_keys: list[bytes] = field(default_factory=list)
    """Of full blocks."""
    load_failed: bool = False
    saved_blocks: int = 0
    """Full blocks, from the first, that were handed to the workers."""
    tail_saved: bool = False
    published: bool = False
    """The whole prompt was handed to the workers, and they waited for it."""
    last_save_step: int = 0
    """Latest step with a save that nobody waits for."""
    expected: Expected | None = None
    asked_s: float | None = None
    reused_tokens: int = 0
    """Tokens that vLLM had itself when it last asked."""
    counted: bool = False


@dataclass
class SchedulerSide:
    """See the module. Called by vLLM's scheduler, from one thread."""

    config: ConnectorConfig
    access: PoolAccess
    block_tokens: int
    is_producer: bool
    is_consumer: bool
    events: PoolEvents | None = None
    tally: Tally = field(default_factory=Tally)
    _namespaces: list["kvbm_cxl.Namespace"] = field(default_factory=list)
    _tracked: dict[str, Tracked] = field(default_factory=dict)
    _promised: set[str] = field(default_factory=set)
    _loads: list[Blocks] = field(default_factory=list)
    _loading: Counter[bytes] = field(default_factory=Counter)
    """Keys of full blocks that are being loaded, and for how many requests."""
    _release: set[str] = field(default_factory=set)
    _pinned: int = 0
    _step: int = 0
    _saved_step: int = 0
    _foreign_warned: bool = False
    _era: bytes = b""
    """Part of every key since the cache was reset."""
    _spoilt: dict[bytes, None] = field(default_factory=dict)
    """Keys of blocks that have to be evicted, oldest first."""

    def greet(self, hellos: Mapping[Any, WorkerHello]) -> None:
        """Learns the namespaces of all workers; before that, nothing is found. Ranks with the same heads have the same one."""
        in_order = [hellos[rank].namespace for rank in sorted(hellos)]
        self._namespaces = [kvbm_cxl.Namespace.from_bytes(namespace) for namespace in dict.fromkeys(in_order)]

    @property
    def namespaces(self) -> list["kvbm_cxl.Namespace"]:
        """Those of workers with blocks of their own."""
        return self._namespaces

    @property
    def workers(self) -> int:
        """Workers with blocks of their own."""
        return len(self._namespaces)

    # Looking up

    def matched(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` (whole blocks that vLLM has itself) that can be loaded, and that they are loaded beside the
        forward pass. None: ask again in the next step.
        """
        tracked = self._track(request)
        self._unpromise(tracked)
        tracked.reused_tokens = computed_tokens
        if tracked.load_failed or request.skip_reading_prefix_cache or not can_be_cached(request):
            self.tally.count("lookups", "skipped")
            return 0, False
        first_block = computed_tokens // self.block_tokens
        if any(key in self._loading for key in self._keys(request, first_block, min(first_block + 1, len(request.block_hashes)))):
            self.tally.count("lookups", "deferred")
            return None, False
        if tracked.asked_s is None:
            tracked.asked_s = time.monotonic()
            tracked.expected = self._expectation(request)
        started_s = time.perf_counter()
        try:
            promise = self._look_up(request, first_block)
        except kvbm_cxl.CxlError as error:
            logger.debug("lookup for request %s: %s", request.request_id, error)
            self.tally.count("lookups", "error")
            return 0, False
        finally:
            self.tally.time("lookup_seconds", time.perf_counter() - started_s)
        external = promise.tokens - computed_tokens
        # A prompt of one token is computed anyway, and vLLM would take it for one that was never looked up.
        wanted = external >= self.config.min_load_tokens and request.num_tokens > 1
        # Loads under way will unpin theirs. Without any, even a request beyond the bound has its turn.
        too_many = wanted and self._pinned > 0 and self._pinned + promise.pinned > self.config.max_pinned_blocks
        if too_many or self._still_written(tracked, promise):
            promise.release()
            self.tally.count("lookups", "deferred")
            return None, False
        self.tally.count("lookups", "none" if external <= 0 else "full" if promise.tokens >= request.num_prompt_tokens else "partial")
        if not wanted:
            promise.release()
            return 0, False
        self._pinned += promise.pinned
        tracked.promise = promise
        self._promised.add(request.request_id)
        return external, True

    def _track(self, request: "Request") -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked:
                self._unpromise(tracked)
            tracked = self._tracked[request.request_id] = Tracked(request)
        return tracked

    def _look_up(self, request: "Request", first_block: int) -> Promise:
        """Pins the longest prefix that every rank has, from `first_block` on."""
        keys = self._sound(self._keys(request, first_block, len(request.block_hashes)))
        prompt_blocks, tail_tokens = divmod(request.num_prompt_tokens, self.block_tokens)
        # A preempted request may have generated full blocks, which lie over the tail.
        with_tail = self.config.publish_tail and tail_tokens > 0 and first_block + len(keys) == len(request.block_hashes) == prompt_blocks
        if with_tail:
            tail = self._sound([self._tail(request)])
            with_tail = bool(tail)
            keys += tail
        pins: list[kvbm_cxl.Pins] = []
        found = len(keys)
        try:
            for namespace in self._namespaces:
                if found:
                    pins.append(self.access.call(lambda cache: cache.pin_chain(namespace, keys[:found])))
                    found = min(found, len(pins[-1]))
        except kvbm_cxl.CxlError:
            for taken in pins:
                taken.release()
            raise
        if not self._namespaces:
            found = 0
        tail_found = with_tail and found == len(keys)
        full_blocks = first_block + found - tail_found
        tokens = full_blocks * self.block_tokens + (tail_tokens if tail_found else 0)
        return Promise(first_block, keys[:found], tokens, tail_tokens if tail_found else 0, pins)

    def _sound(self, keys: list[bytes]) -> list[bytes]:
        """The keys up to the first whose block was found spoilt and is there still: it would fail whoever loads it, and keeps the right
        one from being published. Its owner is asked to evict it, which it does when nobody has it pinned."""
        for index, key in enumerate(keys):
            if key in self._spoilt and not self._evicted(key):
                return keys[:index]
        return keys

    def _evicted(self, key: bytes) -> bool:
        def evict(cache: "kvbm_cxl.Cache") -> bool:
            there = [namespace for namespace in self._namespaces if any(cache.has(namespace, [key]))]
            for namespace in there:
                cache.evict(namespace, key)
            return not there

        gone = self.access.call(evict)
        if gone:
            del self._spoilt[key]
        return gone

    def _expectation(self, request: "Request") -> Expected | None:
        expected = expected_of(request.kv_transfer_params)
        if expected is None or not self._namespaces or expected.namespace == str(self._namespaces[0]):
            return expected
        self.tally.count("handovers", "foreign")
        if not self._foreign_warned:
            self._foreign_warned = True
            logger.warning(
                "prefill published request %s under namespace %s, this engine reads %s: it computes prompts itself. The two differ in "
                "model, weights, KV type, block size, layout, tensor parallelism, vLLM's attention backend or instruction set",
                request.request_id,
                expected.namespace,
                self._namespaces[0],
            )
        return None

    def _still_written(self, tracked: Tracked, promise: Promise) -> bool:
        """Whether prefill said that there is more, and there is still time for whoever is writing it."""
        if tracked.expected is None or tracked.asked_s is None or promise.tokens >= tracked.expected.tokens:
            return False
        return time.monotonic() - tracked.asked_s < self.config.handover_wait_ms / 1000

    def _unpromise(self, tracked: Tracked) -> None:
        promise, tracked.promise, tracked.loading = tracked.promise, None, False
        if tracked.loading_keys:
            self._loading -= Counter(tracked.loading_keys)
            tracked.loading_keys = []
        if promise:
            self._pinned -= promise.pinned
            promise.release()
        self._promised.discard(tracked.request.request_id)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM admitted the request, and will have `external_tokens` of it loaded."""
        tracked = self._track(request)
        self._count_admission(tracked, external_tokens)
        promise = tracked.promise
        if external_tokens <= 0 or promise is None or tracked.loading:
            return
        block_ids = blocks.get_block_ids()[0]
        start = promise.first_block
        tokens = start * self.block_tokens + external_tokens
        if tokens == promise.tokens:
            keys, tail_tokens = promise.keys, promise.tail_tokens
        else:  # vLLM took less than it was offered; it takes whole blocks then.
            keys, tail_tokens = promise.keys[: external_tokens // self.block_tokens], 0
        parent = self._parent(request, start)
        self._loads.append(Blocks(request.request_id, keys, block_ids[start : start + len(keys)], parent, tail_tokens))
        tracked.loading = True
        # Nobody waits for a tail: vLLM shares no block that is not full.
        tracked.loading_keys = keys[: len(keys) - (tail_tokens > 0)]
        self._loading.update(tracked.loading_keys)
        self._promised.discard(request.request_id)

    def _count_admission(self, tracked: Tracked, external_tokens: int) -> None:
        """Where the prompt's tokens come from, once for each request. What a load then fails to bring is counted by `loads`."""
        if tracked.counted:
            return
        tracked.counted = True
        prompt_tokens = tracked.request.num_prompt_tokens
        reused = min(tracked.reused_tokens, prompt_tokens)
        self.tally.count("prompt_tokens", "pulled", external_tokens)
        self.tally.count("prompt_tokens", "reused", reused)
        self.tally.count("prompt_tokens", "computed", max(prompt_tokens - external_tokens - reused, 0))
        if tracked.expected and prompt_tokens > 1:
            found = external_tokens + reused
            self.tally.count("handovers", "complete" if found >= tracked.expected.tokens else "short")

    # Each step

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """The orders of a step that was just scheduled."""
        self._step += 1
        for request_id in list(self._promised):
            self._unpromise(self._tracked[request_id])
        loads, self._loads = self._loads, []
        release, self._release = self._release, set()
        preempted = set(output.preempted_req_ids or ())
        for request_id in preempted:
            if tracked := self._tracked.get(request_id):
                tracked.last_save_step = 0  # The workers end these saves before they do anything else.
        orders = StepMetadata(self._step, loads, preempted=preempted, release=release, idle=output.total_num_scheduled_tokens == 0)
        if self.is_producer:
            for request_id, new_tokens in output.num_scheduled_tokens.items():
                if tracked := self._tracked.get(request_id):
                    self._order_save(tracked, new_tokens, output, orders)
        if self.config.zero_copy:
            orders.writes = self._writes(output, loads)
        self.tally.gauge("pinned_blocks", self._pinned)
        return orders

    def _writes(self, output: "SchedulerOutput", loads: list[Blocks]) -> list[int]:
        """Blocks that the step writes to: of every request that it computes tokens of, ours or not, of loads, and what vLLM clears and
        copies to."""
        written = {block_id for load in loads for block_id in load.block_ids}
        written.update(output.new_block_ids_to_zero or ())
        written.update(target for _, target in output.kv_cache_block_copies or ())
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            (block_ids,) = output.kv_connector_block_state.get_block_ids(request_id)
            first = computed[request_id]
            written.update(block_ids[first // self.block_tokens : -(-(first + new_tokens) // self.block_tokens)])
        return sorted(written)

    def _order_save(self, tracked: Tracked, new_tokens: int, output: "SchedulerOutput", orders: StepMetadata) -> None:
        """Has the workers publish what this step completes, and on a request's first step what vLLM had of it before: the pool may have
        lost it since, and asking costs next to nothing."""
        request = tracked.request
        if not can_be_cached(request):
            return
        tokens = request.num_computed_tokens + new_tokens
        hashed = len(request.block_hashes)
        prompt_blocks, tail_tokens = divmod(request.num_prompt_tokens, self.block_tokens)
        full_blocks = min(tokens // self.block_tokens, hashed)
        if not (self.config.publish_generated and self.is_consumer):
            full_blocks = min(full_blocks, prompt_blocks)
        first = min(tracked.saved_blocks, full_blocks)
        completes = tokens >= request.num_prompt_tokens and not tracked.published
        with_tail = completes and tail_tokens > 0 and self.config.publish_tail and not tracked.tail_saved
        if (full_blocks > first or with_tail) and output.kv_connector_block_state is not None:
            block_ids = output.kv_connector_block_state.get_block_ids(request.request_id)
            if block_ids is None:
                return
            # The tail follows the prompt's last full block, which on this step is also the last full one unless generated ones are saved.
            if full_blocks > first:
                orders.saves.append(self._blocks(request, first, full_blocks, block_ids[0]))
            if with_tail:
                tail, parent = self._tail(request), self._parent(request, prompt_blocks)
                orders.saves.append(Blocks(request.request_id, [tail], [block_ids[0][prompt_blocks]], parent, tail_tokens))
            tracked.saved_blocks, tracked.tail_saved = full_blocks, tracked.tail_saved or with_tail
            tracked.last_save_step = self._step
        if completes:
            tracked.published = True
            if not self.is_consumer or wants_publish(request.kv_transfer_params):
                # The workers wait for these, and for all before them.
                orders.complete.add(request.request_id)
                tracked.last_save_step = 0

    def _blocks(self, request: "Request", first: int, stop: int, block_ids: list[int]) -> Blocks:
        if self.events and not self._era:
            self.events.ordered(request, first, stop, self.block_tokens)
        return Blocks(request.request_id, self._keys(request, first, stop), block_ids[first:stop], self._parent(request, first))

    # Names of blocks, since the last reset

    def _keys(self, request: "Request", first: int, stop: int) -> list[bytes]:
        return [self._named(key) for key in block_keys(request, first, stop)]

    def _tail(self, request: "Request") -> bytes:
        return self._named(tail_key(request, self.block_tokens))

    def _parent(self, request: "Request", block: int) -> bytes | None:
        return self._keys(request, block - 1, block)[0] if block else None

    def _named(self, key: bytes) -> bytes:
        return kvbm_cxl.chain_key(None, [], self._era + key) if self._era else key

    def reset(self) -> bool:
        """Nothing that was published so far may be found again: vLLM is told so when weights change in place.

        Others may go on with the old weights under the same namespace, so from here on this engine's blocks have names that nobody else
        knows, until it is started again with weights that its namespace tells apart.
        """
        self._era = secrets.token_bytes(16)
        logger.warning(
            "the connector's cache was reset: until it is started again, this engine shares no blocks with others, since nobody can tell "
            "whether they have the same weights"
        )
        return True

    def report(self, output: "KVConnectorOutput") -> None:
        """What the workers of a step say."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._saved_step = max(self._saved_step, report.saved_step)
            for request_id in report.failed_loads:
                if tracked := self._tracked.get(request_id):
                    # vLLM may ask again for the same blocks, which would fail again.
                    tracked.load_failed = True
            if self.events:
                self.events.stored(report.stored, self.workers)
        for request_id in output.finished_recving or ():
            if tracked := self._tracked.get(request_id):
                self._unpromise(tracked)
        if isinstance(report, WorkerReport) and report.spoilt:
            self._evict_spoilt(report.spoilt)

    def _evict_spoilt(self, keys: set[bytes]) -> None:
        self._spoilt.update(dict.fromkeys(keys))
        while len(self._spoilt) > _MAX_SPOILT:
            del self._spoilt[next(iter(self._spoilt))]
        for key in keys & self._spoilt.keys():
            try:
                self._evicted(key)
            except kvbm_cxl.CxlError as error:
                logger.warning("evicting spoilt block %s: %s", key.hex(), error)

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: vLLM must keep its blocks until every worker has released it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        # In a load nothing is being saved: what a preemption interrupted has ended by then, and vLLM keeps the blocks by itself.
        delay = tracked.last_save_step > self._saved_step
        self._unpromise(tracked)
        if delay:
            self._release.add(request.request_id)
        return delay, self._answer(tracked)

    def _answer(self, tracked: Tracked) -> dict[str, Any] | None:
        request = tracked.request
        if not tracked.published or not self._namespaces or self._era:
            return None
        if self.is_consumer and not wants_publish(request.kv_transfer_params):
            return None
        tokens = request.num_prompt_tokens
        if not self.config.publish_tail:
            tokens -= tokens % self.block_tokens
        return Expected(tokens, str(self._namespaces[0])).to_params() if tokens else None

    def take_stats(self) -> CxlStats | None:
        return self.tally.take()

    def close(self) -> None:
        """Unpins everything."""
        for tracked in self._tracked.values():
            self._unpromise(tracked)
        self._tracked.clear()
