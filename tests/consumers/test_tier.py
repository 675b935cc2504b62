# SPDX-License-Identifier: Apache-2.0
"""The tier under vLLM's own manager of tiers: two engines on two hosts, kills, full and lost pools, and all that must be a miss."""

import logging
import threading
from pathlib import Path

import kvbm_cxl
import pytest
from kvbm_cxl.consumers.blocks import Blocks, Loaded
from kvbm_cxl.consumers.names import key_of
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import pool_access
from peers import MORTAL, damage, fsck, payload, until

pytest.importorskip("vllm", reason="vLLM is not installed: `make setup-serve`")
from subject_tier import BLOCK_BYTES, PRIMARY_CHUNKS, VARIATIONS, Subject  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, make_offload_key  # noqa: E402

NAMES = [f"chunk {number}" for number in range(40)]


def _pool_key(subject, name):
    return key_of(subject.key(name))


def test_another_host_loads_what_a_killed_engine_stored(pool, peer):
    first = peer("tier", pool, machine="a")
    assert first("store", NAMES) == {"stored": 40}
    second = peer("tier", pool, machine="b")
    assert second("found", NAMES + ["none"]) == [True] * 40 + [False]
    first.kill()
    assert second("load", NAMES + ["none"]) == [True] * 40 + [False]
    # And the host of the killed one is warm again.
    again = peer("tier", pool, machine="a")
    assert again("load", ["none"] + NAMES[1:]) == [False] + [True] * 39
    assert again("store", NAMES) == {"exists": 40}


def test_an_engine_killed_in_mid_store_leaves_whole_chunks_or_none(pool, peer):
    second = peer("tier", pool, machine="b", environment=MORTAL)
    assert second("found", ["x"]) == [False]
    served = 0
    for round in range(3):
        names = [f"{round}/{number}" for number in range(PRIMARY_CHUNKS)]
        first = peer("tier", pool, machine="a", environment=MORTAL)
        assert first("found", names[:1]) == [False]
        first.send("begin_store", names)
        # Sooner in each round.
        until(lambda: second("found", [names[16 - 8 * round]]) == [True], "the first chunks of the store")
        first.kill()
        served += sum(second("load", names))
        # Nothing is in the way of a new store once the killed one is found dead.
        until(lambda: set(second("store", names)) <= {"stored", "exists"}, "a store behind the death")
        assert second("load", names) == [True] * len(names)
    assert served >= 3
    second.kill()
    assert fsck(pool) | {"notes": 0} == {"errors": 0, "warnings": 0, "notes": 0}


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_what_shapes_the_bytes_tells_chunks_apart(pool, make_subject, variation):
    subject, other = make_subject(pool), make_subject(pool, **variation)
    assert subject.store(NAMES[:4]) == {"stored": 4}
    assert other.found(NAMES[:4]) == other.load(NAMES[:4]) == [False] * 4
    if other.row_bytes <= 65536:
        assert other.store(NAMES[:4]) == {"stored": 4}
        assert other.load(NAMES[:4]) == [True] * 4
    assert subject.load(NAMES[:4]) == [True] * 4
    # An engine of the same kind finds them.
    assert make_subject(pool).found(NAMES[:4]) == [True] * 4


def test_every_variation_has_a_namespace_of_its_own(pool, make_subject):
    made = [make_subject(pool, **variation) for variation in [{}, *VARIATIONS.values()]]
    assert len({one.tier._namespace for one in made}) == len(made)


def test_groups_of_layers_do_not_meet(subject):
    assert subject.store(NAMES[:4]) == {"stored": 4}
    subject.group = 1
    assert subject.found(NAMES[:4]) == [False] * 4
    assert subject.key("x") == make_offload_key(subject.key("x")[:-4], 1)


def test_a_model_is_known_by_its_weights(pool, make_subject, tmp_path):
    """Wherever it lies: a copy shares chunks, and one of other weights in its place does not."""
    options = {}
    for name, weights in (("here", b"one"), ("there", b"one"), ("others", b"two")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights * 5000)
        options[name] = str(folder)
    first, copy, other = (make_subject(pool, model=name, options={"model_id": ""}) for name in options.values())
    assert first.store(NAMES[:2]) == {"stored": 2}
    assert copy.load(NAMES[:2]) == [True] * 2 and other.load(NAMES[:2]) == [False] * 2


