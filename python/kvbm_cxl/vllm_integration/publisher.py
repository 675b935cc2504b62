# SPDX-License-Identifier: Apache-2.0
"""vLLM's publisher of KV events, for events that do not wait for a step.

vLLM takes a connector's events at the end of each step. An engine without requests takes none, and blocks for a request: exactly then a
router has to learn that it can have what others have computed. There is no hook by which a connector reaches the publisher, whose
`publish` may be called from any thread; so its factory is asked to tell us of the next publisher that it makes. Where vLLM has changed
and this does not work, events leave with the next step.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .log import logger

if TYPE_CHECKING:
    from vllm.distributed.kv_events import EventPublisher, KVCacheEvent


class Outlet:
    """Where events can leave at any time, once vLLM has made its publisher."""

    def __init__(self) -> None:
        self._publisher: EventPublisher | None = None
        self._lock = threading.Lock()

    def expect(self) -> None:
        """Has the factory tell of the next publisher that it makes: that of the scheduler whose connector is being made."""
        from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

        known = getattr(EventPublisherFactory, "_registry", None)
        if not isinstance(known, dict) or known.get("zmq") is not ZmqEventPublisher:
            logger.info("KV events of the pool leave with vLLM's steps only: vLLM's event publisher has an unknown type")
            return

        def make(*positional, **named) -> ZmqEventPublisher:
            known["zmq"] = ZmqEventPublisher
            publisher = ZmqEventPublisher(*positional, **named)
            with self._lock:
                self._publisher = publisher
            return publisher

        known["zmq"] = make

    def publish(self, events: Sequence["KVCacheEvent"]) -> bool:
        """Hands events over. False: there is no publisher, or it is closed."""
        from vllm.distributed.kv_events import KVEventBatch

        with self._lock:
            publisher = self._publisher
        if publisher is None:
            return False
        try:
            publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))
        except RuntimeError as error:
            logger.debug("vLLM's publisher of KV events: %s", error)
            with self._lock:
                self._publisher = None
            return False
        return True
