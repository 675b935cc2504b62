# SPDX-License-Identifier: Apache-2.0
"""What an engine does that may change its weights, its adapters, or vLLM's own prefix cache.

vLLM 0.31 has a hook for one of these alone (`reset_cache`, on a reset that names the connector). The rest is noticed where it passes
through: all calls to the workers (`reload_weights`, `update_weights`, `wake_up`, `add_lora`, functions of an RL framework) go through the
executor's `collective_rpc`, and every reset goes through the KV cache manager.
"""

from collections.abc import Callable
from typing import Any, Protocol

from .log import logger
from .weights import caller_of

# Calls that leave weights and adapters as they are. Any other one is taken to change them: a needless fingerprint costs milliseconds.
_HARMLESS = frozenset(
    {
        "check_health",
        "execute_dummy_batch",
        "execute_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "synchronize_device",
        "take_draft_token_ids",
    }
)
_OF_ADAPTERS = frozenset({"add_lora", "remove_lora"})


class Watcher(Protocol):
    """What the scheduler's side learns of the engine."""

    def weights_may_change(self, why: str) -> None: ...

    def adapters_may_change(self) -> None: ...

    def local_cache_was_reset(self) -> None: ...


def engine_of_this_call() -> Any | None:
    """vLLM's engine core in whose constructor this call is; None elsewhere."""
    from vllm.v1.engine.core import EngineCore

    return caller_of(EngineCore)


def watch_calls(engine: Any | None, watcher: Watcher) -> bool:
    """Has `watcher` told of calls to the workers. False: there is no way to know of them."""
    executor = getattr(engine, "model_executor", None)
    call = getattr(executor, "collective_rpc", None)
    if call is None:
        logger.warning(
            "CxlConnector cannot see calls to vLLM's workers: after weights are replaced in place, reset the connector as well "
            "(reset_prefix_cache with reset_connector)"
        )
        return False

    def collective_rpc(method: str | Callable, *positional: Any, **named: Any) -> Any:
        if method in _HARMLESS:
            return call(method, *positional, **named)
        try:
            return call(method, *positional, **named)
        finally:  # Also one that failed may have changed some.
            if method in _OF_ADAPTERS:
                watcher.adapters_may_change()
            else:
                watcher.weights_may_change(f"a call of {method if isinstance(method, str) else 'a function'} on the workers")

    executor.collective_rpc = collective_rpc
    return True


def watch_resets(kv_cache_manager: Any, watcher: Watcher) -> None:
    """Has `watcher` told of resets of vLLM's own prefix cache."""
    reset = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        done = reset()
        if done:
            watcher.local_cache_was_reset()
        watcher.weights_may_change("a reset of vLLM's prefix cache")
        return done

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache


def watch_cleared(kv_cache_manager: Any, cleared: Callable[[], None]) -> None:
    """Has `cleared` called when vLLM is about to publish that all of its blocks are gone, whatever made it empty its prefix cache."""
    from vllm.distributed.kv_events import AllBlocksCleared

    take = kv_cache_manager.take_events

    def take_events() -> Any:
        events = take()
        if any(isinstance(event, AllBlocksCleared) for event in events or ()):
            cleared()
        return events

    kv_cache_manager.take_events = take_events