def test_damage_and_another_length_are_misses_and_go(pool, subject):
    assert subject.store(NAMES[:8]) == {"stored": 8}
    damage(pool, payload(NAMES[3], BLOCK_BYTES))
    assert subject.load(NAMES[:8]) == [True] * 3 + [False] + [True] * 4
    assert subject.found(NAMES[:8]) == [True] * 3 + [False] + [True] * 4
    # Not even then would another block under a chunk's key be taken for it.
    key, namespace = _pool_key(subject, "short"), subject.tier._namespace
    subject.tier._access.call(lambda cache: cache.publish(namespace, key, b"of another length"))
    assert subject.found(["short"]) == [True] and subject.load(["short"]) == [False]
    assert subject.counts("loaded_chunks") == {"hit": 7, "checksum": 1, "length": 1}


def test_a_failed_load_is_no_hit_again_for_its_request(subject, monkeypatch):
    """What a lookup goes on finding, and no load brings, must not keep a request waiting."""
    assert subject.store(NAMES[:4]) == {"stored": 4}
    subject.forget()
    loads = []

    def fails(self, namespace, keys, layout, rows):
        loads.append(len(keys))
        return [Loaded("changed") for _ in keys]

    monkeypatch.setattr(Blocks, "load_rows", fails)
    assert subject.load(NAMES[:4]) == [False] * 4 and loads == [4]
    # The next request is asked for anew.
    assert subject.load(NAMES[:4]) == [False] * 4 and loads == [4, 4]
    monkeypatch.undo()
    assert subject.load(NAMES[:4]) == [True] * 4
    assert not subject.tier._failed


def test_a_load_that_brings_some_is_kept_for_those(subject):
    assert subject.store(NAMES[:6]) == {"stored": 6}
    subject.forget()
    context, missing = subject.request(), [NAMES[1], NAMES[4]]
    assert [subject.manager.lookup(subject.key(name), context) for name in NAMES[:6]] == [LookupResult.HIT_PENDING] * 6
    # Between the lookup and the load.
    subject.tier._blocks.evict(subject.tier._namespace, [_pool_key(subject, name) for name in missing])
    subject.settle()
    hits = subject.look(context, NAMES[:6])
    assert hits == [LookupResult.MISS if name in missing else LookupResult.HIT for name in NAMES[:6]]


def test_no_call_of_the_scheduler_waits_for_a_copy(subject, monkeypatch):
    """Stores and loads that hang: vLLM goes on, and each job ends once when they do."""
    assert subject.store(NAMES[:4]) == {"stored": 4}
    subject.forget()
    may_go_on, calls = threading.Event(), []
    for name in ("store_rows", "load_rows"):
        real = getattr(Blocks, name)

        def hangs(self, *arguments, real=real, name=name):
            calls.append(name)
            assert may_go_on.wait(300)
            return real(self, *arguments)

        monkeypatch.setattr(Blocks, name, hangs)
    subject.begin_store(["a", "b"])
    context = subject.request()
    for _ in range(20):
        said = subject.look(context, NAMES[:4])
        assert said == [LookupResult.HIT_PENDING] * 4
    assert subject.manager.has_pending_work() and subject.tier.has_pending_work()
    until(lambda: sorted(calls) == ["load_rows", "store_rows"], "both threads")
    may_go_on.set()
    subject.settle()
    assert subject.look(context, NAMES[:4]) == [LookupResult.HIT] * 4
    assert subject.found(["a", "b"]) == [True] * 2 and not subject.tier.has_pending_work()


def test_an_unexpected_error_ends_the_job_as_failed(subject, monkeypatch):
    assert subject.store(NAMES[:2]) == {"stored": 2}

    def breaks(*_):
        raise RuntimeError("of no kind that is known")

    monkeypatch.setattr(Blocks, "store_rows", breaks)
    monkeypatch.setattr(Blocks, "load_rows", breaks)
    subject.begin_store(["a"])
    subject.settle()
    assert subject.load(NAMES[:2]) == [False] * 2


def test_a_full_pool_evicts(make_pool, make_subject):
    subject = make_subject(make_pool(size="16M", cells="32K:50%"))
    names = [f"many {number}" for number in range(600)]
    assert subject.store(names) == {"stored": 600}, "older ones make room"
    found = subject.found(names)
    assert 20 <= sum(found) < 600 and found[-1]
    assert subject.load(names[-20:]) == [True] * 20


