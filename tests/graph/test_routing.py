# SPDX-License-Identifier: Apache-2.0
"""Dynamo's kv router knows of every worker that it can have the pool's blocks, also of one that never computed anything."""

import contextlib
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from graph import counters
from graph.client import get
from graph.counters import COMPUTED, PULLED, Counts, Sample
from graph.model import BLOCK_TOKENS
from graph.pool import cxlctl
from graph.workers import POOL_HIT_WEIGHT
from serving import serving, tokens

BLOCKS = 6
PREFIX = tokens("prefix", BLOCKS * BLOCK_TOKENS)
FIRST = PREFIX + tokens("ending", 20)
PATIENCE_S = 60
WORKERS = ("prefill-0", "prefill-1")
_CHOICE = re.compile(r"Selected worker .*worker_id=(\d+) worker_type=prefill .*effective_cached_blocks=([\d.]+)")
ENDPOINT = "serve.prefill.generate"
OPTIONS = {"prefill": 2, "router": "kv", "connector": "cxl"}


class View:
    """A router of Dynamo's beside the frontend's: it gets the same events, and can be asked what it knows."""

    def __init__(self, served):
        self.served = served
        command = [sys.executable, str(Path(__file__).with_name("router_view.py")), ENDPOINT, str(BLOCK_TOKENS), str(POOL_HIT_WEIGHT)]
        with (served.graph.logs / "view.log").open("w") as log:
            self.process = subprocess.Popen(
                command, env=served.graph.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def names(self):
        """Workers by the number that routers have for them."""
        instances = json.loads(get(self.served.graph.port, "/health"))["instances"]
        ports = {worker.rpc_port: name for name, worker in self.served.graph.workers.items()}
        found = {each["instance_id"]: int(each["transport"]["tcp"].partition("/")[0].rpartition(":")[2]) for each in instances}
        return {number: ports[port] for number, port in found.items() if port in ports}

    def overlap(self, prompt):
        """By worker: blocks of the prompt in its own memory, and blocks beyond that in the pool."""
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, (self.served.graph.logs / "view.log").read_text()[-2000:]
        names = self.names()
        rows = {names.get(row["worker_id"]): row for row in json.loads(line)["workers"]}
        return {name: (rows[name]["device_blocks"], rows[name]["disk_extension_blocks"]) for name in WORKERS if name in rows}

    def overlap_once(self, prompt, wanted):
        """How long it took until the overlap was as wanted."""
        began = time.monotonic()
        while (overlap := self.overlap(prompt)) != wanted:
            assert time.monotonic() - began < PATIENCE_S, f"{overlap}, not {wanted}"
            time.sleep(0.1)
        return time.monotonic() - began


@contextlib.contextmanager
def viewing(served):
    view = View(served)
    try:
        yield view
    finally:
        view.close()


def chosen(served, since=0):
    """Prefill workers that the frontend's router chose, in order, each with the blocks that it took them to have."""
    text = (served.graph.logs / "frontend.log").read_bytes()[since:].decode(errors="replace")
    return [(int(number), float(blocks)) for number, blocks in _CHOICE.findall(text)]


def spent(served, before):
    """What each prefill worker has counted since."""
    after = counters.read(served.graph)
    return {name: after[name] - before.get(name, Counts()) for name in WORKERS}


@pytest.fixture(scope="module")
def served():
    with serving([FIRST], **OPTIONS) as one:
        yield one


@pytest.fixture(scope="module")
def view(served):
    with viewing(served) as one:
        yield one


@pytest.fixture(scope="module")
def computed(served):
    """Has the prefix computed; the worker that did, the one that did not, and what was counted before."""
    before = counters.read(served.graph)
    served.ask(FIRST)
    counters.wait_settled(served.graph, before)
    done = spent(served, before)
    [one] = [name for name in WORKERS if done[name].requests]
    [other] = set(WORKERS) - {one}
    assert done[one].tokens[COMPUTED] == len(FIRST)
    return one, other, before


def test_a_worker_that_never_computed_the_prefix_has_it_for_the_router(served, view, computed):
    one, other, before = computed
    seconds = view.overlap_once(FIRST, {one: (BLOCKS, 0), other: (0, BLOCKS)})
    print(f"{other} was told of {seconds:.1f} s later")
    assert spent(served, before)[other] == Counts(), "it was idle all the time"


def test_a_worker_that_is_chosen_pulls_what_it_never_computed(served, view, computed):
    """Several requests at a time: the router gives them to both workers, since both have the prefix."""
    one, other, _ = computed
    view.overlap_once(FIRST, {one: (BLOCKS, 0), other: (0, BLOCKS)})
    before, since = counters.read(served.graph), (served.graph.logs / "frontend.log").stat().st_size
    # Each has so much of its own that a worker with one under way costs more than one that pulls the prefix.
    burst = [PREFIX + tokens(f"burst {number}", 100) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: served.graph.ask(prompt, 1), burst))
    counters.wait_settled(served.graph, before, len(burst))
    done = spent(served, before)
    assert done[one].requests and done[other].requests, done
    assert sum(done[name].tokens[COMPUTED] for name in WORKERS) == 100 * len(burst), "no worker computed the prefix again"
    assert done[one].tokens[PULLED] == 0 and done[other].tokens[PULLED] >= len(PREFIX)
    # What the frontend's router took it to have when it chose it first: all of the prefix, at the pool's weight.
    names = view.names()
    choices = [(names[number], blocks) for number, blocks in chosen(served, since)]
    first = next(blocks for name, blocks in choices if name == other)
    assert first == pytest.approx(BLOCKS * POOL_HIT_WEIGHT), choices


