# SPDX-License-Identifier: Apache-2.0
"""The second level on an S3 server (moto's, by s3fs): what an object store may do to it, slow and silent servers among them."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from kvbm_cxl.l2 import Demoter, open_store
from kvbm_cxl.l2.objects import HEADER_BYTES, payload_of
from pools import Peer, chain, payload
from second_level import (
    LEN,
    NS,
    PATIENCE_S,
    data_of,
    level_of,
    name_of,
    pool_of_one_chunk,
    publish_slowly,
    pulled,
    store_chain,
    until,
)

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: make setup-s3 test-python installs it, and moto")
pytest.importorskip("moto.server", reason="moto is not installed: make setup-s3 test-python installs it, and s3fs")

URL = "s3://kvbm-cxl/a/folder"
SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class Server:
    """moto's S3 server, a process of its own, with a bucket. What it has is gone with it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
        )
        # It says more than its port.
        said = next((line for line in self.process.stdout if line.strip().isdigit()), None)
        assert said, "the server ended before it served"
        self.port = int(said)

    def end(self):
        self.process.kill()
        self.process.wait()


class Wire:
    """What lies between a client and the server: it can be slow, silent, or break in the middle of an answer."""

    def __init__(self, port):
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.answers = threading.Event()
        self.answers.set()
        self.cut_bytes = None
        """Answers end after so many bytes."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    client.close()
                    continue
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source, target, is_answer):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.answers.wait()
                if is_answer and self.cut_bytes is not None:
                    data = data[: max(self.cut_bytes - passed, 0)]
                    passed += len(data)
                    if not data:
                        break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self.answers.set()
        self._socket.close()


@pytest.fixture
def spec(tmp_path_factory, monkeypatch):
    """A pool of one chunk: 112 blocks."""
    return pool_of_one_chunk(tmp_path_factory.mktemp("pool"), monkeypatch)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.end()


@pytest.fixture
def wire(server, monkeypatch):
    """The way to the server, which is the one that this process and its children take. A client of its own for each test."""
    wire = Wire(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    # Proxies of this machine are not for its own servers.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    yield wire
    wire.close()
    s3fs.S3FileSystem.clear_instance_cache()


def raw():
    """The bucket, beside the store."""
    return s3fs.S3FileSystem(skip_instance_cache=True)


def test_evicted_blocks_come_back(cache, wire):
    keys = chain(200)
    level = level_of(open_store(URL), threads=8)
    demoter = Demoter(lambda work: work(cache), level, period_s=0.005)
    publish_slowly(cache, level, keys, ahead=64)
    gone = [key for key in keys if not cache.has(NS, [key])[0]]
    assert len(gone) > 80 and level.leading([bytes(NS)], gone) == len(gone)
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys[:30])
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 30
    assert all(pulled(cache, key) == payload(key, LEN) for key in keys[:30])
    demoter.close()
    level.close()
    # The bucket was made, and what lies in it is whole.
    there = raw().find(URL)
    assert len(there) >= len(gone) and all(path.startswith("kvbm-cxl/a/folder/") for path in there)
    key = gone[0]
    assert bytes(payload_of(raw().cat_file(f"{URL}/{name_of(key).path}"), name_of(key))[1]) == payload(key, LEN)


def test_a_restart_finds_what_was_kept_page_by_page(cache, wire):
    keys, more = chain(20), chain(1_050, seed=1)
    store_chain(open_store(URL), keys)
    bucket = raw()
    # A listing tells a thousand at a time.
    bucket.pipe({f"{URL}/{name_of(key).path}": b"x" * HEADER_BYTES for key in more})
    bucket.pipe_file(f"{URL}/not_ours", b"x" * 500)
    s3fs.S3FileSystem.clear_instance_cache()
    level = level_of(open_store(URL))
    assert level.counts()["objects"] == 1_070
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 20
    assert all(pulled(cache, key) == payload(key, LEN) for key in keys)
    # What another host deletes is gone with the next look.
    bucket.rm_file(f"{URL}/{name_of(keys[7]).path}")
    until("it is gone", lambda: level.leading([bytes(NS)], keys) == 7)
    level.close()


@pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "swapped", "gone"])
def test_a_damaged_object_is_a_miss(cache, wire, how):
    keys = chain(12)
    level = level_of(store_chain(open_store(URL), keys), refresh_s=60)
    path, data, bucket = f"{URL}/{name_of(keys[5]).path}", data_of(keys[5], keys[4]), raw()
    flipped = data[:9000] + bytes([data[9000] ^ 4]) + data[9001:]
    new = {"flipped": flipped, "truncated": data[:-1], "emptied": b"", "swapped": data_of(keys[6])}
    bucket.rm_file(path) if how == "gone" else bucket.pipe_file(path, new[how])
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 5
    reason = {"flipped": "checksum", "swapped": "foreign", "gone": "absent"}.get(how, "truncated")
    assert level.counts()[f"missed_{reason}"] == 1
    bucket.invalidate_cache()
    assert not bucket.exists(path) and pulled(cache, keys[5]) is None
    level.close()


def test_an_answer_that_breaks_off_is_a_miss(cache, wire):
    keys = chain(12)
    level = level_of(store_chain(open_store(URL), keys), refresh_s=60, slow_s=60)
    wire.cut_bytes = 20_000
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 0 and level.counts()["errors"] >= 1
    assert not any(cache.has(NS, keys))
    # The objects are whole, and were not taken for damaged ones.
    wire.cut_bytes = None
    assert len(raw().find(URL)) == 12
    level.close()


def test_a_server_that_is_gone_costs_hits_and_nothing_else(cache, wire, server, caplog):
    keys, new = chain(12), chain(150, seed=2)
    level = level_of(store_chain(open_store(URL), keys), refresh_s=60, queue_bytes=10 * LEN, threads=2)
    demoter = Demoter(lambda work: work(cache), level, period_s=0.005)
    server.end()
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    began = time.monotonic()
    for key in new:
        assert cache.publish(NS, key, payload(key, LEN)) == "stored"
    # Publishing takes memory's time, not that of a connection that is tried again and again.
    assert time.monotonic() - began < 30
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 0
    until("blocks are dropped", lambda: level.counts().get("dropped_unfit", 0) + level.counts().get("dropped_full", 0) > 10)
    until("it is let alone", lambda: level.leading([bytes(NS)], keys[1:]) == 0)
    assert level.counts()["queued_bytes"] <= 10 * LEN and level.counts()["errors"] >= 1
    assert "the second level failed" in caplog.text
    demoter.close()
    level.close()


def test_a_server_that_comes_back_empty_is_used_again(cache, wire, server):
    keys = chain(6)
    level = level_of(store_chain(open_store(URL), keys), refresh_s=0.2)
    server.end()
    again = Server()
    try:
        wire._to = again.port
        until("its emptiness is seen", lambda: level.leading([bytes(NS)], keys) == 0 and level.counts()["objects"] == 0)

        def is_kept():
            level.demote(name_of(keys[0]), None, bytearray(payload(keys[0], LEN)))
            return level.counts()["objects"] == 1

        until("it is written to again", is_kept)
        promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
        assert promotion.wait(PATIENCE_S) and promotion.blocks == 1 and pulled(cache, keys[0]) == payload(keys[0], LEN)
        level.close()
    finally:
        again.end()


def test_a_server_that_is_silent_keeps_nothing_waiting(cache, wire):
    keys, new = chain(6), chain(250, seed=3)
    level = level_of(store_chain(open_store(URL), keys), refresh_s=60, slow_s=0.5, queue_bytes=10 * LEN, threads=2)
    wire.answers.clear()
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    demoter = Demoter(lambda work: work(cache), level, period_s=0.005)
    for key in new:
        assert cache.publish(NS, key, payload(key, LEN)) == "stored"
    until("blocks are dropped", lambda: level.counts().get("dropped_unfit", 0) + level.counts().get("dropped_full", 0) > 10)
    assert level.counts()["queued_bytes"] <= 10 * LEN
    until("it counts as slow", lambda: level.leading([bytes(NS)], keys) == 0)
    assert level.promote(lambda work: work(cache), [bytes(NS)], keys) is None and not promotion.has_ended
    wire.answers.set()
    assert promotion.wait(PATIENCE_S)
    until("it is used again", lambda: level.leading([bytes(NS)], keys) == 6)
    assert all(pulled(cache, key) in (None, payload(key, LEN)) for key in keys)
    demoter.close()
    level.close()


def test_closing_does_not_wait_for_a_server_that_is_silent(cache, wire):
    level = level_of(open_store(URL), threads=1)
    wire.answers.clear()
    for key in chain(9):
        assert level.demote(name_of(key), None, bytearray(payload(key, LEN)))
    began = time.monotonic()
    level.close()
    assert time.monotonic() - began < 30 and level.counts()["dropped_closed"] >= 8


@pytest.mark.parametrize("after_s", [0.3, 1.5])
def test_a_kill_while_blocks_are_demoted_leaves_whole_ones(spec, tmp_path, wire, after_s):
    folders = [path for path in sys.path if os.path.isdir(os.path.join(path, "s3fs"))]
    paths = os.pathsep.join([*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    peer = Peer(spec, tmp_path, machine="one", PYTHONPATH=paths)
    peer.send("demote_stream", "tiny", 3, LEN, URL)
    bucket = raw()

    def found():
        bucket.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return bucket.find(URL)
        return []

    until("it writes", found)
    time.sleep(after_s)
    peer.kill()
    keys = {name_of(key).path: key for key in chain(4096, 3)}
    objects = found()
    for path in objects:
        key = keys[path.removeprefix("kvbm-cxl/a/folder/")]
        assert bytes(payload_of(bucket.cat_file(path), name_of(key))[1]) == payload(key, LEN)
    level = level_of(open_store(URL))
    assert level.counts()["objects"] == len(objects) > 0
    level.close()
