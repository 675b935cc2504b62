# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which blocks the workers publish in a step, and when a finished request's blocks may be freed."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .block_names import BlockNames
from .config import ConnectorConfig
from .diagnosis import Reasons
from .events import PoolEvents
from .groups import Group, Kind, Shape, blocks_of
from .handover import Expected, wants_publish
from .metadata import Blocks, StepMetadata
from .recording import Recording
from .request_state import RequestState
from .support import can_be_cached

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# vLLM's block that stands for none.
NULL_BLOCK = 0


@dataclass
class Saving:
    """Orders to publish, and how far the workers have carried them out."""

    config: ConnectorConfig
    names: BlockNames
    reasons: Reasons
    is_producer: bool
    is_consumer: bool
    events: PoolEvents | None = None
    recording: Recording | None = None
    _saved_step: int = 0
    """Every save ordered up to this step is over."""
    _audited_step: int = 0
    """Latest step with blocks that are only compared."""
    _release: set[str] = field(default_factory=set)

    def order(self, requests: dict[str, RequestState], output: "SchedulerOutput", orders: StepMetadata) -> None:
        """Adds to a step's orders what the workers are to publish, and what they may release."""
        orders.release, self._release = self._release, set()
        for request_id in orders.preempted:
            if tracked := requests.get(request_id):
                tracked.computed_from = None
                tracked.last_save_step = 0  # The workers end these saves before they do anything else.
        now_s = time.monotonic()
        for request_id in output.num_scheduled_tokens:
            if (tracked := requests.get(request_id)) and tracked.begun_s is None:
                tracked.begun_s = now_s
            # Before any other request of this step can be taken for right.
            if (tracked := requests.get(request_id)) and tracked.session:
                tracked.session.right(tracked.request)
                self.names.look_at(tracked.session)
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            if tracked := requests.get(request_id):
                if tracked.computed_from is None:
                    tracked.computed_from = tracked.request.num_computed_tokens
                if tracked.is_audited:
                    orders.audited.add(request_id)
                if tracked.tail_is_fresh:
                    orders.grows.add(request_id)
                    tracked.tail_is_fresh = False
                if self.is_producer:
                    self._order_save(tracked, new_tokens, output, orders)
                elif tracked.is_audited:
                    self._order_audit(tracked, new_tokens, output, orders)

    def note_saved(self, step: int) -> None:
        """All workers have ended their saves up to this step."""
        self._saved_step = max(self._saved_step, step)

    def finish(self, tracked: RequestState) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: vLLM must keep its blocks until every worker has released it."""
        # In a load nothing is being saved: what a preemption interrupted has ended by then, and vLLM keeps the blocks by itself.
        delay = tracked.last_save_step > self._saved_step
        if delay:
            self._release.add(tracked.request.request_id)
        return delay, self._answer(tracked)

    def _is_handed_over(self, request: "Request") -> bool:
        """Whether another engine decodes the request. Only then its prompt's tail is published: the tail takes a cell of a whole block,
        and an engine that decodes by itself has it, or computes it with the last token, which it has to compute anyway."""
        return not self.is_consumer or wants_publish(request.kv_transfer_params)

    def _order_save(self, tracked: RequestState, new_tokens: int, output: "SchedulerOutput", orders: StepMetadata) -> None:
        """Has the workers publish what this step completes, and on a request's first step what vLLM had of it before: the pool may have
        lost it since, and asking costs next to nothing."""
        request = tracked.request
        if not can_be_cached(request) or not self.names.may_publish(tracked):
            return
        shape = self.names.shape
        tokens = request.num_computed_tokens + new_tokens
        hashed_tokens = self.names.hashed_tokens(tracked)
        end = min(tokens, hashed_tokens)
        if not (self.config.publish_generated and self.is_consumer):
            end = min(end, request.num_prompt_tokens)
        is_handed_over = self._is_handed_over(request)
        tail_tokens = request.num_prompt_tokens % shape.hash_tokens if shape.takes_tails and is_handed_over else 0
        completes = tokens >= request.num_prompt_tokens and not tracked.published
        has_parent = hashed_tokens >= request.num_prompt_tokens - tail_tokens
        with_tail = completes and tail_tokens > 0 and has_parent and not tracked.tail_saved
        state = output.kv_connector_block_state
        offered = state.boundary_state_offloads.get(request.request_id, ()) if state is not None and shape.has_states else ()
        if state is not None and (end // shape.hash_tokens * shape.hash_tokens > tracked.saved_tokens or with_tail or offered):
            block_ids = state.get_block_ids(request.request_id)
            if block_ids is None:
                return
            saves = self._full_blocks(tracked, tracked.saved_tokens, end, block_ids)
            if with_tail:
                # It follows the prompt's last full block, which on this step is also the last full one unless generated ones are saved.
                saves += [self._tail(tracked, position, tail_tokens, block_ids) for position in range(len(shape.groups))]
            saves += self._states(tracked, end, offered)
            orders.saves += saves
            tracked.saved_tokens, tracked.tail_saved = max(end, tracked.saved_tokens), tracked.tail_saved or with_tail
            tracked.tail_is_fresh |= with_tail
            if saves:
                tracked.last_save_step = orders.step
                if self.recording:
                    self.recording.record_publish(saves)
        if completes:
            tracked.published = True
            if is_handed_over:
                # The workers wait for these, and for all before them; where answers go first, not for the copies.
                orders.complete.add(request.request_id)
                if not self.config.publish_behind:
                    tracked.last_save_step = 0

    def _order_audit(self, tracked: RequestState, new_tokens: int, output: "SchedulerOutput", orders: StepMetadata) -> None:
        """Has the workers of an engine that publishes nothing compare what this step completes of a prompt with the pool's blocks."""
        request, state = tracked.request, output.kv_connector_block_state
        block_ids = state.get_block_ids(request.request_id) if state is not None and self.names.may_publish(tracked) else None
        end = min(request.num_computed_tokens + new_tokens, self.names.hashed_tokens(tracked), request.num_prompt_tokens)
        if block_ids is None or end <= tracked.saved_tokens:
            return
        offered = state.boundary_state_offloads.get(request.request_id, ()) if self.names.shape.has_states else ()
        for blocks in self._full_blocks(tracked, tracked.saved_tokens, end, block_ids) + self._states(tracked, end, offered):
            if blocks.found < len(blocks.keys):
                blocks.only_audited = True
                orders.saves.append(blocks)
                tracked.last_save_step = self._audited_step = orders.step
        tracked.saved_tokens = end

    @property
    def reads_blocks(self) -> bool:
        """Whether workers may still be reading blocks that were ordered before."""
        return self.is_producer or self._audited_step > self._saved_step

    def _full_blocks(self, tracked: RequestState, begin: int, end: int, block_ids: tuple[list[int], ...]) -> list[Blocks]:
        """The full blocks that the tokens `begin` to `end` complete, as far as later prefixes may need them."""
        shape, request, found = self.names.shape, tracked.request, []
        # Routers know blocks by vLLM's hashes, which tell neither weights nor adapters apart.
        if self.events and self.is_producer and not (self.names.era.name or tracked.adapter):
            block_tokens = shape.groups[0].block_tokens
            self.events.note_order(request, begin // block_tokens, end // block_tokens, block_tokens)
        for position, group in enumerate(shape.groups):
            if group.kind is Kind.STATE:
                continue
            ids, done = block_ids[group.index], tracked.next_blocks.get(position, 0)
            every_tokens, shared_tokens = self.config.window_every_tokens, tracked.shared_tokens
            wanted = shape.worth_storing(group, begin, end, request.num_prompt_tokens, every_tokens, shared_tokens)
            # vLLM has let go of those that no later token of this request needs.
            there = range(done, len(ids) * group.slices)
            blocks = [
                block for block in wanted if block in there and (group.kind is Kind.FULL or ids[block // group.slices] != NULL_BLOCK)
            ]
            for first, stop in _runs(blocks):
                keys, parent = self.names.keys(tracked, first, stop, position), self.names.parent(tracked, first, position)
                places = group.places(ids, range(first, stop))
                known = _count_found(tracked, group, first, stop)
                adapter = tracked.adapter_in_use
                found.append(Blocks(request.request_id, keys, places, parent, adapter=adapter, group=position, found=known))
            if blocks:
                tracked.next_blocks[position] = blocks[-1] + 1
        return found

    def _tail(self, tracked: RequestState, position: int, tail_tokens: int, block_ids: tuple[list[int], ...]) -> Blocks:
        group = self.names.shape.groups[position]
        block = tracked.request.num_prompt_tokens // group.block_tokens
        tail, parent = self.names.tail(tracked, position), self.names.parent(tracked, block, position)
        places = group.places(block_ids[group.index], [block])
        return Blocks(tracked.request.request_id, [tail], places, parent, tail_tokens, tracked.adapter_in_use, position)

    def _states(self, tracked: RequestState, end: int, offered: Iterable[tuple[int, int, int]]) -> list[Blocks]:
        """States of recurrent layers that vLLM keeps at the end of blocks; (group, block, tokens before the boundary) of each."""
        shape, found = self.names.shape, []
        for index, block_id, boundary in offered:
            for position, group in enumerate(shape.groups):
                if group.index == index and group.kind is Kind.STATE and boundary <= end and boundary % shape.align_tokens == 0:
                    block = boundary // group.block_tokens - 1
                    keys, parent = self.names.keys(tracked, block, block + 1, position), self.names.parent(tracked, block, position)
                    adapter, known = tracked.adapter_in_use, int(boundary <= (tracked.computed_from or 0))
                    found.append(Blocks(tracked.request.request_id, keys, [block_id], parent, 0, adapter, position, True, known))
        return found

    def _answer(self, tracked: RequestState) -> dict[str, Any] | None:
        request = tracked.request
        if wants_publish(request.kv_transfer_params) and not self.is_producer:
            self.reasons.cannot_publish(request.request_id)
        # The answers of a session are its own.
        if not tracked.published or tracked.stale or tracked.session or not self.names.namespaces:
            return None
        if not self._is_handed_over(request):
            return None
        tokens = self.names.shape.reach(request.num_prompt_tokens, with_tail=True)
        if not tokens:
            return None
        facts = self.names.facts(tracked)
        computed_ms = None if tracked.begun_s is None else round((time.monotonic() - tracked.begun_s) * 1000)
        return Expected(tokens, facts.pop("namespace"), facts, computed_ms).to_params()


def _count_found(tracked: RequestState, group: Group, first: int, stop: int) -> int:
    """Of the blocks `first` to `stop` of a request, how many lead that hold a token which it did not compute."""
    known = -(-(tracked.computed_from or 0) // group.block_tokens)
    return min(max(known - first, 0), stop - first)


def taken_blocks(output: "SchedulerOutput", loads: list[Blocks], shape: Shape) -> list[int]:
    """Blocks that the step's requests and loads write to from now on and did not before. Those of a prefix that vLLM had are not among
    them."""
    taken = {block_id for load in loads for block_id in blocks_of(load.block_ids, shape.groups[load.group].slices)}
    taken.update(output.new_block_ids_to_zero or ())
    taken.update(target for _, target in output.kv_cache_block_copies or ())
    # Groups that hold nothing of a prefix take blocks from the others, too.
    tokens = {group.index: group.block_tokens * group.slices for group in shape.groups}
    cached = output.scheduled_cached_reqs
    begun = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    for request_id, rows, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
        if request_id in cached.resumed_req_ids:
            begun.append((rows, computed))
        else:
            taken.update(block_id for row in rows or () for block_id in row)
    for rows, computed in begun:
        for index, row in enumerate(rows):
            taken.update(row[computed // tokens[index] :] if index in tokens else row)
    # vLLM 0.32 has no such rows any more.
    for rows in (getattr(output, "block_table_updates", None) or {}).values():
        taken.update(block_id for row in rows for block_id in row)
    taken.discard(NULL_BLOCK)
    return sorted(taken)


def _runs(blocks: list[int]) -> Iterable[tuple[int, int]]:
    """Stretches of numbers without a gap: first, and one past the last."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[start], blocks[at - 1] + 1
            start = at
