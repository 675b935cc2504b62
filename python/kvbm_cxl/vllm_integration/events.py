# SPDX-License-Identifier: Apache-2.0
"""KV events of pool blocks, in vLLM's classes, for routers that count prefixes.

Every engine announces all blocks of its namespaces, those of other engines included: to a router each worker has them, at the price of
the tier that `events_medium` names. A thread finds the pool's blocks (`announcer`); the forward path never waits for it.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import kvbm_cxl

from .announcer import Announcer, RoundChanges
from .config import ConnectorConfig
from .descriptions import Description, description_bytes
from .keys import block_key, event_extra_keys
from .limits import trim
from .log import logger
from .pool_access import PoolAccess
from .publisher import Outlet
from .stats import Tally

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

# Blocks that were ordered to be published and of which nothing is heard yet. One that is forgotten is described when it is published again.
_MAX_ORDERED = 1 << 16
# Events that wait for a step. Beyond, rounds wait as well and report later changes then.
_MAX_WAITING = 1 << 13
_MAX_BATCH = 256
# Of the thread's time, rounds take at most one part in so many.
_IDLE_PARTS = 20
# Publishers drop events while no router has subscribed: while an engine starts, everything is announced again, so many seconds after the
# beginning. The same after vLLM has announced that its blocks are gone: routers forget all blocks of the engine then.
_AGAIN_S = (2, 5, 10, 20, 40, 80)
# A router that starts later knows every block after this time: all of them are announced again, a few in each round.
_REFRESH_S = 300.0
_END_S = 10
# Interval at which an engine looks for changes in the pool.
PERIOD_S = 0.5


def stored_event(description: Description, medium: str) -> "KVCacheEvent":
    """A block is there."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    parent = description.parent_hash
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(BlockHash(description.block_hash))],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
        token_ids=description.token_ids,
        block_size=len(description.token_ids),
        lora_id=description.lora_id,
        lora_name=description.lora_name,
        medium=medium,
        extra_keys=None if description.extra_keys is None else [description.extra_keys],
    )


def removed_event(block_hashes: Sequence[bytes], medium: str) -> "KVCacheEvent":
    """Blocks are gone."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return BlockRemoved(block_hashes=[maybe_convert_block_hash(BlockHash(each)) for each in block_hashes], medium=medium)


class PoolEvents:
    """Events of one engine. All but the thread's own work is called by vLLM's scheduler."""

    def __init__(self, config: ConnectorConfig, access: PoolAccess, outlet: Outlet, tally: Tally) -> None:
        self._config, self._access, self._outlet, self._tally = config, access, outlet, tally
        self._ordered: OrderedDict[bytes, Description] = OrderedDict()
        self._counts: dict[bytes, int] = {}
        self._published: deque[Description] = deque(maxlen=_MAX_ORDERED)
        self._ready: deque[KVCacheEvent] = deque()
        self._ending = threading.Event()
        self._is_cleared = False
        self.are_readable = True
        """Whether this engine can read the blocks: not with other weights in memory than at its start."""
        self._thread: threading.Thread | None = None

    def begin(self, namespaces: list["kvbm_cxl.Namespace"], block_bytes: int, block_tokens: int) -> None:
        """Starts the thread, where the pool has small cells for descriptions."""
        pool = self._access.pool
        if not namespaces or self._thread is not None or pool is None:
            return
        wanted = description_bytes(block_tokens)
        fitting = min((size for size in pool.cell_bytes if size >= wanted), default=0)
        if not 0 < fitting < block_bytes:
            logger.warning(
                "pool %s has no cells of %d bytes or slightly more for block descriptions: its blocks are not announced to routers. "
                "Format it with two sizes, `cxlctl format --cells %d:75%% --cells %d:1%%`",
                self._config.pool,
                wanted,
                block_bytes,
                -(-wanted // 1024) * 1024,
            )
            return
        announcer = Announcer(self._access, namespaces, block_tokens, self._tally)
        self._thread = self._access.failures.start_thread("kvbm-cxl-events", "KV events of the pool", lambda: self._run(announcer))

    def note_order(self, request: "Request", first: int, stop: int, block_tokens: int) -> None:
        """Blocks `first` to `stop` of a request are about to be published."""
        if self._thread is None:
            return
        lora = request.lora_request
        for index in range(first, stop):
            block_hash, start = bytes(request.block_hashes[index]), index * block_tokens
            self._ordered[block_key(block_hash)] = Description(
                position=index,
                block_hash=block_hash,
                parent_hash=bytes(request.block_hashes[index - 1]) if index else None,
                token_ids=list(request.all_token_ids[start : start + block_tokens]),
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                extra_keys=event_extra_keys(request, start, start + block_tokens),
            )
        trim(self._ordered, _MAX_ORDERED)

    def note_stored(self, stored: Mapping[bytes, int], workers: int) -> None:
        """Workers have these keys in the pool now, so many each."""
        for key, count in stored.items():
            count += self._counts.pop(key, 0)
            if count < workers:
                self._counts[key] = count
            elif description := self._ordered.pop(key, None):
                self._published.append(description)
        trim(self._counts, _MAX_ORDERED)

    def note_cleared(self) -> None:
        """Routers are about to forget all blocks of this engine: vLLM has announced that its own are gone."""
        self._is_cleared = True

    def take(self) -> list["KVCacheEvent"]:
        """Events that have not left yet."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    # The thread

    def _run(self, announcer: Announcer) -> None:
        began_s, again_s = time.monotonic(), list(_AGAIN_S)
        pause_s, refreshed_s = 0.0, began_s
        while not self._ending.wait(pause_s):
            pause_s = PERIOD_S
            if self._is_cleared:
                # The first time is late enough for vLLM's own event, which this thread's must not overtake.
                self._is_cleared, began_s, again_s = False, time.monotonic(), list(_AGAIN_S)
            if len(self._ready) > _MAX_WAITING:
                continue
            started_s, now_s = time.thread_time(), time.monotonic()
            part, refreshed_s = (now_s - refreshed_s) / _REFRESH_S, now_s
            published = [self._published.popleft() for _ in range(len(self._published))] if self.are_readable else []
            try:
                if again_s and now_s - began_s >= again_s[0]:
                    del again_s[0]
                    announcer.again()
                announcer.refresh(part)
                news = announcer.round(published) if self.are_readable else announcer.withdraw()
                self._hand_over(news)
            except Exception as error:  # A router that knows less routes less well; the next round continues.
                self._access.failures.report("a round of KV events of the pool", error)
                continue
            took_s = time.thread_time() - started_s
            pause_s = max(pause_s if news.is_all else 0.0, _IDLE_PARTS * took_s if news.is_all else took_s)

    def _hand_over(self, news: RoundChanges) -> None:
        medium = self._config.events_medium
        events = [removed_event(news.removed, medium)] if news.removed else []
        events += [stored_event(description, medium) for description in news.stored]
        for first in range(0, len(events), _MAX_BATCH):
            batch = events[first : first + _MAX_BATCH]
            # What waits for a step goes first.
            if self._ready or not self._outlet.publish(batch):
                self._ready.extend(batch)
