# SPDX-License-Identifier: Apache-2.0
"""perf/gpu.py over a driver that is faked and launches our kernels, compiled for the CPU: it always ends with figures or a reason for each
part, whatever becomes of a part. Its times mean nothing here."""

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


def run(driver, folder, *arguments, program=PROGRAM):
    environment = os.environ | {"CXL_CUDA_LIBRARY": str(driver), "OUT": str(folder)}
    command = [sys.executable, program, f"--pool={folder / 'pool'}", "--dry", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)


def ratios_and_record(done, folder):
    """What a run ends with."""
    ratios = json.loads(done.stdout.splitlines()[-1].removeprefix("RATIOS "))
    (path,) = folder.glob("*-perf-gpu.json")
    record = json.loads(path.read_text())
    assert record["ratios"] == ratios and record["machine"]["gpu"] == "Fake GPU 0, CUDA 13.0" and record["commit"]
    return ratios, {line.split("|")[1].strip(): line.split("|")[2].strip() for line in record["printed"] if line.startswith("| ")}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("driver"))


def parts():
    """The program's table of parts."""
    text = PROGRAM.read_text()
    table = text[text.index("PARTS = {") :]
    return eval(table[len("PARTS = ") : table.index("}\n") + 1])


def test_each_part_ends_with_figures_or_a_reason(driver, tmp_path):
    done = run(driver, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    ratios, table = ratios_and_record(done, tmp_path)
    assert all(value > 0 for value in ratios.values())
    of_parts = {"step_pull_waited_over_queued", "pull_128x20k_summed_over_plain", "pool_over_pinned_to_gpu", "pull_1g_summed_of_link"}
    assert of_parts <= set(ratios)
    for name in parts():
        assert table[f"part {name}"].startswith(("done", "left out: ")), table
    for name in ("truth", "processes", "blocks", "shapes", "memory", "steps"):
        assert table[f"part {name}"].startswith("done"), table
    assert table["part racecheck"] == "left out: compute-sanitizer is not installed"
    assert float(table["queue_pull of 1 GiB, the caller's time, ms"]) > 0
    assert not (tmp_path / "pool").exists()


UNWELL = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {folder!r})
import gpu
sys.modules["unwell"] = sys.modules["__main__"]
def hang(bench):
    gpu_bench.row("before it hangs", "1")
    gpu_bench.ratio("before_it_hangs", 1)
    print("child", subprocess.Popen(["sleep", "3600"]).pid, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
def die(bench):
    os.kill(os.getpid(), signal.SIGKILL)
def raises(bench):
    raise ValueError("no such thing")
def wrong(bench):
    gpu_bench.ratio("of_wrong_bytes", 1)
    gpu_bench.wrong("in a test")
gpu.PARTS = {{"hang": (0.5, "unwell", "hang"), "die": (60, "unwell", "die"), "raises": (60, "unwell", "raises"),
    "wrong": (60, "unwell", "wrong"), "memory": (60, "gpu_blocks", "plain_memory")}}
import gpu_bench
sys.exit(gpu.main())
"""


def test_a_part_that_hangs_or_dies_is_reported_and_the_next_one_runs(driver, tmp_path):
    program = tmp_path / "unwell.py"
    program.write_text(UNWELL.format(folder=str(PROGRAM.parent)))
    done = run(driver, tmp_path, program=program)
    assert done.returncode == 1, done.stdout + done.stderr
    ratios, table = ratios_and_record(done, tmp_path)
    assert table["part hang"].startswith("FAILED: did not end in 10 s") and table["before it hangs"] == "1"
    assert ratios["before_it_hangs"] == 1
    assert table["part die"].startswith("FAILED: SIGKILL") and "no such thing" in table["part raises"]
    assert "WRONG bytes: in a test" in table["part wrong"] and "of_wrong_bytes" not in ratios
    assert table["part memory"].startswith("done") and "pool_over_pinned_to_gpu" in ratios
    child = int(next(line for line in done.stdout.splitlines() if line.strip().startswith("child ")).split()[1])
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_wrong_byte_ends_a_part(tmp_path):
    altered = tmp_path / "move.cu"
    # Right for the sizes of the engine's own trial, wrong for others.
    text = KERNELS.read_text()
    line = "    Unit near = unit_at(tables, first, last, at), far"
    assert line in text
    altered.write_text(text.replace(line, line.replace("last, at)", "last, at + (tables.chunk_count > 40 && index == 33 ? 16 : 0))")))
    done = run(compiled(tmp_path, altered), tmp_path, "--part=blocks")
    assert done.returncode != 0 and "WRONG bytes: on the GPU after a pull" in done.stderr, done.stdout + done.stderr


STEPS = """
import sys
sys.path.insert(0, {folder!r})
import gpu, gpu_bench, gpu_queued
whole, read = gpu_queued.Step.block, gpu_bench.gpu_driver.Gpu.read
if {wrong!r} == "published":
    gpu_queued.Step.block = lambda step, block: whole(step, block)[:-1] + b"?"
else:
    gpu_bench.gpu_driver.Gpu.read = lambda gpu, address, len_bytes: read(gpu, address, len_bytes)[:-1] + b"?"
sys.exit(gpu.main())
"""


@pytest.mark.parametrize("wrong", ["published", "pulled"])
def test_a_wrong_byte_ends_the_steps(driver, tmp_path, wrong):
    program = tmp_path / "steps.py"
    program.write_text(STEPS.format(folder=str(PROGRAM.parent), wrong=wrong))
    done = run(driver, tmp_path, "--part=steps", program=program)
    assert done.returncode != 0 and f"WRONG bytes: of a block that was {wrong}" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("library", ["none", "libno-such-driver.so.1"])
def test_without_a_gpu_it_says_so(library, tmp_path):
    done = run(Path(library), tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("skipped: no GPU to use: no CUDA driver"), done.stdout + done.stderr
    assert run(Path(library), tmp_path, "--look").returncode == 1
