# SPDX-License-Identifier: Apache-2.0
"""The program of `make perf-gpu`, over a driver that is faked and launches our kernels, compiled for the CPU: it runs to its end, and a
byte that is wrong ends it. Its times mean nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pools
import pytest

PROGRAM = pools.ROOT / "perf" / "gpu.py"
FAKE = pools.ROOT / "kvbm_cxl" / "pool" / "tests" / "cuda"
KERNELS = pools.ROOT / "kvbm_cxl" / "pool" / "src" / "copy" / "cuda" / "kernels" / "move.cu"


def compiled(folder, kernels=KERNELS):
    """The fake driver, with these kernels."""
    driver, middle = folder / "libcuda.so.1", folder / "fake.o"
    c, cpp = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    driver_only = ["-std=gnu11", "-fPIC", "-O1", "-pthread", "-DFAKE_KERNELS", "-c", "-o", middle, FAKE / "fake.c"]
    subprocess.run([c, *driver_only], check=True, timeout=60)
    host = [f'-DKERNELS="{kernels}"', "-shared", FAKE / "kernel" / "host.cpp", middle]
    subprocess.run([cpp, "-std=c++17", "-fPIC", "-O2", "-w", "-pthread", "-o", driver, *host], check=True, timeout=120)
    return driver


def run(driver, folder, *arguments):
    environment = os.environ | {"CXL_CUDA_LIBRARY": str(driver)}
    command = [sys.executable, PROGRAM, f"--pool={folder / 'pool'}", "--pool-mib=32", "--rounds=1", "--divide=64", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("driver"))


def test_it_runs_to_its_end(driver, tmp_path):
    done = run(driver, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every byte is right, plain, summed" in done.stdout and "another process has every byte" in done.stdout
    ratios = json.loads(done.stdout.splitlines()[-1].removeprefix("RATIOS "))
    assert len(ratios) > 15 and all(value > 0 for value in ratios.values())
    assert {"step_publish_waited_over_queued", "step_pull_waited_over_queued", "queue_call_share"} <= set(ratios)
    assert {"pull_128x20k_summed_over_plain", "pool_over_pinned_to_gpu"} <= set(ratios)
    assert not (tmp_path / "pool").exists()


def test_a_wrong_byte_ends_it(tmp_path):
    altered = tmp_path / "move.cu"
    # Right for the sizes of the engine's own trial, wrong for others.
    text = KERNELS.read_text()
    line = "    Unit near = unit_at(tables, first, last, at), far"
    assert line in text
    altered.write_text(text.replace(line, line.replace("last, at)", "last, at + (tables.chunk_count > 40 && index == 33 ? 16 : 0))")))
    done = run(compiled(tmp_path, altered), tmp_path)
    # The engine's own program, where there is one, looks first.
    said = done.stdout + done.stderr
    assert done.returncode != 0 and ("is wrong: nothing" in said or "test program failed" in said), said[-4000:]
    assert "RATIOS" not in done.stdout


STEPS = """
import sys, types
sys.path.insert(0, sys.argv[1])
import gpu, gpu_queued
whole, what = gpu_queued.Step.block, sys.argv[3]
if what == "published":
    gpu_queued.Step.block = lambda step, block: whole(step, block)[:-1] + b"?"
if what == "pulled":
    read = gpu.gpu_driver.Gpu.read
    gpu.gpu_driver.Gpu.read = lambda gpu, address, len_bytes: read(gpu, address, len_bytes)[:-1] + b"?"
bench = gpu.Bench(types.SimpleNamespace(minutes=9, pool=sys.argv[2], pool_mib=32, rounds=1, divide=16))
gpu.streams(bench)
print(sorted(gpu.RATIOS))
"""


@pytest.mark.parametrize("wrong", ["nothing", "published", "pulled"])
def test_a_wrong_byte_ends_the_steps(driver, tmp_path, wrong):
    command = [sys.executable, "-c", STEPS, str(PROGRAM.parent), str(tmp_path / "pool"), wrong]
    environment = os.environ | {"CXL_CUDA_LIBRARY": str(driver)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if wrong == "nothing":
        assert done.returncode == 0 and "queue_call_share" in done.stdout, done.stdout + done.stderr
    else:
        assert done.returncode != 0 and f"a block that was {wrong}" in done.stderr and "nothing that was timed" in done.stderr, done.stderr


@pytest.mark.parametrize("library", ["none", "libno-such-driver.so.1"])
def test_without_a_gpu_it_says_so(library, tmp_path):
    done = run(Path(library), tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("skipped: no GPU to try: no CUDA driver"), done.stdout + done.stderr
    assert run(Path(library), tmp_path, "--look").returncode == 1
