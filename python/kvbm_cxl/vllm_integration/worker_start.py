# SPDX-License-Identifier: Apache-2.0
"""Starts before a worker loads its model: reading the weight files, noting weights that vLLM packs while it loads them, and AMX on CPUs.

vLLM makes a connector when the model is loaded, and has no hook for one before that. So the start of every worker is watched, and nothing
is done for an engine that does not use the pool.
"""

import json
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WATCHED = "is_watched_by_kvbm_cxl"


def watch_workers() -> None:
    """Has `begin` called in each worker of this process before it loads a model. Calling it again changes nothing."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    plain = getattr(WorkerWrapperBase, "init_device", None)
    # Where vLLM starts its workers otherwise, files are read after loading, and weights that it packs out of sight are unknown.
    if plain is None or hasattr(plain, _WATCHED):
        return

    @wraps(plain)
    def init_device(self: Any, *positional: Any, **named: Any) -> Any:
        begin(self.vllm_config)
        return plain(self, *positional, **named)

    setattr(init_device, _WATCHED, True)
    WorkerWrapperBase.init_device = init_device


def begin(vllm_config: "VllmConfig") -> None:
    """A worker of an engine is about to load its model."""
    if not uses_pool(vllm_config):
        return
    from vllm.platforms import current_platform

    from . import model_files, weights

    if current_platform.is_cpu():
        weights.watch_packing()
        _ask_for_amx()
    if not vllm_config.kv_transfer_config.get_from_extra_config("model_id", ""):
        model_files.begin(vllm_config)


def _ask_for_amx() -> None:
    """vLLM 0.31 to 0.33 use AMX in attention on CPUs without asking the kernel, which then ends the process (SIGILL). Where a prompt is
    computed, oneDNN asks; a worker that pulls the prompt never runs that code."""
    import torch

    torch.cpu._init_amx()


def uses_pool(vllm_config: "VllmConfig") -> bool:
    """Whether an engine has CxlConnector, alone or among others, or the tier."""
    from . import CONNECTOR_NAME, TIER_TYPE

    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    # Both are named in options of other connectors, at any depth.
    options = json.dumps(transfer.kv_connector_extra_config, default=str)
    return transfer.kv_connector == CONNECTOR_NAME or any(f'"{name}"' in options for name in (CONNECTOR_NAME, TIER_TYPE))
