# SPDX-License-Identifier: Apache-2.0
"""Pools with metadata on another device than their payload, PATH,metadata=PATH2: what lies where, hosts that are killed, and refusals."""

import hashlib
from pathlib import Path

import kvbm_cxl
import pools
import pytest
from pools import chain, namespace, opened, payload

NS = namespace()
MIB = 1 << 20
SIZE = 32 * MIB


@pytest.fixture
def spec(tmp_path, this_machine):
    """The pool's name. Its metadata lies in the middle of a file that holds unlike bytes before and behind."""
    metadata = tmp_path / "metadata"
    metadata.write_bytes(hashlib.shake_128(b"metadata").digest(SIZE))
    name = f"{tmp_path / 'payload'},metadata={metadata},metadata_offset={2 * MIB}"
    kvbm_cxl.format_pool(name.replace(",", f",size={SIZE},", 1), cells=f"{pools.CELL_BYTES}:50%", force=True)
    return name


def _files(spec):
    """The files of payload and metadata."""
    payload_name, metadata, *_ = spec.split(",")
    return Path(payload_name), Path(metadata.removeprefix("metadata="))


def _sums(*paths):
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_the_description_tells_what_lies_where(spec):
    info = kvbm_cxl.pool_info(spec)
    needed = info["metadata_bytes"]
    assert 2 * MIB < needed < SIZE and needed % (2 * MIB) == 0 and info["len_bytes"] == SIZE + needed
    payload_file, metadata_file = map(str, _files(spec))
    assert [(device["name"], device["offset_bytes"]) for device in info["devices"]] == [(metadata_file, 2 * MIB), (payload_file, 0)]
    with opened(f"{spec},metadata_size={SIZE - 2 * MIB}") as pool:
        assert (pool.spec, pool.uuid) == (spec, info["uuid"])


def test_hosts_publish_and_pull_and_one_is_killed(spec, coherence, cache, peer):
    """Its blocks stay, its cells come back, and no byte beside the metadata changes."""
    payload_file, metadata_file = _files(spec)
    [cells], needed = kvbm_cxl.pool_info(spec)["cells"], kvbm_cxl.pool_info(spec)["metadata_bytes"]
    mine, into = chain(20, 1), bytearray(5000)
    assert {cache.publish(NS, key, payload(key, 5000)) for key in mine} == {"stored"}
    other = peer("another")
    assert other("right", "tiny", 1, 20, 5000) == 20
    # More than the pool has cells, so that it owns all that are left; the last ones are still there.
    assert set(other("publish", "tiny", 2, cells["count"] + 40, 5000)) == {"stored"}
    last = chain(cells["count"] + 40, 2)[-40:]
    target = bytearray(40 * 5000)
    layout = kvbm_cxl.BlockLayout.of_tensors([memoryview(target).cast("B", (40, 5000))])
    assert cache.pull_blocks(NS, last, layout, range(40)) == [None] * 40
    assert bytes(target) == b"".join(payload(key, 5000) for key in last)
    other.send("stream", "tiny", 3, 20_000)
    other.answer()
    other.kill()
    again = peer("another")
    assert set(again("publish", "tiny", 4, 60, 5000)) == {"stored"}
    assert again("right", "tiny", 4, 60, 5000) == 60
    for key in chain(60, 4):
        assert cache.pull(NS, key, into) and bytes(into) == payload(key, 5000)
    again.kill()

    content, metadata = payload_file.read_bytes(), metadata_file.read_bytes()
    for key in mine + chain(60, 4):
        assert content.count(payload(key, 5000)) == 1 and metadata.find(payload(key, 64)) < 0
    before = hashlib.shake_128(b"metadata").digest(SIZE)
    assert metadata[: 2 * MIB] == before[: 2 * MIB] and metadata[2 * MIB + needed :] == before[2 * MIB + needed :]


def test_names_without_the_right_device_are_refused_and_nothing_is_written(spec, tmp_path):
    other = f"{tmp_path / 'other'},metadata={tmp_path / 'other-metadata'}"
    kvbm_cxl.format_pool(f"{other},size={SIZE},metadata_size={SIZE}")
    (payload_file, metadata_file), (other_payload, other_metadata) = _files(spec), _files(other)
    gone = tmp_path / "gone"
    files = [payload_file, metadata_file, other_payload, other_metadata]
    before = _sums(*files)
    at = f",metadata_offset={2 * MIB}"
    refusals = {
        str(payload_file): (kvbm_cxl.NotAPoolError, "it carries the metadata: name it with metadata=PATH"),
        f"{payload_file},metadata={other_metadata}": (kvbm_cxl.NotAPoolError, "foreign: it belongs to pool"),
        f"{other_payload},metadata={metadata_file}{at}": (kvbm_cxl.NotAPoolError, "foreign: it belongs to pool"),
        f"{payload_file},metadata={metadata_file}": (kvbm_cxl.NotAPoolError, "metadata: foreign: it holds something that is not a pool"),
        f"{payload_file},metadata={gone}": (kvbm_cxl.NotAPoolError, "gone: there is no such device"),
        f"{payload_file},metadata={payload_file}": (kvbm_cxl.InvalidError, "for the payload and for the metadata"),
        f"{payload_file}{at}": (kvbm_cxl.InvalidError, "add metadata=PATH"),
        f"{payload_file},metadata=/dev/dax0.0,metadata={metadata_file}": (kvbm_cxl.InvalidError, "two devices for metadata"),
    }
    for name, (error, says) in refusals.items():
        for call in (kvbm_cxl.Pool, kvbm_cxl.pool_info):
            with pytest.raises(error, match=says):
                call(name)
        with pytest.raises(kvbm_cxl.CxlError):
            kvbm_cxl.format_pool(name)
    assert _sums(*files) == before and not gone.exists()


def test_a_format_over_one_of_its_devices_sees_its_hosts_or_is_told_to_do_without(spec, tmp_path):
    payload_file, metadata_file = _files(spec)
    with opened(spec, heartbeat_ms=5):
        with pytest.raises(kvbm_cxl.SlotInUseError) as refused:
            kvbm_cxl.format_pool(str(payload_file), force=True)
        assert refused.value.kind == "in_use"
        metadata_file.rename(tmp_path / "moved")
        with pytest.raises(kvbm_cxl.SlotInUseError, match="metadata: there is no such device") as refused:
            kvbm_cxl.format_pool(str(payload_file), force=True)
        assert refused.value.kind == "hosts_unseen"
    kvbm_cxl.format_pool(str(payload_file), force=True, evict_hosts=True)
    assert kvbm_cxl.pool_info(str(payload_file))["metadata_bytes"] == 0
