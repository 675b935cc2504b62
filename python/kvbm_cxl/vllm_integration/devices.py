# SPDX-License-Identifier: Apache-2.0
"""When the memory of a KV cache may be read or written by a copy, on the device where it lies.

Copies run on threads of their own. On a CPU what the forward pass wrote is there when it returns. On a GPU it is only queued: a copy comes
behind an event on the stream of the forward pass, which also orders it behind earlier steps that still use blocks vLLM gave away since. The
GPU itself keeps that order; no thread waits for the event first.
"""

from typing import TYPE_CHECKING

import torch

from .config import ConfigError

if TYPE_CHECKING:
    After = torch.cuda.Event | None
    """What copies come behind; None in the memory of a host."""


def mark(device: torch.device) -> "After":
    """What comes behind this comes behind all work that was queued so far on this thread's stream."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def check(device: torch.device) -> str:
    """The name of the copy engine's device. `ConfigError` for one that it cannot reach."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"CxlConnector cannot copy from and to {device}: it knows CPUs and CUDA devices")
    # With its number: each worker of a group has a GPU of its own.
    return str(device) if device.type == "cuda" else device.type
