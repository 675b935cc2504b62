# SPDX-License-Identifier: Apache-2.0
"""The second level with a folder that NIXL's backend POSIX reads and writes: the same objects as without it, and the same misses."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvbm_cxl.l2 import LocalStore, open_store
from kvbm_cxl.l2.objects import HEADER_BYTES
from pools import chain, payload
from second_level import LEN, NS, PATIENCE_S, data_of, level_of, name_of, pool_of_one_chunk, publish_slowly, pulled, store_chain, until

pytest.importorskip("nixl", reason="NIXL is not installed here")
from kvbm_cxl.l2 import Demoter  # noqa: E402
from kvbm_cxl.l2.nixl_store import NixlStore  # noqa: E402


@pytest.fixture
def spec(tmp_path_factory, monkeypatch):
    """A pool of 112 blocks."""
    return pool_of_one_chunk(tmp_path_factory.mktemp("pool"), monkeypatch)


@pytest.fixture
def store(tmp_path):
    found = open_store(f"nixl+posix://{tmp_path}/l2")
    assert isinstance(found, NixlStore)
    return found


def test_a_folder_is_the_same_with_and_without_nixl(store, tmp_path):
    plain, keys = LocalStore(str(tmp_path / "l2")), chain(3)
    store.write(name_of(keys[0]).path, [data_of(keys[0])[:HEADER_BYTES], data_of(keys[0])[HEADER_BYTES:]])
    plain.write(name_of(keys[1]).path, [data_of(keys[1], keys[0])])
    for one in (store, plain):
        assert one.read(name_of(keys[0]).path) == data_of(keys[0]) and one.read(name_of(keys[1]).path) == data_of(keys[1], keys[0])
        assert {each.path for each in one.listing()} == {name_of(key).path for key in keys[:2]}
        with pytest.raises(FileNotFoundError):
            one.read(name_of(keys[2]).path)
    store.write(name_of(keys[0]).path, [data_of(keys[0], keys[1])])
    assert plain.read(name_of(keys[0]).path) == data_of(keys[0], keys[1]), "over another one of its path"
    (tmp_path / "l2" / name_of(keys[1]).path).write_bytes(b"")
    assert store.read(name_of(keys[1]).path) == b""
    assert not list((tmp_path / "l2").rglob("*.part"))


def test_threads_read_and_write_at_once(store):
    keys = chain(64)
    paths = [name_of(key).path for key in keys]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.write(name_of(key).path, [data_of(key)]), keys))
        assert list(pool.map(store.read, paths)) == [data_of(key) for key in keys]


def test_evicted_blocks_come_back_through_nixl(cache, store):
    level = level_of(store)
    demoter = Demoter(lambda work: work(cache), level, period_s=0.002)
    keys = chain(300)
    publish_slowly(cache, level, keys)
    demoter.close()
    assert pulled(cache, keys[0]) is None, "it was evicted"
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys[:20])
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 20
    assert [pulled(cache, key) for key in keys[:20]] == [payload(key, LEN) for key in keys[:20]]
    assert level.counts()["demoted"] >= 180 and "errors" not in level.counts()
    level.close()


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
def test_a_damaged_object_ends_the_chain(cache, store, tmp_path, how):
    keys = chain(6)
    store_chain(store, keys)
    level = level_of(store)
    path = tmp_path / "l2" / name_of(keys[3]).path
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if how == "flipped" else data[: len(data) // 2])
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 3
    counted = {"flipped": "missed_checksum", "truncated": "missed_truncated", "gone": "missed_absent"}[how]
    until("it is counted", lambda: level.counts().get(counted) == 1)
    assert [pulled(cache, key) for key in keys[:4]] == [*(payload(key, LEN) for key in keys[:3]), None]
    level.close()


def test_without_nixl_it_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ValueError, match="pip install nixl"):
        open_store(f"nixl+posix://{tmp_path}/l2")
    assert not (tmp_path / "l2").exists()
