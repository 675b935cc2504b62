# SPDX-License-Identifier: Apache-2.0
"""NIXL between the memory of a GPU in two processes: backend CXL, staged through the pool, next to UCX. Used by gpu.py.

Each backend has two processes of its own, so that one that cannot use the memory ends alone: it is left out.
`nixl_vram_read_1m_ucx_over_cxl` is the time of a READ of 16 pieces of 1 MiB by UCX divided by that by CXL; above 1 CXL is faster.
`..._of_link` is the rate of CXL divided by that of the link. The bytes of every transfer are compared outside of its time.
"""

import hashlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time

from gpu_bench import HERE, KIB, MIB, LeftOut, ratio, row, say, wrong

# That of the kit, where none is installed.
sys.path.append(str(HERE / "nixl_wheel"))

import gpu_driver  # noqa: E402
import kvbm_cxl  # noqa: E402

# Label -> pieces, bytes of each.
SHAPES = {"20k": (128, 20 * KIB), "1m": (16, MIB), "256m": (256, MIB)}
TIMEOUT_S = 25


class Memory:
    """Memory of the GPU, registered with an agent of one backend."""

    def __init__(self, name, backend, len_bytes):
        if backend == "CXL":
            import kvbm_cxl.nixl

            kvbm_cxl.nixl.enable()
        from nixl._api import nixl_agent, nixl_agent_config

        self.gpu = gpu_driver.Gpu()
        self.address = self.gpu.allocate(len_bytes)
        self.agent, self.backend = nixl_agent(name, nixl_agent_config(backends=[])), backend
        self.agent.create_backend(backend, {})
        self.agent.register_memory([(self.address, len_bytes, 0, "")], "VRAM", backends=[backend])

    def fill(self, seed, len_bytes):
        self.gpu.write(self.address, random.Random(seed).randbytes(len_bytes))

    def digest(self, len_bytes):
        return hashlib.sha256(self.gpu.read(self.address, len_bytes)).hexdigest()


def _shapes(bench):
    """The second one does not fit a dry run's pool."""
    return {label: shape for label, shape in SHAPES.items() if label != "256m" or not bench.is_dry}


def _spec(bench):
    return bench.spec_of(bench.sized(1536, 256))


def _len_bytes(bench):
    return max(pieces * piece_bytes for pieces, piece_bytes in _shapes(bench).values())


def far(bench, backend):
    """The process whose memory is read: obeys the lines of its standard input."""
    # NIXL logs to the standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    memory = Memory("far", backend, _len_bytes(bench))

    def answer(what):
        print(json.dumps(what), file=out, flush=True)

    answer({"metadata": memory.agent.get_agent_metadata().hex(), "address": memory.address})
    for line in sys.stdin:
        request = json.loads(line)
        if "metadata" in request:
            memory.agent.add_remote_agent(bytes.fromhex(request["metadata"]))
        else:
            memory.fill(request["seed"], request["len_bytes"])
        answer({})


def near(bench, backend):
    """The process that reads. Prints `SECONDS {median of each shape}`; NIXL prints other lines."""
    memory = Memory("near", backend, _len_bytes(bench))
    command = [sys.executable, sys.argv[0], *bench.again, "far", backend]
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

        try:
            there = answer()
            ask(metadata=memory.agent.get_agent_metadata().hex())
            memory.agent.add_remote_agent(bytes.fromhex(there["metadata"]))
            times = {label: [] for label in _shapes(bench)}
            for turn in range(bench.sized(3, 1) + 1):
                for label, (pieces, piece_bytes) in _shapes(bench).items():
                    len_bytes, seed = pieces * piece_bytes, f"{backend} {label} {turn}"
                    ask(seed=seed, len_bytes=len_bytes)
                    took_s = read(memory, there["address"], pieces, piece_bytes)
                    if memory.digest(len_bytes) != hashlib.sha256(random.Random(seed).randbytes(len_bytes)).hexdigest():
                        wrong(f"moved by {backend}")
                    if turn:
                        times[label].append(took_s)
        finally:
            other.kill()
            other.stdin = None
    print("SECONDS " + json.dumps({label: statistics.median(found) for label, found in times.items()}), flush=True)


def read(memory, source, pieces, piece_bytes):
    """The seconds of a READ of the other process's memory."""
    agent = memory.agent
    lists = [[(base + at * piece_bytes, piece_bytes, 0) for at in range(pieces)] for base in (memory.address, source)]
    handle = agent.initialize_xfer("READ", *(agent.get_xfer_descs(each, "VRAM") for each in lists), "far", b"", [memory.backend])
    start = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - start
    if state != "DONE":
        raise SystemExit(f"a READ ended with {state}")
    agent.release_xfer_handle(handle)
    return took_s


def _medians(bench, backend):
    """Seconds of each shape. Raises LeftOut if the backend cannot be used."""
    command = [sys.executable, sys.argv[0], *bench.again, "near", backend]
    environment = os.environ | {"CXL_POOL": _spec(bench)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, errors = process.communicate(timeout=bench.sized(TIMEOUT_S, 600))
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
    if "WRONG" in errors:
        wrong(f"moved by {backend}")
    for line in out.splitlines():
        if line.startswith("SECONDS "):
            return json.loads(line.removeprefix("SECONDS "))
    raise LeftOut(f"{backend} ended with {process.returncode}: {(errors.strip().splitlines() or ['no word'])[-1][-300:]}")


def measure(bench):
    """The rates of each backend that can be used here."""
    for name in ("nixl", "numpy"):
        if importlib.util.find_spec(name) is None:
            raise LeftOut(f"{name} is not installed")
    if bench.others:
        role, backend = bench.others
        return {"near": near, "far": far}[role](bench, backend)
    kvbm_cxl.format_pool(_spec(bench), force=True)
    link_bytes = bench.sized(256 * MIB, MIB)
    link_rate, cxl = link_bytes / max(bench.link_s(link_bytes)), _medians(bench, "CXL")
    for label, took_s in cxl.items():
        share = SHAPES[label][0] * SHAPES[label][1] / took_s / link_rate
        ratio(f"nixl_vram_read_{label}_of_link", share)
        aim = {"1m": "0.4", "256m": "0.8"}.get(label, "")
        row(f"NIXL READ between GPU memory, {label}, ms; of the link", f"{1e3 * took_s:.2f}; {share:.3f}", aim)
    try:
        ucx = _medians(bench, "UCX")
    except LeftOut as reason:
        return say(f"left out: {reason}")
    for label, took_s in ucx.items():
        ratio(f"nixl_vram_read_{label}_ucx_over_cxl", took_s / cxl[label])
