# SPDX-License-Identifier: Apache-2.0
"""Prefill answers before its copies end: other hosts see the blocks coming, decode waits for them, and for none in vain."""

import threading
import time
from types import SimpleNamespace

import kvbm_cxl
import pytest
import test_scheduler_side
import test_worker_side
from kvbm_cxl.vllm_integration import handover
from kvbm_cxl.vllm_integration.keys import group_keys
from kvbm_cxl.vllm_integration.metadata import Blocks
from kvbm_cxl.vllm_integration.support import clears_first
from requests_of_vllm import Scheduled, request, tokens
from test_worker_side import KEYS, Slow

workers = test_worker_side.bench
path = test_worker_side.path
schedulers = test_scheduler_side.bench


def _presence(bench, keys):
    return bench.access.call(lambda cache: cache.presence(bench.side.attachment.own[0].namespaces[0], keys))


@pytest.mark.parametrize("threads", (1, 2))
def test_the_step_that_completes_a_prompt_ends_before_its_copies(workers, monkeypatch, threads):
    here = workers(publish_behind=True, workers=threads)
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])
    assert slow.begun.wait(180)
    # With one thread, the copies of the step before are still in the way of these.
    report = here.run(saves=[Blocks("a", KEYS[2:4], [2, 3], KEYS[1])], complete={"a"})[3]
    assert report.saved_step == 0 and _presence(here, KEYS[:5]) == ["coming"] * 4 + ["absent"]
    saved, *_ = here.run(release={"a"}, finished={"a"}, idle=True)
    assert not saved, "vLLM keeps the blocks until they are copied"
    slow.go_on.set()
    deadline = time.monotonic() + 180
    while not saved:
        assert time.monotonic() < deadline
        saved, _, _, report = here.run(idle=True)
    assert saved == {"a"} and report.saved_step >= 2 and _presence(here, KEYS[:4]) == ["there"] * 4
    other = workers(seed=1)
    failed, _ = other.load("b", KEYS[:4], [4, 5, 6, 7])
    assert not failed and (other.memory[:, 4:8] == here.memory[:, :4]).all()
    assert here.counts()["published_blocks/stored"] == 4


def test_a_request_that_shares_blocks_sees_them_coming(workers, monkeypatch):
    here = workers(publish_behind=True)
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])
    here.run(saves=[Blocks("b", KEYS[:2], [0, 1])], complete={"b"})
    assert _presence(here, KEYS[:2]) == ["coming"] * 2
    saved, *_ = here.run(release={"b"}, finished={"b"}, idle=True)
    assert not saved, "the copies of another request are its own, too"
    slow.go_on.set()


def test_only_a_tail_that_grows_is_waited_for(workers, monkeypatch):
    here = workers(publish_behind=True)
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:1], [0]), Blocks("a", KEYS[1:2], [1], KEYS[0], tail_tokens=5)], complete={"a"})
    here.side.before_overwrite(here.orders(grows={"another"}))
    slow.holds_up(lambda: here.side.before_overwrite(here.orders(grows={"a"})), within_s=180)


@pytest.mark.parametrize("order", ("taken", "state"))
def test_only_the_blocks_that_change_are_waited_for(workers, monkeypatch, order):
    """Whose key is published from another block waits for nothing."""
    here = workers(publish_behind=True)
    slow = Slow(here, monkeypatch)
    state = Blocks("a", KEYS[2:3], [7], is_state=order == "state")
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1]), Blocks("b", KEYS[:2], [4, 5]), state], complete={"a", "b"})
    if order == "taken":
        here.side.before_overwrite(here.orders(taken=[2, 3, 4, 5]))
    step = here.orders(taken=[1, 2]) if order == "taken" else here.orders()
    slow.holds_up(lambda: here.side.before_overwrite(step), within_s=180)
    here.side.before_overwrite(here.orders())


def test_states_are_copied_before_the_rest(workers, monkeypatch):
    """With one thread the next step would wait for all of a long prompt."""
    here, submitted = workers(publish_behind=True, workers=1), []
    submit = here.side.saver.saves.submit
    monkeypatch.setattr(here.side.saver.saves, "submit", lambda owner, job: submitted.append(job.keys) or submit(owner, job))
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1]), Blocks("a", KEYS[2:3], [7], is_state=True)], complete={"a"})
    assert submitted == [KEYS[2:3], KEYS[:2]]


