# SPDX-License-Identifier: Apache-2.0
"""What tests of the second level share: blocks and their objects, levels, chains that are published no faster than they are kept."""

import time
from pathlib import Path

import kvbm_cxl
from kvbm_cxl.l2 import Level2, LocalStore
from kvbm_cxl.l2.objects import BlockName, header
from pools import namespace, payload

NS = namespace()
LEN = 60_000
PATIENCE_S = 120


def until(what, is_so):
    """Waits for it. `what` says what was waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def name_of(key):
    """The block of a key."""
    return BlockName(bytes(NS), key)


def data_of(key, parent=None):
    """Its object."""
    block = payload(key, LEN)
    return header(name_of(key), parent, block) + block


def pulled(cache, key):
    """Its bytes as the cache gives them; None for a miss."""
    into = bytearray(LEN)
    return bytes(into) if cache.pull(NS, key, into) else None


def level_of(store, **options):
    """A level that has looked through its store, or tried to."""
    level = Level2(store, **{"max_bytes": 1 << 30, "refresh_s": 0.05, **options})
    until("the store is looked through", lambda: level.counts().get("refreshed", 0) + level.counts().get("errors", 0))
    return level


def store_chain(store, keys):
    """Writes the objects of a chain."""
    for place, key in enumerate(keys):
        store.write(name_of(key).path, [data_of(key, keys[place - 1] if place else None)])
    return store


def stored(folder, keys):
    """A folder with a chain."""
    return store_chain(LocalStore(str(folder)), keys)


def publish_slowly(cache, level, keys, ahead=4):
    """Publishes a chain. In front of each block those that are about to go are kept, so that none is lost by speed; `ahead` of them, more
    than the evictor takes in the time that the store takes to write."""
    for place, key in enumerate(keys):
        until("they are kept", lambda: all(level.leading([bytes(NS)], [block.key]) for block in cache.coldest(ahead)))
        assert cache.publish(NS, key, payload(key, LEN), parent=keys[place - 1] if place else None) == "stored"


def pool_of_one_chunk(folder, monkeypatch):
    """A pool with room for 112 blocks."""
    monkeypatch.setenv("CXL_STATE_DIR", str(Path(folder) / "state-test"))
    monkeypatch.setenv("CXL_MACHINE_ID", "test")
    monkeypatch.delenv("CXL_POOL", raising=False)
    spec = f"{folder}/pool,size=24M"
    kvbm_cxl.format_pool(spec, cells="64K:7M")
    return spec
