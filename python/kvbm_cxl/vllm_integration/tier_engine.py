# SPDX-License-Identifier: Apache-2.0
"""What a tier learns of its engine by other ways than vLLM's interface of tiers.

vLLM hands a tier the model's name and the sizes of its blocks. What else shapes the bytes of a chunk is asked of the engine in whose
constructor the tier is made, and of its workers. Weights that are replaced in place are noticed as CxlConnector notices them
(`engine_watch`, `weights`); the chunks in vLLM's own memory may then be of the earlier ones, and are what a tier is given to store, so the
tier rests until vLLM has emptied both its prefix cache and its primary tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import engine_watch
from .identity import attention_backend, engine_fields, loading
from .log import logger
from .settings import digest
from .weights import UNKNOWN, caller_of, combine, fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class Engine:
    """The engine of a tier: its configuration, and its core, which asks the workers."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"
    core: Any

    def fields(self) -> dict[str, Any]:
        """What shapes the bytes of chunks besides what vLLM tells a tier."""
        groups = self.kv_cache_config.kv_cache_groups
        return {
            "revision": self.vllm_config.model_config.revision or "",
            "cache_dtype": self.vllm_config.cache_config.cache_dtype,
            "loaded": loading(self.vllm_config),
            **engine_fields(self.vllm_config),
            "layout": str(self.kv_cache_config.kv_cache_layout),
            "specs": digest("\n".join(repr(group.kv_cache_spec) for group in groups)),
            "backends": self._ask(_backends, [name for group in groups for name in group.layer_names]),
        }

    def fingerprint(self) -> bytes:
        """That of the weights in the memory of all workers; `UNKNOWN` where there is none."""
        try:
            return combine(self._ask(_fingerprint))
        except Exception as error:  # Whatever a model is made of, or an executor says: without a fingerprint nothing is shared.
            logger.warning("tier: no fingerprint of the weights in memory: %s: %s", type(error).__name__, error)
            return UNKNOWN

    def _ask(self, function: Any, *arguments: Any) -> list[Any]:
        """What each worker answers, in the order of their ranks."""
        executor = self.core.model_executor
        # The class's own: calls of an instance are watched.
        return type(executor).collective_rpc(executor, function, args=arguments)


def _fingerprint(worker: Any) -> bytes:
    return fingerprint(worker.get_model())


def _backends(worker: Any, layer_names: Sequence[str]) -> str:
    there = worker.vllm_config.compilation_config.static_forward_context
    return attention_backend(worker.vllm_config, [name for name in layer_names if name in there])


def engine_of_this_call() -> Engine | None:
    """The engine in whose constructor this call is; None elsewhere."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector, core = caller_of(KVConnectorBase_V1), engine_watch.engine_of_this_call()
    if connector is None or core is None:
        return None
    return Engine(connector._vllm_config, connector._kv_cache_config, core)


class Weights:
    """Whether the weights are those that a tier's namespace names. Used by the scheduler's thread alone."""

    def __init__(self, engine: Engine | None) -> None:
        self.name = b""
        """Part of the namespace; empty with the weights of the start."""
        self._engine = engine
        self._start = self._latest = engine.fingerprint() if engine else UNKNOWN
        self._suspicion = ""
        self._resting = self._local_was_reset = self._follows_resets = False
        if engine is None:
            logger.warning("tier: it runs outside an engine: it cannot detect weights that are replaced in memory")
        else:
            engine_watch.watch_calls(engine.core, self)

    def weights_may_change(self, why: str) -> None:
        self._suspicion = why

    def adapters_may_change(self) -> None:
        """Names and paths of adapters are in vLLM's hashes."""

    def local_cache_was_reset(self) -> None:
        self._look()
        self._local_was_reset = True

    def are_named(self) -> bool:
        """Whether chunks may be looked up and stored. Asks the workers once after whatever may have changed them."""
        scheduler = getattr(self._engine.core, "scheduler", None) if self._engine else None
        if scheduler is not None and not self._follows_resets:
            self._follows_resets = True
            engine_watch.watch_resets(scheduler.kv_cache_manager, self)
        self._look()
        return not self._resting

    def primary_was_reset(self) -> bool:
        """vLLM empties its primary tier. True: the tier has another name from now on."""
        self._look()
        if not (self._resting and self._local_was_reset) or UNKNOWN in (self._start, self._latest):
            return False
        self._resting = False
        before, self.name = self.name, b"" if self._latest == self._start else self._latest
        return self.name != before

    def _look(self) -> None:
        why, self._suspicion = self._suspicion, ""
        if not why or self._engine is None:
            return
        now = self._engine.fingerprint()
        if now == self._latest != UNKNOWN:
            return
        self._latest, self._resting, self._local_was_reset = now, True, False
        logger.warning(
            "tier: the weights %s (noticed after %s): it neither stores nor finds chunks until vLLM's prefix cache is reset together with "
            "the connector's (reset_prefix_cache with reset_connector)",
            "are unknown" if UNKNOWN in (now, self._start) else "have changed",
            why,
        )
