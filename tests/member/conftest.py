# SPDX-License-Identifier: Apache-2.0
"""Pools and keepers of hosts on them, as processes, beside an etcd server."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from etcd_server import ETCD, PATIENCE_S, Etcd

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
TTL_S = 2


class Keeper:
    """`cxl-member` on a machine of its own."""

    def __init__(self, bench, machine, command=()):
        self.log = bench.folder / f"keeper-{machine}-{time.monotonic_ns()}.log"
        endpoints = [] if "--endpoints" in command else ["--endpoints", bench.etcd.url]
        program = [bench.keeper(), *endpoints, "--ttl-s", str(TTL_S), "--timeout-ms", "2000", *command]
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
        """Makes an empty pool; the first machine that joins claims a seat."""
        self.cxlctl("--pool", f"{self.pool},size=64M", "format", "--slots", str(slots))

    def slot(self, number):
        """What the pool says of a slot."""
        return json.loads(self.cxlctl("hosts", "--json"))["slots"][number]

    def keep(self, machine, *command):
        return Keeper(self, machine, command)

    @staticmethod
    def keeper():
        return TARGET / "cxl-member"


@pytest.fixture
def bench():
    yield from served()


def served(certificates=None):
    """A bench, until the test is over."""
    missing = [str(path) for path in (ETCD, TARGET / "cxl-member", TARGET / "cxlctl") if not path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not there: `make test-member` sets them up")
    with tempfile.TemporaryDirectory(prefix="cxl-member-", dir="/dev/shm") as folder:
        etcd = Etcd(Path(folder), certificates)
        made = Bench(Path(folder), etcd)
        try:
            made.format()
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait(PATIENCE_S)
            etcd.stop()
