# SPDX-License-Identifier: Apache-2.0
"""Ends workers at moments that hurt, as the pool shows them: nothing in what runs knows that it is being tested."""

import contextlib
import os
import random
import signal
import time

from graph.sweep import members

TIMEOUT_S = 90


def _signal(child, number):
    for entry in members(child.session()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, number)


def kill_while(served, name, caught, seed):
    """SIGKILL to a worker and its children at a moment for which `caught()` is true.

    It is stopped for an instant again and again, at random times, to look at the pool while nothing of it moves. Fails where no such moment
    comes in time.
    """
    child, choose, deadline = served.graph.children[name], random.Random(seed), time.monotonic() + TIMEOUT_S
    while True:
        _signal(child, signal.SIGSTOP)
        try:
            if caught():
                child.kill()
                return
        finally:
            _signal(child, signal.SIGCONT)
        assert time.monotonic() < deadline, f"{name} was never caught in the act"
        time.sleep(choose.uniform(0.001, 0.02))


def publishing(served, name):
    """Whether a worker is writing a block into the pool now."""
    slot = served.slot(name)
    return lambda: any(cell.get("stamp", {}).get("owner") == slot for cell in served.cells("--state", "writing")["cells"])


def pulling(served, name):
    """Whether a worker has blocks pinned, as it has while it pulls them."""
    slot = served.slot(name)
    return lambda: any(slot in cell["pinned_by"] for cell in served.cells()["cells"])
