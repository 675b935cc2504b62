# SPDX-License-Identifier: Apache-2.0
"""Waiting, with an end, and a port for a server."""

import socket
import time
from collections.abc import Callable
from typing import Any

# A machine with twenty times as much to do as it can is no reason to fail.
PATIENCE_S = 240


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S, pause_s: float = 0.02) -> Any:
    """Waits until `condition()` is true, and returns its value. `what` names the awaited event in the error."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s: {what}"
        time.sleep(pause_s)
    return found


def free_port() -> int:
    """A TCP port that no process listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
