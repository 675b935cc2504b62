# SPDX-License-Identifier: Apache-2.0
"""An etcd server, pools, and keepers of hosts on them, as processes."""

import base64
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
ETCD = ROOT / ".venv/etcd/etcd"
PATIENCE_S = 30
TTL_S = 2


def await_that(is_so, what):
    """Waits until it is so, and gives what it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Etcd:
    """A server of its own, with what the tests need of its JSON interface."""

    def __init__(self, folder):
        self.folder, self.port, self.process = folder, free_port(), None
        self.peer_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        log = open(self.folder / "etcd.log", "ab")
        peer = f"http://127.0.0.1:{self.peer_port}"
        command = [ETCD, "--data-dir", self.folder / "etcd", "--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        await_that(self.is_up, "etcd does not answer")

    def is_up(self):
        try:
            return json.load(urllib.request.urlopen(f"{self.url}/health", timeout=1))["health"] == "true"
        except (OSError, ValueError):
            assert self.process.poll() is None, (self.folder / "etcd.log").read_text()
            return False

    def stop(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def call(self, path, **body):
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=PATIENCE_S))

    def keys(self):
        """Every key with its value and lease."""
        everything = base64.b64encode(b"\0").decode()
        found = self.call("kv/range", key=everything, range_end=everything).get("kvs", [])

        def text(pair, field):
            return base64.b64decode(pair[field]).decode()

        return {text(pair, "key"): (text(pair, "value"), int(pair.get("lease", 0))) for pair in found}

    def put(self, key, value):
        self.call("kv/put", key=base64.b64encode(key.encode()).decode(), value=base64.b64encode(value.encode()).decode())

    def revoke(self, lease):
        self.call("lease/revoke", ID=str(lease))

    def holders(self):
        """Slot -> holder."""
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, (value, _) in self.keys().items()}

    def lease_of(self, slot):
        return next(lease for key, (_, lease) in self.keys().items() if key.endswith(f"/{slot}"))


class Keeper:
    """`cxl-member` on a machine of its own."""

    def __init__(self, bench, machine, command=()):
        self.log = bench.folder / f"keeper-{machine}-{time.monotonic_ns()}.log"
        program = [TARGET / "cxl-member", "--endpoints", bench.etcd.url, "--ttl-s", str(TTL_S), "--timeout-ms", "2000", *command]
        with open(self.log, "wb") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
            self.process = subprocess.Popen(program, env=bench.environment(machine), **pipes)
        bench.processes.append(self.process)

    def joined(self):
        """What it says when it has joined."""
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def end(self, signal=15):
        """Its exit code after a signal."""
        self.process.send_signal(signal)
        return self.process.wait(PATIENCE_S)


class Bench:
    """A pool, an etcd, and the machines that use both."""

    def __init__(self, folder, etcd):
        self.folder, self.etcd, self.processes = folder, etcd, []
        self.pool = folder / "pool"

    def environment(self, machine):
        changed = {"CXL_POOL": str(self.pool), "CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(self.folder / machine)}
        return {**os.environ, **changed}

    def cxlctl(self, *arguments, machine="a"):
        command = [TARGET / "cxlctl", *arguments]
        done = subprocess.run(command, env=self.environment(machine), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def format(self, slots=4):
        """The machine that formats has the manager's seat."""
        self.cxlctl("--pool", f"{self.pool},size=64M", "format", "--slots", str(slots))

    def slot(self, number):
        """What the pool says of a slot."""
        return json.loads(self.cxlctl("hosts", "--json"))["slots"][number]

    def keep(self, machine, *command):
        return Keeper(self, machine, command)


@pytest.fixture
def bench():
    missing = [str(path) for path in (ETCD, TARGET / "cxl-member", TARGET / "cxlctl") if not path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not there: `make test-member` sets them up")
    with tempfile.TemporaryDirectory(prefix="cxl-member-", dir="/dev/shm") as folder:
        etcd = Etcd(Path(folder))
        made = Bench(Path(folder), etcd)
        try:
            made.format()
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait(PATIENCE_S)
            etcd.stop()
