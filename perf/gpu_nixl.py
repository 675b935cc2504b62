#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NIXL between the memory of a GPU in two processes: backend CXL, staged through the pool, beside UCX. **It has never run on a GPU.**

Used by gpu.py, where NIXL is installed. Each backend has two processes of its own, so that one that cannot use the memory ends alone: it is
said, and left out. `nixl_vram_read_1m_ucx_over_cxl` is the time of a READ of 16 pieces of 1 MiB by UCX by that by CXL; above 1 CXL is
faster. The bytes of every transfer are compared outside of its time.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(path) for path in (HERE / "package", HERE.parent / "python") if path.exists()]
# That of the kit, where none is installed.
sys.path.append(str(HERE / "nixl_wheel"))

import gpu_driver  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
# Label -> pieces, bytes of each.
SHAPES = {"1m": (16, MIB), "20k": (128, 20 * KIB)}
LEN_BYTES = 16 * MIB
TIMEOUT_S = 60


class Memory:
    """Memory of the GPU, registered with an agent of one backend."""

    def __init__(self, name, backend):
        if backend == "CXL":
            import kvbm_cxl.nixl

            kvbm_cxl.nixl.enable()
        from nixl._api import nixl_agent, nixl_agent_config

        self.gpu = gpu_driver.Gpu()
        self.address = self.gpu.allocate(LEN_BYTES)
        self.agent, self.backend = nixl_agent(name, nixl_agent_config(backends=[])), backend
        self.agent.create_backend(backend, {})
        self.agent.register_memory([(self.address, LEN_BYTES, 0, "")], "VRAM", backends=[backend])

    def fill(self, seed, len_bytes):
        self.gpu.write(self.address, random.Random(seed).randbytes(len_bytes))

    def digest(self, len_bytes):
        return hashlib.sha256(self.gpu.read(self.address, len_bytes)).hexdigest()


def far(backend):
    """The process whose memory is read: does what its standard input says, a line each."""
    # NIXL logs to the standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    memory = Memory("far", backend)

    def answer(what):
        print(json.dumps(what), file=out, flush=True)

    answer({"metadata": memory.agent.get_agent_metadata().hex(), "address": memory.address})
    for line in sys.stdin:
        asked = json.loads(line)
        if "metadata" in asked:
            memory.agent.add_remote_agent(bytes.fromhex(asked["metadata"]))
        else:
            memory.fill(asked["seed"], asked["len_bytes"])
        answer({})


def near(backend, rounds):
    """The process that reads. Prints the median seconds of each shape."""
    memory = Memory("near", backend)
    command = [sys.executable, __file__, "--far", backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:

        def ask(**what):
            other.stdin.write(json.dumps(what) + "\n")
            other.stdin.flush()
            return answer()

        def answer():
            line = other.stdout.readline()
            if not line:
                raise SystemExit("the other process has ended")
            return json.loads(line)

        there = answer()
        ask(metadata=memory.agent.get_agent_metadata().hex())
        memory.agent.add_remote_agent(bytes.fromhex(there["metadata"]))
        times = {label: [] for label in SHAPES}
        for turn in range(rounds + 1):
            for label, (pieces, piece_bytes) in SHAPES.items():
                len_bytes, seed = pieces * piece_bytes, f"{backend} {label} {turn}"
                ask(seed=seed, len_bytes=len_bytes)
                took_s = read(memory, there["address"], pieces, piece_bytes)
                if memory.digest(len_bytes) != hashlib.sha256(random.Random(seed).randbytes(len_bytes)).hexdigest():
                    raise SystemExit(f"{backend} moved a wrong byte: nothing that was timed counts")
                if turn:
                    times[label].append(took_s)
        other.stdin.close()
    print(json.dumps({label: statistics.median(found) for label, found in times.items()}))


def read(memory, source, pieces, piece_bytes):
    """The seconds of a READ of the other process's memory."""
    agent = memory.agent
    lists = [[(base + at * piece_bytes, piece_bytes, 0) for at in range(pieces)] for base in (memory.address, source)]
    handle = agent.initialize_xfer("READ", *(agent.get_xfer_descs(each, "VRAM") for each in lists), "far", b"", [memory.backend])
    start = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC" and time.perf_counter() - start < TIMEOUT_S:
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - start
    if state != "DONE":
        raise SystemExit(f"a READ ended with {state}")
    agent.release_xfer_handle(handle)
    return took_s


def measure(spec, rounds, say=print):
    """The ratios, as far as the backends can be used here. The pool is formatted."""
    if importlib.util.find_spec("nixl") is None:
        say("NIXL: left out, it is not installed")
        return {}
    medians = {}
    for backend in ("CXL", "UCX"):
        command = [sys.executable, __file__, "--near", backend, "--rounds", str(rounds)]
        environment = os.environ | {"CXL_POOL": spec}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            say(f"NIXL {backend} between GPU memory: left out, it did not end")
            continue
        if "wrong byte" in done.stderr:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no word"])[-1]
            say(f"NIXL {backend} between GPU memory: left out, it ended with {done.returncode}: {why[-300:]}")
            continue
        medians[backend] = json.loads(done.stdout.splitlines()[-1])
        say(f"NIXL {backend}, READ between GPU memory: " + ", ".join(f"{label} {1e6 * s:.0f} us" for label, s in medians[backend].items()))
    if len(medians) < 2:
        return {}
    return {f"nixl_vram_read_{label}_ucx_over_cxl": medians["UCX"][label] / medians["CXL"][label] for label in SHAPES}


def main():
    parser = argparse.ArgumentParser(description="NIXL between the memory of a GPU in two processes.")
    parser.add_argument("--pool", default="/dev/shm/kvbm-cxl-perf-nixl", help="a file that is made and removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--near", help=argparse.SUPPRESS)
    parser.add_argument("--far", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.far:
        return far(said.far)
    if said.near:
        return near(said.near, said.rounds)
    import kvbm_cxl

    spec = f"{said.pool},size=256M"
    try:
        kvbm_cxl.format_pool(spec, force=True)
        print("RATIOS " + json.dumps(measure(spec, said.rounds)))
    finally:
        Path(said.pool).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
