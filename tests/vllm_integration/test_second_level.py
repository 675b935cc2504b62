# SPDX-License-Identifier: Apache-2.0
"""The connector with a second level: what its pool evicted comes back for a request that waits, and a store that fails costs hits alone."""

import threading
from types import SimpleNamespace

import kvbm_cxl
import pytest
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import pool_access, second_level
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Shape
from kvbm_cxl.vllm_integration.keys import group_keys
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake
from kvbm_cxl.vllm_integration.scheduler import SchedulerSide
from requests_of_vllm import BLOCK_TOKENS, Scheduled, request, tokens
from waiting import until

BLOCKS = 6
WAIT_S = 60


def data_of(rank: int, key: bytes) -> bytes:
    return (key + bytes([rank])) * 256


class Engine:
    """A scheduler's side and its level, over a pool of its own."""

    def __init__(self, pool: str, store, ranks: int = 1, **options) -> None:
        self.others = 0
        config = ConnectorConfig.read({"pool": pool, "l2": str(store), "l2_max_bytes": 1 << 30, "l2_wait_ms": 60_000, **options})
        self.access = pool_access.acquire(config)
        self.second = second_level.acquire(config, self.access)
        self.side = SchedulerSide(config, self.access, Shape.plain(BLOCK_TOKENS), True, True, second=self.second)
        fields = {"model": "m", "dtype": "d", "layer_count": 1, "kv_head_count": 1, "head_size": 8, "layout": "l", "tp_size": 3}
        self.namespaces = [kvbm_cxl.Namespace(**fields, block_tokens=BLOCK_TOKENS, tp_rank=rank) for rank in range(ranks)]
        self.side.handshake({(0, rank): WorkerHandshake(((bytes(ns),),), 4096) for rank, ns in enumerate(self.namespaces)})

    def publish(self, asked) -> list[bytes]:
        keys = group_keys(asked, 0, BLOCKS)
        for rank, namespace in enumerate(self.namespaces):
            stored = self.access.call(lambda cache: cache.publish_all(namespace, keys, [data_of(rank, key) for key in keys]))
            assert set(stored) == {"stored"}
        return keys

    def has(self, keys) -> list[int]:
        """How many of the blocks each rank has."""
        return [sum(self.access.call(lambda cache: cache.has(namespace, keys))) for namespace in self.namespaces]

    def publish_others(self, count: int) -> None:
        """Publishes blocks of another model, which the pool has to make room for."""
        other = kvbm_cxl.Namespace(model="other", dtype="d", layer_count=1, kv_head_count=1, head_size=8, block_tokens=16, layout="l")
        for _ in range(count):
            self.others += 1
            self.access.call(lambda cache: cache.publish(other, kvbm_cxl.chain_key(None, [self.others]), bytes(4096)))

    def match(self, asked):
        """What is promised once the request does not have to wait."""
        return until(lambda: (found := self.side.match(asked, 0))[0] is not None and found, "no answer")

    def counts(self) -> dict[str, int]:
        stats = self.side.take_stats()
        return stats.data["counters"] if stats else {}

    def close(self) -> None:
        self.side.step(Scheduled())
        self.side.close()
        self.second.release()
        self.access.release()


