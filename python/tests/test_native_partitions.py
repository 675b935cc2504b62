# SPDX-License-Identifier: Apache-2.0
"""Pools side by side on one file, named by PATH,offset=,size=: refusals, and that no pool has, or touches, what is another's."""

import hashlib
from pathlib import Path

import kvbm_cxl
import pools
import pytest
from pools import chain, namespace, opened, payload

NS = namespace()
MIB = 1 << 20
SIZE = 24 * MIB
GAP = 2 * MIB


@pytest.fixture
def shelf(tmp_path, this_machine):
    """A file with two formatted pools and gaps of unlike bytes before, between and behind them; the names of the pools."""
    path = tmp_path / "shelf"
    path.write_bytes(hashlib.shake_128(b"shelf").digest(2 * (GAP + SIZE) + GAP))
    names = [f"{path},offset={GAP + number * (GAP + SIZE)}" for number in range(2)]
    for name in names:
        kvbm_cxl.format_pool(f"{name},size={SIZE}", cells=f"{pools.CELL_BYTES}:50%", force=True)
    return names


def _beside(name):
    """A sum over the bytes of the file that are no pool's."""
    content = Path(name.partition(",")[0]).read_bytes()
    gaps = [content[at : at + GAP] for at in (0, GAP + SIZE, 2 * (GAP + SIZE))]
    assert all(len(gap) == GAP for gap in gaps)
    return hashlib.sha256(b"".join(gaps)).hexdigest()


def test_the_name_and_the_description_carry_the_offset(shelf):
    infos = [kvbm_cxl.pool_info(name) for name in shelf]
    assert infos[0]["uuid"] != infos[1]["uuid"]
    assert [info["devices"][0]["offset_bytes"] for info in infos] == [GAP, 2 * GAP + SIZE]
    assert [info["len_bytes"] for info in infos] == [SIZE, SIZE]
    with opened(f"{shelf[1]},size={SIZE}") as pool:
        assert (pool.spec, pool.uuid) == (shelf[1], infos[1]["uuid"])


def test_a_pool_has_nothing_of_its_neighbour(shelf, tmp_path, coherence):
    before = _beside(shelf[0])
    keys = [chain(40, 1), chain(40, 2)]
    into = bytearray(5000)
    with opened(shelf[0]) as first, opened(shelf[1]) as second, first.cache() as one, second.cache() as other:
        # The same machine in both pools, and a process of another one that is killed in the first and comes back.
        for cache, own in ((one, keys[0]), (other, keys[1])):
            for key in own:
                assert cache.publish(NS, key, payload(key, 5000)) == "stored"
        for life in range(2):
            peer = pools.Peer(shelf[0], tmp_path, "another", CXL_COHERENCE=coherence)
            assert peer("publish", "tiny", 10 + life, 8, 5000) == ["stored"] * 8
            peer.kill()
            for key in keys[1]:
                assert other.pull(NS, key, into) and bytes(into) == payload(key, 5000)
            assert all(one.pull(NS, key, into) and bytes(into) == payload(key, 5000) for key in chain(8, 10 + life))
            assert not any(other.pull(NS, key, into) for key in chain(8, 10 + life))
        assert not any(one.pull(NS, key, into) for key in keys[1]) and not any(other.pull(NS, key, into) for key in keys[0])
    assert _beside(shelf[0]) == before


@pytest.mark.parametrize(
    "part, error, kind, says",
    [
        (",offset=3M,size=4M", kvbm_cxl.InvalidError, "unaligned", "offset=4194304"),
        (",offset=54M,size=4M", kvbm_cxl.InvalidError, "behind_end", "lies behind its end"),
        (",offset=52M,size=4M", kvbm_cxl.InvalidError, "too_long", "2097152 bytes"),
        (",size=4M", kvbm_cxl.ExistsError, "overlap", "overlap the pool"),
        (",offset=24M,size=4M", kvbm_cxl.ExistsError, "overlap", "overlap the pool"),
    ],
)
def test_parts_that_cannot_be_are_refused_even_by_force(shelf, part, error, kind, says):
    path = shelf[0].partition(",")[0]
    before = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    with pytest.raises(error, match=says) as refused:
        kvbm_cxl.format_pool(f"{path}{part}", force=True, evict_hosts=True)
    assert refused.value.kind == kind
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == before