@pytest.mark.parametrize("waits", (True, False))
def test_where_vllm_clears_blocks_first_no_step_ends_before_its_copies(workers, monkeypatch, waits):
    here = workers(publish_behind=True)
    here.side.saver.clears_first = waits
    slow = Slow(here, monkeypatch)
    step = here.orders(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    saving = threading.Thread(target=lambda: here.side.save(step))
    saving.start()
    assert slow.begun.wait(180)
    saving.join(0.1 if waits else 180)
    assert saving.is_alive() == waits
    slow.go_on.set()
    saving.join(180)
    assert not saving.is_alive()


@pytest.mark.parametrize("clears, runner", ((True, True), (False, True), (True, False), (True, None)))
def test_only_one_of_vllms_runners_clears_blocks_first(clears, runner):
    engine = SimpleNamespace() if runner is None else SimpleNamespace(use_v2_model_runner=runner)
    assert clears_first(engine, SimpleNamespace(needs_kv_cache_zeroing=clears)) == (clears and bool(runner))


def test_cells_of_a_pool_that_fails_are_a_save_that_is_counted(workers, monkeypatch):
    here = workers(publish_behind=True)

    def refused(*_):
        raise kvbm_cxl.CxlError("no")

    monkeypatch.setattr(type(here.side.attachment.own[0].mover), "announce", refused)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    here.side.saver.saves.wait(["a"])
    assert [name for name, count in here.counts().items() if name.startswith("published_blocks/") and count == 2]
    assert _presence(here, KEYS[:2]) == ["absent"] * 2


def _reserve(here, asked, first, stop, namespace=0):
    """Cells for blocks of a request that are on their way, and what fills them."""
    memory = bytearray(range(256)) * 16 * (stop - first)
    layout = kvbm_cxl.BlockLayout.of_tensors([memoryview(memory).cast("B", (stop - first, 4096))])
    keys = group_keys(asked, first, stop)
    return here.access.call(lambda cache: cache.reserve_blocks(here.namespaces[namespace], keys, layout)), layout


def _asked(here, name="a", seed=0):
    return request(name, tokens(96, seed), handover.Expected(96, str(here.namespaces[0])).to_params())


def test_decode_waits_as_long_as_blocks_are_coming(schedulers, waits):
    waits(handover_ms=0)
    here = schedulers(ranks=2)
    asked = _asked(here)
    here.publish(asked, 4)
    here.publish(asked, 6, ranks=1)
    coming, layout = _reserve(here, asked, 4, 6, namespace=1)
    for _ in range(5):
        assert here.side.match(asked, 0) == (None, False) and here.pinned == 0
        here.side.step(Scheduled())
        time.sleep(0.01)
    assert coming.publish(layout, range(2)) == ["stored"] * 2
    assert here.admit(asked)[0] == 96
    assert here.counts()["handovers/complete"] == 1
    here.finish_load("a")


def test_decode_takes_what_there_is_once_the_rest_is_given_up(schedulers, waits):
    waits(handover_ms=0)
    here = schedulers()
    asked = _asked(here)
    here.publish(asked, 4)
    coming, _ = _reserve(here, asked, 4, 6)
    assert here.side.match(asked, 0) == (None, False)
    coming.release()
    assert here.admit(asked)[0] == 64
    assert here.counts()["handovers/short"] == 1
    here.finish_load("a")


def test_decode_does_not_wait_beyond_a_block_that_does_not_come(schedulers, waits):
    waits(handover_ms=0)
    here = schedulers()
    asked = _asked(here)
    here.publish(asked, 3)
    coming, _ = _reserve(here, asked, 4, 6)
    assert here.side.match(asked, 0) == (48, True)
    coming.release()


def test_decode_waits_no_longer_than_copies_may_take(schedulers, waits):
    waits(handover_ms=0, copy_ms=30)
    here = schedulers()
    asked = _asked(here)
    here.publish(asked, 4)
    coming, _ = _reserve(here, asked, 4, 6)
    assert here.side.match(asked, 0) == (None, False)
    time.sleep(0.05)
    assert here.side.match(asked, 0) == (64, True)
    coming.release()