@pytest.fixture
def engine(make_pool):
    made = []

    def make(store, pool=None, **options) -> Engine:
        made.append(Engine(pool or make_pool(size="24M", cells="64K:60%"), store, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not second_level._registry


def evicted(here: Engine, asked) -> list[bytes]:
    """Publishes a prompt and has it evicted, with copies in the level: its keys."""
    keys = here.publish(asked)
    here.second.begin_demoting()
    namespaces = [bytes(namespace) for namespace in here.namespaces]

    def kept():
        here.publish_others(4)
        return here.second.level.leading(namespaces, keys) == len(keys)

    def gone():
        here.publish_others(40)
        return not any(here.has(keys))

    until(kept, f"not kept: {here.second.level.counts()}")
    until(gone, "not evicted")
    return keys


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evicted_prompt_comes_back_for_a_request_that_waits(engine, tmp_path, ranks):
    here, asked = engine(tmp_path / "store", ranks=ranks), request("a", tokens(100))
    keys = evicted(here, asked)
    assert here.side.match(asked, 0) == (None, False), "it waits"
    assert here.match(asked) == (BLOCKS * BLOCK_TOKENS, True)
    for rank, namespace in enumerate(here.namespaces):
        for key in keys:
            into = bytearray(len(data_of(rank, key)))
            assert here.access.call(lambda cache: cache.pull(namespace, key, into)).hit and bytes(into) == data_of(rank, key)
    counts = here.counts()
    assert counts["second_level/promoted"] == BLOCKS * ranks and counts["second_level/demoted"] >= BLOCKS * ranks
    assert counts["lookups/deferred"] >= 1 and "second_level/failed" not in counts
    assert "second_level/promoted" not in here.counts(), "counted once"


def test_another_engine_finds_what_one_kept(engine, tmp_path):
    here, asked = engine(tmp_path / "store"), request("a", tokens(100))
    evicted(here, asked)
    here.second.release()  # The other one is a process of its own: it has a level of its own over the same store.
    second_level._registry.clear()
    there = engine(tmp_path / "store")
    here.second._users = 1
    until(lambda: there.second.level.counts()["objects"] >= BLOCKS, "the store was not looked through")
    assert there.match(asked) == (BLOCKS * BLOCK_TOKENS, True)


def test_the_store_is_asked_once_and_not_at_all_for_what_is_there(engine, tmp_path):
    here, asked = engine(tmp_path / "store"), request("a", tokens(100))
    assert here.side.match(asked, 0) == (0, False), "nothing is kept, and nothing is waited for"
    here.publish(asked)
    assert here.side.match(asked, 0)[0] == BLOCKS * BLOCK_TOKENS


def test_damaged_and_missing_objects_are_computed(engine, tmp_path):
    store = tmp_path / "store"
    here, asked = engine(store), request("a", tokens(100))
    keys = evicted(here, asked)
    third = next(path for path in store.rglob("*.kv") if keys[2].hex() in path.name)
    *whole, last = third.read_bytes()
    third.write_bytes(bytes([*whole, last ^ 1]))
    assert here.match(asked) == (2 * BLOCK_TOKENS, True), "as far as the blocks are whole"
    store.rename(tmp_path / "gone")
    again = request("b", tokens(100))
    here.side.step(Scheduled())
    assert here.match(again)[0] == 2 * BLOCK_TOKENS


def test_a_request_does_not_wait_for_a_store_that_stands_still(engine, tmp_path, monkeypatch):
    here, asked = engine(tmp_path / "store", l2_wait_ms=250), request("a", tokens(100))
    evicted(here, asked)
    answers, now_s = threading.Event(), 1000.0
    monkeypatch.setattr(here.second.level._store, "read", lambda path: answers.wait(WAIT_S))
    monkeypatch.setattr(second_level, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert here.side.match(asked, 0) == (None, False)
    now_s += 0.249
    assert here.side.match(asked, 0) == (None, False)
    now_s += 0.002
    assert here.side.match(asked, 0) == (0, False)
    answers.set()


def test_connectors_of_a_process_share_a_level(engine, tmp_path):
    pool_of = engine(tmp_path / "store")
    config = ConnectorConfig.read({"pool": pool_of.access.spec, "l2": str(tmp_path / "store"), "l2_max_bytes": 1 << 30})
    same = second_level.acquire(config, pool_of.access)
    assert same is pool_of.second
    same.release()
    pool_of.second.begin_demoting()
    assert not pool_of.second.level._is_closed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"l2": "/x"}, "l2 and l2_max_bytes go together"),
        ({"l2_max_bytes": 5}, "l2 and l2_max_bytes go together"),
        ({"l2": "/x", "l2_max_bytes": 5, "l2_wait_ms": -1}, "l2_wait_ms is -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        ConnectorConfig.read({"pool": "p", **options})


def test_a_store_that_cannot_be_is_named(engine, make_pool, tmp_path):
    access = SimpleNamespace()
    for wrong in ("/proc/no/such", "no-such-scheme://bucket"):
        config = ConnectorConfig.read({"pool": "p", "l2": wrong, "l2_max_bytes": 1})
        with pytest.raises(ConfigError, match="cannot use l2"):
            second_level.acquire(config, access)


def test_models_with_several_groups_are_refused():
    shape = Shape.plain(BLOCK_TOKENS)
    several = SimpleNamespace(groups=[shape.groups[0], shape.groups[0]])
    config = ConnectorConfig.read({"pool": "p", "l2": "/x", "l2_max_bytes": 1})
    second_level.check(config, shape)
    with pytest.raises(ConfigError, match="one KV cache group"):
        second_level.check(config, several)
    second_level.check(ConnectorConfig.read({"pool": "p"}), several)
