# SPDX-License-Identifier: Apache-2.0
"""An engine in a pool whose manager stops: no lock of the pool comes, and no request waits for one. Publishing goes on when it is back."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from engines import engine, prompt
from kvbm_cxl.vllm_integration import handover, saver

# So long that the engine, which has a seat as well, does not take the manager's place before the requests of the test have ended.
SUSPECT_MS, LOCK_TIMEOUT_MS = 120_000, 30_000
PATIENCE_S = 0.6
WAITS_S = 240
# The machine is shared: times are compared with this much to spare, a fraction of the locks' time-out.
SPARE_S = 5.0
MANAGER = "import kvbm_cxl, sys; pool = kvbm_cxl.Pool(sys.argv[1]); cache = pool.cache(); print('joined', flush=True); sys.stdin.read()"
ASKED = {"extra_args": {"kv_transfer_params": handover.prefill_params()}}


class Manager:
    """The machine that manages the pool, as a process. It stops, and continues."""

    def __init__(self, pool: str, machine: str, folder: Path) -> None:
        env = {**os.environ, "CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", MANAGER, pool], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "joined\n"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAITS_S)


@pytest.fixture
def managed(tmp_path, monkeypatch):
    """A pool, and the process that manages it."""
    machine, path = uuid.uuid4().hex, f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("CXL_SUSPECT_MS", str(SUSPECT_MS))
    for name in ("manager", "engine"):
        (tmp_path / name).mkdir(mode=0o700)
    format_pool = [str(Path(sys.executable).with_name("cxlctl")), "format", "--seats", "1", "--machine", machine]
    subprocess.run([*format_pool, "--cells", "512K:75%", "--pool", f"{path},size=160M"], check=True, capture_output=True, timeout=WAITS_S)
    monkeypatch.setenv("CXL_MACHINE_ID", uuid.uuid4().hex)
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "engine"))
    manager = None
    try:
        manager = Manager(path, machine, tmp_path / "manager")
        yield path, manager
    finally:
        if manager:
            manager.end()
        Path(path).unlink(missing_ok=True)


@pytest.mark.parametrize("options", ({}, {"publish_behind": False}), ids=("behind", "before"))
def test_no_request_waits_while_no_manager_answers(model, managed, monkeypatch, options):
    pool, manager = managed
    monkeypatch.setattr(saver, "LEAST_PATIENCE", PATIENCE_S * 1000 / SUSPECT_MS)
    seed = iter(range(100, 1000))

    def asks(count: int, running, **sampling) -> list[float]:
        took = []
        for _ in range(count):
            began = time.monotonic()
            assert len(running.texts([prompt(400, next(seed))], max_tokens=3, **sampling)[0]) == 3
            took.append(time.monotonic() - began)
        return took

    extra = {**options, "cache": {"lock_timeout_ms": LOCK_TIMEOUT_MS}}
    with engine(model, "kv_both", pool, extra=extra) as running:
        usual_s = max(asks(4, running) + asks(2, running, **ASKED))
        running.settle()
        assert running.counted()["published_blocks/stored"] > 10
        manager.stop()
        took = asks(6, running) + asks(4, running, **ASKED) + asks(2, running)
        assert max(took) < 2 * usual_s + PATIENCE_S + SPARE_S and max(took) < LOCK_TIMEOUT_MS / 1000, (usual_s, took)
        saves = running.worker_side.saver.saves
        assert saves.is_held_up
        running.settle()
        counted = running.counted()
        # Blocks of 8 requests, and with their tails of the 4 that are handed over. The engine keeps the locks that it had, which serve some
        # of the keys. The blocks that wait for a lock first end with its time-out, unless it comes before.
        outcomes = {name.partition("/")[2]: count for name, count in counted.items() if name.startswith("published_blocks/")}
        assert outcomes.keys() <= {"stored", "no_lock", "timeout"} and sum(outcomes.values()) == 8 * 3 + 4 * 4, counted
        assert outcomes["no_lock"] >= 8 and counted["prompt_tokens/computed"] == 12 * 400, counted
        # A hand-over that says what was not published is a hint that fails, and no wait.
        expected = running.handed_over([prompt(400, next(seed))])
        began = time.monotonic()
        running.outputs([prompt(400, 99)], max_tokens=1, extra_args=expected[0])
        assert time.monotonic() - began < 2 * usual_s + PATIENCE_S + SPARE_S
        manager.go_on()
        deadline = time.monotonic() + WAITS_S
        while saves.is_held_up:
            assert time.monotonic() < deadline, "publishing does not begin again by itself"
            time.sleep(0.05)
        last = prompt(400, next(seed))
        text = running.texts([last])
        running.settle()
        assert running.in_pool(last) == 3
        running.forget()
        assert running.texts([last]) == text and running.counted()["external_hits"] >= 3 * 128
