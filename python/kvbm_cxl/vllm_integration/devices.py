# SPDX-License-Identifier: Apache-2.0
"""When the memory of a KV cache may be read or written by a copy, on the device where it lies.

Copies run on threads of their own. On a CPU what the forward pass wrote is there when it returns. On a GPU it is only queued: a copy has to
wait for an event on the stream of the forward pass, which also orders it behind earlier steps that still use blocks vLLM gave away since.
"""

from collections.abc import Callable

import torch

from .config import ConfigError

Fence = Callable[[], None]


def fence(device: torch.device) -> Fence:
    """What a copy calls before it touches memory that work queued so far on this thread's stream reads or writes."""
    if device.type == "cpu":
        return _nothing
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _nothing() -> None:
    pass


def check(device: torch.device) -> str:
    """The name of the copy engine's device. `ConfigError` for one that it cannot reach."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"CxlConnector cannot copy from and to {device}: it knows CPUs and CUDA devices")
    # With its number: each worker of a group has a GPU of its own.
    return str(device) if device.type == "cuda" else device.type
