# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a second level behind a pool that is too small: what the pool evicted comes back, for the engine that computed it, for
one on another host, and after both and the pool have gone; a second level that is damaged, stands still or vanishes costs hits alone.
"""

import threading
import time
import uuid
from contextlib import contextmanager

import pytest
from engine_process import EngineProcess
from engines import BLOCK_TOKENS, engine, prompt
from kvbm_cxl.l2.stores import LocalStore

# Three full blocks, and what is computed each time.
PROMPT = prompt(500, 1)
FULL_BLOCKS = 3
FULL_TOKENS = FULL_BLOCKS * BLOCK_TOKENS
# Beyond all deadlines of these tests: what ends a wait is that blocks came.
NEVER_MS = 3_600_000
WAITS_S = 300


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    """The answer of an engine without a connector."""
    with engine(model, None) as plain:
        return plain.texts([PROMPT])[0]


@pytest.fixture
def pool(make_pool) -> str:
    """Room for 32 blocks."""
    return make_pool(size="24M", cells="512K:75%")


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def _options(store, wait_ms: int = NEVER_MS) -> dict:
    return {"extra": {"l2": str(store), "l2_max_bytes": 1 << 30, "l2_wait_ms": wait_ms}}


def _others():
    """Prompts that share no block with any other one."""
    return (prompt(1000, seed) for seed in range(1000, 1200))


def _evict(call) -> None:
    """Has the pool make room for other prompts until it has no block of PROMPT, and the second level has all of them. `call(name, ...)`
    calls a method of the engine that published it."""
    for other in _others():
        call("keep_cold")
        if not call("in_pool", PROMPT):
            break
        call("texts", [other])
    assert call("in_pool", PROMPT) == 0 and call("in_second_level", PROMPT) == FULL_BLOCKS


@contextmanager
def _evicted(model, pool, store, **options):
    """An engine that has published PROMPT, of which only the second level has the blocks now."""
    with engine(model, "kv_both", pool, **_options(store, **options)) as running:
        running.first = running.texts([PROMPT])[0]
        _evict(lambda name, *arguments: getattr(running, name)(*arguments))
        running.forget()
        running.counted()
        yield running


def _object_of(running, store, place: int):
    """The file of a block of PROMPT."""
    key = running.keys(PROMPT)[place].hex()
    (path,) = store.glob(f"*/{key[:2]}/{key}.kv")
    return path


@pytest.mark.parametrize("by", ("", "nixl+posix://"), ids=("folder", "nixl"))
def test_evicted_blocks_come_back_to_the_engine_that_computed_them(model, pool, store, text, by):
    with _evicted(model, pool, f"{by}{store}") as running:
        assert running.first == text
        assert running.texts([PROMPT]) == [text]
        running.settle()
        counted = running.counted()
        assert counted["external_hits"] == counted["prompt_tokens/pulled"] == FULL_TOKENS
        assert counted["prompt_tokens/computed"] == 500 - FULL_TOKENS and counted["lookups/deferred"] >= 1
        assert counted["second_level/promoted"] == FULL_BLOCKS and "second_level/failed" not in counted
        assert running.in_pool(PROMPT) == FULL_BLOCKS, "they are the pool's again"
        # Now they are found where every block is.
        running.forget()
        assert running.texts([PROMPT]) == [text]
        counted = running.counted()
        assert counted["external_hits"] == FULL_TOKENS and "second_level/promoted" not in counted, counted


def test_they_come_back_to_other_hosts_and_after_everything_was_restarted(model, make_pool, store, text, tmp_path):
    pool = make_pool(size="192M", cells="512K:75%")

    def host(pool: str) -> EngineProcess:
        machine = uuid.uuid4().hex
        env = {"CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(tmp_path / machine[:8])}
        return EngineProcess(model, "kv_both", pool, env=env, **_options(store))

    def finds(other: EngineProcess) -> None:
        deadline = time.monotonic() + WAITS_S
        while other("in_second_level", PROMPT) < FULL_BLOCKS:
            assert time.monotonic() < deadline, "the second level was not looked through"
            time.sleep(0.1)
        assert other("in_pool", PROMPT) == 0
        assert other("texts", [PROMPT]) == [text]
        other("settle")
        counted = other("counted")
        assert counted.get("external_hits") == FULL_TOKENS and counted["second_level/promoted"] == FULL_BLOCKS, str(counted)

    with host(pool) as first:
        assert first("texts", [PROMPT]) == [text]
        _evict(first)
        with host(pool) as second:
            # By now the other host has all chunks, and gives one away within some rounds of its service.
            own = prompt(300, 3)
            deadline = time.monotonic() + WAITS_S
            while not second("in_pool", own):
                assert time.monotonic() < deadline, "the second host gets no room"
                second("forget")
                second("texts", [own])
                second("settle")
            second("counted")
            finds(second)
        # What another host brought back is in the pool for all of them.
        first("forget")
        first("counted")
        assert first("texts", [PROMPT]) == [text]
        assert first("counted")["external_hits"] == FULL_TOKENS
    # Nothing but the folder is left.
    with host(make_pool(size="24M", cells="512K:75%")) as third:
        finds(third)


@pytest.mark.parametrize("damaged", range(FULL_BLOCKS))
def test_a_damaged_object_is_a_miss(model, pool, store, text, damaged):
    with _evicted(model, pool, store) as running:
        path = _object_of(running, store, damaged)
        whole = path.read_bytes()
        # Of every number the sign and more: were it served, the text would not be the same.
        flipped = bytearray(whole)
        for place in range(len(whole) - 1, len(whole) // 4, -4):
            flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        assert running.texts([PROMPT]) == [text]
        running.settle()
        counted = running.counted()
        assert counted.get("external_hits", 0) == damaged * BLOCK_TOKENS
        assert counted["second_level/missed"] == 1 and counted.get("second_level/promoted", 0) == damaged
        assert running.in_pool(PROMPT) == FULL_BLOCKS, "what was computed instead was published"
        running.keep_cold()
        assert not path.exists() or path.read_bytes() == whole, "it was deleted, and at most written anew"


def test_a_second_level_that_vanishes_while_blocks_come_back(model, pool, store, text, tmp_path, monkeypatch):
    with _evicted(model, pool, store) as running:
        reads, is_gone = [], threading.Event()
        read = LocalStore.read

        def first_alone(self, path: str) -> bytes:
            """The second block is read once the folder is gone."""
            reads.append(path)
            if len(reads) == 2:
                store.rename(tmp_path / "away")
                is_gone.set()
            return read(self, path)

        monkeypatch.setattr(LocalStore, "read", first_alone)
        assert running.texts([PROMPT]) == [text]
        assert is_gone.is_set() and running.counted()["external_hits"] == BLOCK_TOKENS
        # It goes on without: blocks are evicted, and nothing can be kept.
        for other in (prompt(500, seed) for seed in range(2000, 2012)):
            running.texts([other])
        running.settle()
        counted = running.counted()
        assert counted["published_blocks/stored"] >= 36 and counted["second_level/failed"] >= 1 and not store.exists()
        running.forget()
        assert running.texts([PROMPT]) == [text]


def test_a_request_waits_no_longer_than_it_may_for_a_store_that_stands_still(model, pool, store, text, monkeypatch):
    with _evicted(model, pool, store, wait_ms=500) as running:
        asked, answers, has_answered = threading.Event(), threading.Event(), threading.Event()

        def stands_still(self, path: str) -> bytes:
            asked.set()
            answers.wait(WAITS_S)
            has_answered.set()
            raise OSError("it stood still")

        monkeypatch.setattr(LocalStore, "read", stands_still)
        try:
            assert running.texts([PROMPT]) == [text]
            assert asked.is_set() and not has_answered.is_set()
            counted = running.counted()
            assert "external_hits" not in counted and counted["lookups/deferred"] >= 1
        finally:
            answers.set()


def test_without_a_second_level_they_are_computed(model, pool, text):
    """What the tests above would see of a second level that gives nothing."""
    with engine(model, "kv_both", pool) as running:
        running.texts([PROMPT])
        for other in _others():
            running.settle()
            if not running.in_pool(PROMPT):
                break
            running.texts([other])
        running.forget()
        running.counted()
        assert running.texts([PROMPT]) == [text]
        assert "external_hits" not in running.counted()