def test_a_pool_full_of_what_is_in_use_refuses(make_pool, make_subject):
    subject = make_subject(make_pool(size="16M", cells="32K:50%"))
    names, pins = [f"many {number}" for number in range(600)], []
    outcomes = {}
    for first in range(0, 600, 30):
        some = names[first : first + 30]
        for outcome, count in subject.store(some).items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        pins += subject.tier._blocks.pin(subject.tier._namespace, [_pool_key(subject, name) for name in some])
    assert set(outcomes) == {"stored", "no_cell"} and sum(outcomes.values()) == 600, outcomes
    failures = subject.manager.get_stats().reduce()
    assert failures["vllm:kv_offload_tiering_cascade_job_failures:('1:cxl',)"] >= 1
    for pin in pins:
        if pin:
            pin.release()
    until(lambda: subject.store(["later"]) == {"stored": 1}, "room after the pins went")
    assert subject.load(["later"]) == [True]


def test_cells_that_are_too_small_are_told_once(make_pool, make_subject, caplog):
    subject = make_subject(make_pool(cells="16K:75%"))
    with caplog.at_level(logging.ERROR):
        assert subject.store(NAMES[:2]) == {"too_large": 2} and subject.store(NAMES[2:4]) == {"too_large": 2}
    assert len([one for one in caplog.records if "largest cell" in one.getMessage()]) == 1


def test_an_engine_starts_without_its_pool_and_takes_it_when_it_is_there(make_pool, make_subject, monkeypatch, caplog):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    path = make_pool()
    Path(path).unlink()
    with caplog.at_level(logging.ERROR):
        subject = make_subject(path)
        assert subject.store(NAMES[:4]) == {"lost": 4} and subject.load(NAMES[:4]) == [False] * 4
    assert len([one for one in caplog.records if "cannot be opened" in one.getMessage()]) == 1
    assert subject.counts("pool_is_open") == {"": 0}
    kvbm_cxl.format_pool(f"{path},size=64M", cells="64K:75%")
    until(lambda: subject.store(NAMES[:4]) == {"stored": 4}, "the pool to be opened")
    assert subject.load(NAMES[:4]) == [True] * 4 and subject.counts("pool_is_open") == {"": 1}
    assert subject.counts("thread_errors"), "attempts that failed are counted"


def test_a_pool_that_is_formatted_anew_is_a_cache_without_hits(pool, subject, monkeypatch):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    assert subject.store(NAMES[:5]) == {"stored": 5}
    kvbm_cxl.format_pool(pool, cells="64K:75%", evict_hosts=True)
    names = iter(f"after {number}" for number in range(10**6))
    until(lambda: set(subject.store([next(names)])) != {"stored"} or subject.counts("pool_is_open") == {"": 0}, "the loss to be noticed")
    assert subject.load(NAMES[:5]) == [False] * 5
    until(lambda: subject.store(NAMES[:5]) == {"stored": 5}, "the new pool")
    assert subject.load(NAMES[:5]) == [True] * 5


def test_shutdown_ends_jobs_and_lets_go_of_memory_and_pins(pool, peer, caplog):
    subject = Subject(pool)
    view = subject.manager.primary_tier.get_kv_memoryview()
    subject.begin_store(NAMES[:30])
    with caplog.at_level(logging.WARNING):
        subject.close()
    assert "Failed to close" not in caplog.text
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    assert not pool_access._registry
    other = peer("tier", pool, machine="b")
    assert other("load", NAMES[:30]) == [True] * 30, "what was under way was stored"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pol": "x"}, "no option 'pol'; it has adapters_by_name, cache, checksums, enable_kv_events, locality, model_id"),
        ({"threads": 0}, "takes 1 to 64"),
        ({"checksums": "yes"}, "takes true or false"),
        ({"locality": "NEAR"}, "takes LOCAL or REMOTE"),
        ({"cache": {"polcy": "lru"}}, "cache has no option 'polcy'"),
        ({"cache": {"low_water_percent": 101}}, "cannot use pool"),
        ({"model_id": ""}, 'option "model_id"'),
    ],
)
def test_options_are_checked(pool, options, says):
    with pytest.raises(ConfigError) as error:
        Subject(pool, options=options)
    assert says in str(error.value) and "tier" in str(error.value)
    assert not pool_access._registry


def test_a_pool_has_to_be_named():
    with pytest.raises(ConfigError, match="CXL_POOL"):
        Subject("")
