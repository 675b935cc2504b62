# SPDX-License-Identifier: Apache-2.0
"""A recorder writes requests and publishes as salted ids, and waits for nothing."""

import json

import kvbm_cxl
import pytest
from pools import chain, namespace

NS = namespace()


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def recorded(directory, salt, keys):
    recorder = kvbm_cxl.TraceRecorder(str(directory), salt, block_tokens=16)
    recorder.asked(NS, keys, 60, 32)
    recorder.published(NS, keys[2:])
    recorder.close()
    recorder.close()
    with pytest.raises(kvbm_cxl.ClosedError):
        recorder.asked(NS, keys, 1, 0)
    return lines(recorder.path)


def test_one_salt_gives_equal_ids_and_another_none(tmp_path):
    keys = chain(3)
    head, asked, published, end = recorded(tmp_path, "one", keys)
    assert head["recorder"] == 1 and head["block_tokens"] == 16 and "one" not in head.values()
    assert (asked["input_length"], asked["found"], len(asked["hash_ids"])) == (60, 32, 3)
    assert published["published"] == asked["hash_ids"][2:] and asked["at_us"] <= published["at_us"] <= end["at_us"]
    assert (end["dropped"], end["failed"]) == (0, 0)
    assert recorded(tmp_path, "one", keys)[1]["hash_ids"] == asked["hash_ids"]
    other = recorded(tmp_path, "two", keys)
    assert not set(other[1]["hash_ids"]) & set(asked["hash_ids"]) and other[0]["salt"] != head["salt"]
    assert len(list(tmp_path.iterdir())) == 3, "a file of its own for each"


def test_what_does_not_fit_is_counted(tmp_path):
    recorder = kvbm_cxl.TraceRecorder(str(tmp_path), "salt", block_tokens=16, max_bytes=1024)
    for _ in range(100):
        recorder.asked(NS, chain(8), 128, 0)
    recorder.asked(NS, [bytes(16)] * (1 << 19), 1, 0)
    assert recorder.counts[1] >= 1 and recorder.last_error is None
    recorder.close()
    found = lines(recorder.path)
    assert found[-1]["dropped"] == 101 - (len(found) - 2) > 90


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(kvbm_cxl.InvalidError, match="salt"):
        kvbm_cxl.TraceRecorder(str(tmp_path), "", block_tokens=16)
    with pytest.raises(kvbm_cxl.SystemError_, match="nowhere"):
        kvbm_cxl.TraceRecorder("/proc/nowhere", "salt", block_tokens=16)
    with pytest.raises(kvbm_cxl.InvalidError, match="16 bytes"):
        kvbm_cxl.TraceRecorder(str(tmp_path), "salt", block_tokens=16).asked(NS, [b"short"], 1, 0)
