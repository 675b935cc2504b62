# SPDX-License-Identifier: Apache-2.0
"""When the graph answers, with progress on the way."""

import json
import re
import time

from .client import RequestFailed, get
from .errors import GraphError

POLL_S = 0.25
# What a worker's log says on its way, in order; the last that stands there is where it is.
STAGES = (
    ("importing", r""),
    ("loading the model", r"Starting to load model|Initializing a V1 LLM engine"),
    ("making the KV cache", r"KV cache size|GPU KV cache"),
    ("registering", r"init engine|Registering model"),
)


def stage(log: str) -> str:
    """Where a worker is."""
    return next(name for name, pattern in reversed(STAGES) if re.search(pattern, log))


def known_ports(port: int, timeout_s: float = 2) -> set[int]:
    """Ports of the workers that the frontend knows and would send requests to; none before it answers."""
    try:
        said = json.loads(get(port, "/health", timeout_s))
        serving = [instance["transport"]["tcp"] for instance in said["instances"] if instance["endpoint"] == "generate"]
        return {int(address.partition("/")[0].rpartition(":")[2]) for address in serving}
    except (OSError, RequestFailed, ValueError, KeyError, TypeError):
        return set()


def wait_until_ready(graph) -> float:
    """Until all workers that run are known and a request is answered; seconds it took. Raises GraphError."""
    began, shown, slowness = time.monotonic(), {}, graph.options.slowness
    while True:
        graph.check()
        passed = time.monotonic() - began
        for name in graph.workers:
            where = stage(graph.children[name].text())
            if shown.get(name) != where:
                shown[name] = where
                graph.say(f"  {passed:4.0f} s  {name}: {where}")
        if passed > graph.options.ready_timeout_s:
            raise GraphError(f"not ready after {passed:.0f} s: {shown}; logs in {graph.logs}")
        if graph.live_ports() <= known_ports(graph.port, 2 * slowness):
            try:
                graph.ask("ready?", max_tokens=1, timeout_s=60 * slowness)
                break
            except RequestFailed as error:
                shown["frontend"] = str(error)
        time.sleep(POLL_S * slowness)
    passed = time.monotonic() - began
    graph.say(f"  {passed:4.0f} s  the graph answers on port {graph.port}")
    return passed
