# SPDX-License-Identifier: Apache-2.0
"""Dynamo's kv router knows of every worker that it can have the pool's blocks, also of one that never computed anything."""

import json
import re
import time

import pytest
from graph import counters
from graph.client import get
from graph.counters import COMPUTED, PULLED, REUSED, Counts, Sample
from graph.model import BLOCK_TOKENS
from graph.options import Options
from graph.pool import cxlctl
from graph.workers import POOL_HIT_WEIGHT
from serving import serving, tokens

BLOCKS = 6
PREFIX = tokens("prefix", BLOCKS * BLOCK_TOKENS)
FIRST, *NEXT = [PREFIX + tokens(f"ending {number}", 20 + number) for number in range(40)]
PATIENCE_S = 60
WORKERS = ("prefill-0", "prefill-1")
# The router tells how it chose.
TELLS = {"DYN_LOG": "info,dynamo_kv_router=debug"}
_CHOICE = re.compile(r"for worker_id=(\d+) dp_rank=\S+ with ([\d.]+) effective cached blocks")


def options(**more):
    state = Options.state / "tests-routing"
    return {"prefill": 2, "router": "kv", "connector": "cxl", "state": state, "environment": TELLS, **more}


class Router:
    """What the frontend's router says of its choices of prefill workers."""

    def __init__(self, served):
        self.served = served
        self.log = served.graph.logs / "frontend.log"

    def names(self):
        """Workers by the number that the router has for them."""
        instances = json.loads(get(self.served.graph.port, "/health"))["instances"]
        ports = {worker.rpc_port: name for name, worker in self.served.graph.workers.items()}
        found = {each["instance_id"]: int(each["transport"]["tcp"].partition("/")[0].rpartition(":")[2]) for each in instances}
        return {number: ports[port] for number, port in found.items() if port in ports}

    def overlap(self, prompt):
        """Asks, and tells how many blocks of the prompt the router took each prefill worker to have."""
        before = self.log.stat().st_size
        self.served.graph.ask(prompt, 1)
        names = self.names()
        said = _CHOICE.findall(self.log.read_bytes()[before:].decode(errors="replace"))
        return {names[int(number)]: float(blocks) for number, blocks in said if names.get(int(number)) in WORKERS}

    def overlap_once(self, wanted):
        """The overlap, and how long it took, once `wanted` is true of it: another ending is asked each time."""
        began = time.monotonic()
        for prompt in NEXT:
            overlap = self.overlap(prompt)
            if wanted(overlap):
                return overlap, time.monotonic() - began
            assert time.monotonic() - began < PATIENCE_S, overlap
            time.sleep(0.5)
        pytest.fail(f"the overlap is {overlap}")


def spent(served, before):
    """What each prefill worker has counted since."""
    after = counters.read(served.graph)
    return {name: after[name] - before.get(name, Counts()) for name in WORKERS}


@pytest.fixture(scope="module")
def served():
    with serving([FIRST], **options()) as one:
        yield one


def test_a_worker_that_never_computed_the_prefix_has_it_for_the_router(served):
    router = Router(served)
    before = counters.read(served.graph)
    served.ask(FIRST)
    counters.settled(served.graph, before)
    done = spent(served, before)
    [one] = [name for name in WORKERS if done[name].requests]
    [other] = set(WORKERS) - {one}
    assert done[one].tokens[COMPUTED] == len(FIRST)
    overlap, seconds = router.overlap_once(lambda overlap: overlap.get(other, 0) > 0)
    print(f"overlap {overlap} after {seconds:.1f} s, computed by {one}")
    assert overlap == {one: BLOCKS, other: pytest.approx(BLOCKS * POOL_HIT_WEIGHT)}
    assert spent(served, before)[other] == Counts(), "it was idle all the time"
