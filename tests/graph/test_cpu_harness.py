# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processes on CPUs are given so that a few cores are enough for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from graph.environment import HARNESS

LOST_S = 2
LOSES_A_MESSAGE = """
import threading, time
from vllm.distributed.device_communicators import shm_broadcast

writer = shm_broadcast.MessageQueue(1, 1)
reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
ready = threading.Thread(target=writer.wait_until_ready)
ready.start()
reader.wait_until_ready()
ready.join()
sleeper, asleep = reader._spin_condition, threading.Event()
poll = sleeper.poller.poll


class Poller:
    def poll(self, timeout=None):
        asleep.set()
        return poll(timeout=timeout)


sleeper.poller, sleeper.last_read = Poller(), 0
writer._spin_condition.notify = lambda: None
taken = []
thread = threading.Thread(target=lambda: taken.append(reader.dequeue()))
thread.start()
asleep.wait()
began = time.monotonic()
writer.enqueue("work")
thread.join()
assert taken == ["work"], taken
print(time.monotonic() - began)
"""


# Bit 18 of what the kernel permits this process: data of AMX tiles (arch_prctl, ARCH_GET_XCOMP_PERM).
ASKS_FOR_AMX = """
import ctypes
{imports}
permitted = ctypes.c_uint64()
assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(permitted)) == 0
print(permitted.value >> 18 & 1)
"""


def seconds_without_a_wake_up(python_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | python_path
    command = [sys.executable, "-c", LOSES_A_MESSAGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_worker_that_was_not_woken_looks_again_soon():
    assert seconds_without_a_wake_up({"PYTHONPATH": str(HARNESS)}) < LOST_S
    # The flaw is vLLM's: where it is gone, so can this be.
    assert seconds_without_a_wake_up({}) > LOST_S


def may_use_amx(imports, python_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | python_path
    done = subprocess.run([sys.executable, "-c", ASKS_FOR_AMX.format(imports=imports)], env=environment, capture_output=True, text=True,
                          timeout=240, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "1"


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AMX")
def test_a_worker_that_computes_no_prompt_may_use_amx():
    backend = "import vllm.v1.attention.backends.cpu_attn"
    assert may_use_amx(backend, {"PYTHONPATH": str(HARNESS)})
    assert not may_use_amx(backend, {}), "vLLM asks by itself now: the harness and worker_start need not"
    ours = "from kvbm_cxl.vllm_integration import worker_start; worker_start._ask_for_amx()"
    assert may_use_amx(ours, {"PYTHONPATH": str(HARNESS.parents[2] / "python")})
