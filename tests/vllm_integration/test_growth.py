# SPDX-License-Identifier: Apache-2.0
"""Nothing is left of requests that end, however they end: every container of the package is counted before and after thousands of them."""

import ast
import random
import time
from pathlib import Path
from types import SimpleNamespace

import kvbm_cxl
import pytest
import test_scheduler_side
import test_worker_side
from kvbm_cxl.vllm_integration import block_names, handover, limits, pool_access
from kvbm_cxl.vllm_integration import events as events_module
from kvbm_cxl.vllm_integration.events import PoolEvents
from kvbm_cxl.vllm_integration.failures import ThreadFailures
from kvbm_cxl.vllm_integration.metadata import Blocks, WorkerReport
from kvbm_cxl.vllm_integration.movers import CopyMover
from kvbm_cxl.vllm_integration.publisher import Outlet
from kvbm_cxl.vllm_integration.request_state import RequestState
from object_sizes import grown, sizes
from requests_of_vllm import BLOCK_TOKENS, Scheduled, allocation, request, tokens
from vllm.lora.request import LoRARequest

schedulers = test_scheduler_side.bench
workers = test_worker_side.bench
path = test_worker_side.path
REQUESTS = 5000
SPARE = 20
PACKAGE = Path(pool_access.__file__).parents[1]


def test_an_object_for_each_request_is_seen():
    """The check itself: in whatever container, at whatever depth."""
    failures = ThreadFailures()
    before = sizes(failures)
    leaks = ({number: 1 for number in range(50)}, [[number] for number in range(50)], {"one": [RequestState(request("r", [1]))] * 1})
    for place, leak in enumerate(leaks):
        failures.leak = leak
        assert bool(grown(before, sizes(failures), SPARE)) == (place < 2)
    failures.leak = {"one": [SimpleNamespace(), {"two": set(range(30))}]}
    (seen,) = grown(before, sizes(failures), SPARE)
    assert seen == "ThreadFailures.leak[][][]"


def test_errors_are_kept_by_kind(caplog):
    failures = ThreadFailures()
    before = sizes(failures)
    for number in range(10_000):
        failures.report("loading blocks", kvbm_cxl.CxlError(f"of request {number}"), f"{number} of request {number}")
    assert not grown(before, sizes(failures), 2) and len(caplog.records) == 1
    assert failures.last_error.detail == "9999 of request 9999" and failures._counts["error"] == 10_000


def test_work_that_fails_is_named_by_a_fixed_text():
    """What is reported as failing is a key of what is kept: a text with a number or a name in it would be one more for each."""
    found = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            on = ast.unparse(node.func.value)
            if node.func.attr in ("report", "start_thread") and ("failures" in on or on == "self") and len(node.args) > 1:
                doing = node.args[1 if node.func.attr == "start_thread" else 0]
                found += 1
                assert isinstance(doing, (ast.Constant, ast.Name)), f"{file.name}:{node.lineno}: {ast.unparse(doing)}"
    assert found > 12


def _one_request(here, number: int, choose: random.Random) -> None:
    """A request that ends in one of many ways. Each has a name, tokens, an adapter and a hand-over of its own."""
    facts = {name: str(choose.random()) for name in choose.sample(("pool", "seed", "model", "dtype", "tp_size", "layout", "spec"), 3)}
    params = [None, handover.prefill_params(), handover.Expected(20, "ab" * 16, facts, number).to_params()][number % 3]
    lora = LoRARequest(f"adapter {number}", number + 1, "/nowhere") if number % 4 == 0 else None
    asked = request(f"request {number}", tokens(2 * BLOCK_TOKENS + 3, number), params, lora_request=lora, cache_salt=str(number))
    asked.resumable = number % 5 == 1
    here.side.match(asked, 0)
    if lora:
        here.side.step(Scheduled())
        report = WorkerReport(0)
        report.adapters = {0: {lora.lora_int_id: number.to_bytes(16)}}
        here.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(), finished_sending=None))
        here.side.match(asked, 0)
    if number % 7 == 2:
        here.side.finish(asked)  # Aborted in the queue.
        return
    external, _ = here.side.match(asked, 0)
    here.side.note_allocation(asked, allocation(list(range(8))), external or 0)
    blocks = {asked.request_id: [1, 2, 3]}
    orders = here.side.step(Scheduled({asked.request_id: asked.num_prompt_tokens}, blocks, first={asked.request_id}))
    keys = {key: 1 for save in orders.saves for key in save.keys} if number % 6 else {}
    report = WorkerReport(orders.step, {asked.request_id} if number % 3 == 0 else set(), set(list(keys)[: number % 2]), keys)
    here.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving={asked.request_id}, finished_sending=None))
    if number % 8 == 3:
        here.side.step(Scheduled(preempted_req_ids={asked.request_id}))
    here.side.finish(asked)
    here.side.step(Scheduled())
    here.side.take_stats()


def test_the_schedulers_side_keeps_nothing_of_requests(schedulers, monkeypatch):
    # Bounds that the first half of the requests reaches.
    monkeypatch.setattr(events_module, "_MAX_ORDERED", 50)
    monkeypatch.setattr(limits, "MAX_REMEMBERED", 50)
    monkeypatch.setattr(block_names, "_MAX_STALE", 50)
    here, choose = schedulers(), random.Random(7)
    here.side.events = here.side.saving.events = events = PoolEvents(here.config, here.access, Outlet(), here.side.tally)
    events._thread = SimpleNamespace(join=lambda _: None)
    for number in range(REQUESTS):
        _one_request(here, number, choose)
    before = sizes(here.side, here.access)
    for number in range(REQUESTS, 2 * REQUESTS):
        _one_request(here, number, choose)
    more = grown(before, sizes(here.side, here.access), SPARE)
    # These wait for the thread that describes them, which does not run here.
    assert sorted(path for path in more if "._published" not in path) == []
    assert not here.side._tracked and here.side.lookups.pinned == 0


def _end(here, ran: tuple, name: str, other: str) -> None:
    """Has a request that is saved and one that is loaded end."""
    saved, loaded, deadline = *ran[:2], time.monotonic() + 180
    while other not in loaded:
        assert time.monotonic() < deadline
        loaded |= here.run(idle=True)[1]
    release = {name}
    while name not in saved:
        assert time.monotonic() < deadline
        saved |= here.run(idle=True, release=release, finished={name, other})[0]
        release = set()


def _one_step(here, number: int) -> None:
    """A step that completes a prompt and loads another one, of requests that end with it, mostly by an error."""
    name, other = f"request {number}", f"load {number}"
    keys = [kvbm_cxl.chain_key(None, [number, place]) for place in range(3)]
    saves = [Blocks(name, keys[:1], [0]), Blocks(name, keys[1:2], [1], keys[0], tail_tokens=5)]
    _end(here, here.run(saves=saves, loads=[Blocks(other, keys[2:], [2])], complete={name} if number % 2 else set()), name, other)
    here.counts()


@pytest.mark.parametrize("failing", ("nothing", "announce", "publish", "pull"))
def test_the_workers_side_keeps_nothing_of_requests(workers, monkeypatch, failing):
    here = workers(publish_behind=True)
    if failing != "nothing":

        def fails(mover, batch, *_):
            raise kvbm_cxl.CxlError(f"{failing} of {batch}")

        monkeypatch.setattr(CopyMover, failing, fails)
    roots = (here.side, here.access)
    for number in range(200):
        _one_step(here, number)
    before = sizes(*roots)
    for number in range(200, 600):
        _one_step(here, number)
    assert not grown(before, sizes(*roots), SPARE)
