# SPDX-License-Identifier: Apache-2.0
"""The worker's side while its weights or adapters change: what it tells, and which orders it refuses."""

from types import SimpleNamespace

import pytest
import torch
from kvbm_cxl.vllm_integration.adapters import UNKNOWN
from kvbm_cxl.vllm_integration.loader import Loads
from kvbm_cxl.vllm_integration.metadata import Blocks, WorkerReport
from kvbm_cxl.vllm_integration.weights import caller_of, fingerprint
from test_adapters import Manager, _write
from test_worker_side import KEYS, bench, path  # noqa: F401
from vllm.lora.request import LoRARequest


@pytest.fixture
def here(bench):  # noqa: F811
    """A side whose worker has a model of one layer."""
    made = bench()
    model = torch.nn.Linear(30, 30)
    made.side.weights.worker = SimpleNamespace(get_model=lambda: model)
    made.model = model
    return made


def test_the_greeting_has_a_fingerprint(here):
    assert here.side.handshake().weights == fingerprint(here.model)
    assert here.side.handshake().facts["block_tokens"] == "16"


def test_an_inquiry_is_answered_in_its_step(here):
    here.side.handshake()
    assert here.run()[3].weights == {}
    here.model.weight.data.add_(1)
    report = here.run(inquiry=1)[3]
    assert (report.inquiry, report.weights) == (1, {0: fingerprint(here.model)})
    here.model.weight.data.add_(1)
    assert here.run(inquiry=1)[3].weights == report.weights, "once for each inquiry"
    assert here.run(inquiry=2)[3].weights == {0: fingerprint(here.model)} != report.weights
    assert here.run()[3].weights == {}


def test_reports_of_ranks_are_put_together():
    one = WorkerReport(5, inquiry=3, weights={0: b"a"}, adapters={0: {1: b"x"}})
    two = WorkerReport(4, inquiry=3, weights={1: b"b"}, adapters={1: {1: b"y"}})
    both = one.aggregate(two)
    assert (both.saved_step, both.inquiry, both.weights) == (4, 3, {0: b"a", 1: b"b"}) and both.adapters == {0: {1: b"x"}, 1: {1: b"y"}}
    early = WorkerReport(4, inquiry=2, weights={1: b"c"})
    assert one.aggregate(early).weights == {0: b"a"} == early.aggregate(one).weights, "an answer to an earlier inquiry is none"


def test_loads_of_other_weights_fail(here, monkeypatch):
    here.side.handshake()
    here.run(saves=[Blocks("a", KEYS[:4], [0, 1, 2, 3])], complete={"a"})
    begun = here.side.loader.loads
    for changes in (False, True):
        if changes:
            here.model.weight.data.add_(1)
        step = here.orders(loads=[Blocks("b", KEYS[:4], [4, 5, 6, 7])])
        here.side.start_loads(step)
        # Ended, and not reported yet.
        while begun._loads:
            pass
        here.side.before_overwrite(here.orders(inquiry=1 + changes))
        _, loaded = here.side.take_finished(set())
        assert loaded == {"b"} and here.side.loader.take_failed_blocks() == ({4, 5, 6, 7} if changes else set())
    assert here.counts()["loads/failed"] == 1


def test_a_load_that_has_not_begun_is_left_out():
    loads, ran = Loads(1), []
    loads.submit("x", [([1], lambda: ran.append(1) or set())], here=True)
    loads.fail_all()
    assert [load.failed_blocks for load in loads.take_done()] == [{1}] and ran == [1]
    loads.submit("y", [([2], lambda: ran.append(2) or set())], here=True)
    assert [load.failed_blocks for load in loads.take_done()] == [set()], "only those of before"
    loads.close()


def _adapted(here, folder, content: bytes) -> tuple[Manager, LoRARequest]:
    manager, request = Manager(), LoRARequest("a", 1, str(_write(folder, content)))
    here.side.adapters.__init__(manager)
    return manager, request


def test_adapters_are_loaded_on_order_and_told_of(here, tmp_path):
    manager, request = _adapted(here, tmp_path / "a", b"1" * 99)
    report = here.run(adapters=[request])[3]
    assert manager.list_adapters() == {1} and len(report.adapters[0][1]) == 16
    assert here.run()[3].adapters == {} and here.run(adapters=[request])[3].adapters == report.adapters, "again when it is asked"


def test_orders_for_another_adapter_are_refused(here, tmp_path):
    manager, request = _adapted(here, tmp_path / "a", b"1" * 99)
    first = here.run(adapters=[request])[3].adapters[0][1]
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1], adapter=(1, first))], complete={"a"})
    assert here.counts()["published_blocks/stored"] == 2
    _write(tmp_path / "a", b"2" * 99)
    manager.add_adapter(LoRARequest("a", 1, request.lora_path, load_inplace=True))
    here.run(saves=[Blocks("b", KEYS[2:4], [2, 3], adapter=(1, first))], complete={"b"})
    here.run(saves=[Blocks("b", KEYS[2:4], [2, 3], adapter=(1, UNKNOWN))], complete={"b"})
    assert here.counts() == {"published_blocks/other_adapter": 4}
    *_, failed, report = (None, *_load(here, Blocks("c", KEYS[:2], [8, 9], adapter=(1, first))))
    assert failed == {8, 9} and report.failed_loads == {"c"} and here.counts()["pulled_blocks/other_adapter"] == 2


def _load(here, blocks: Blocks):
    _, loaded, failed, report = here.run(loads=[blocks])
    while blocks.request_id not in loaded:
        _, loaded, failed, report = here.run(idle=True)
    return failed, report


def test_the_object_whose_call_this_is():
    class Outer:
        def call(self, work):
            return Inner().call(work)

    class Inner:
        def call(self, work):
            return work()

    outer = Outer()
    assert outer.call(lambda: caller_of(Outer)) is outer and caller_of(Outer) is None