def test_every_worker_tells_what_it_counts_on_dynamos_endpoint(served, computed):
    """Blocks by outcome, tokens by source, bytes, times, why blocks were missed, what routers were told."""
    pages = {name: Sample.parse(served.graph.metrics(name)) for name in served.graph.workers}
    prefill = [pages[name] for name in WORKERS]

    def everywhere(of, name, **labels):
        return sum(page.sum(f"{counters.OURS}{name}", **labels) for page in of)

    blocks = everywhere(prefill, "published_blocks_total", outcome="stored")
    assert blocks > BLOCKS and everywhere(prefill, "bytes_total", direction="published") == blocks * served.graph.model.block_bytes
    pulled = everywhere(pages.values(), "pulled_blocks_total", result="hit")
    assert pulled > BLOCKS and everywhere(pages.values(), "bytes_total", direction="pulled") == pulled * served.graph.model.block_bytes
    sources = {source: everywhere(prefill, "prompt_tokens_total", source=source) for source in ("pulled", "reused", "computed")}
    assert sources["pulled"] >= len(PREFIX) and min(sources.values()) > 0, sources
    for name in ("lookup_seconds", "publish_seconds", "pull_seconds"):
        assert everywhere(pages.values(), f"{name}_count") > 0 and everywhere(pages.values(), f"{name}_sum") > 0, name
    # The first worker describes a block, and decode workers hand on what they pulled.
    assert everywhere(pages.values(), "descriptions_total", outcome="stored") >= BLOCKS
    assert all(page.sum(f"{counters.OURS}announced_blocks_total", change="stored") >= BLOCKS for page in prefill)
    # Reasons of misses are there before anything was missed.
    for page in pages.values():
        results = {labels["result"] for name, labels, _ in page.lines if name == f"{counters.OURS}pulled_blocks_total"}
        assert results >= {"hit", "absent", "changed", "checksum"}


def test_a_worker_that_is_started_again_tells_what_is_in_the_pool_already(served, view, computed):
    one, other, _ = computed
    assert served.graph.children[other].kill() == []
    served.graph.restart_worker(other)
    served.graph.wait_until_ready()
    seconds = view.overlap_once(FIRST, {one: (BLOCKS, 0), other: (0, BLOCKS)})
    print(f"{other} was told of {seconds:.1f} s after the graph was ready again")


def test_blocks_that_leave_the_pool_leave_the_router(served, view, computed):
    one, _, _ = computed
    cxlctl(served.graph.pool.spec, "cache", "clear", "--all")
    wanted = {one: (BLOCKS, 0)}
    seconds = view.overlap_once(FIRST, wanted | {name: (0, 0) for name in WORKERS if name != one})
    print(f"taken back {seconds:.1f} s after the pool was cleared; what a worker has itself stays")


def test_without_the_pools_events_only_the_worker_that_computed_a_prefix_has_it():
    with serving([FIRST], **OPTIONS, connector_config={"events": False}) as served, viewing(served) as view:
        served.ask(FIRST)
        one = next(name for name in WORKERS if served.counted(name).tokens[COMPUTED] > BLOCK_TOKENS)
        [other] = set(WORKERS) - {one}
        # vLLM's own events come in both graphs.
        view.overlap_once(FIRST, {one: (BLOCKS, 0), other: (0, 0)})
        time.sleep(5)
        assert view.overlap(FIRST) == {one: (BLOCKS, 0), other: (0, 0)}
