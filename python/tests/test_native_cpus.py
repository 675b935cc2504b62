# SPDX-License-Identifier: Apache-2.0
"""CXL_CPUS: the threads of the pool run where it says, as the kernel tells, and what cannot be is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kvbm_cxl
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPUS = sorted(os.sched_getaffinity(0))
LEN = 4 << 20
# Opens everything that has threads, copies blocks that are shared among them, and tells which thread may run where.
TOLD = f"""
import json, os, sys, threading
from pathlib import Path
import kvbm_cxl

with kvbm_cxl.Pool(sys.argv[1]) as pool, pool.cache() as cache:
    space = kvbm_cxl.Namespace(model="tiny", dtype="float32", layer_count=4, kv_head_count=2, head_size=64, block_tokens=16, layout="LBHNC")
    block = os.urandom({LEN})
    for number in range(4):
        assert cache.publish(space, kvbm_cxl.chain_key(None, [os.getpid(), number]), block) == "stored"
    kept = pool.allocate(4096, kept=False)
    worker = threading.Thread(target=lambda: (pool.bind_worker(), told.append(("worker", os.sched_getaffinity(0)))))
    told = [("main", os.sched_getaffinity(0))]
    worker.start()
    worker.join()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:
            continue  # it has ended
        if name.startswith("cxl-"):
            told.append((name, status["Cpus_allowed_list"].strip()))
    print(json.dumps([[name, sorted(cpus) if isinstance(cpus, set) else cpus] for name, cpus in told]))
"""


@pytest.fixture
def big_cells(tmp_path, monkeypatch):
    monkeypatch.delenv("CXL_POOL", raising=False)
    spec = f"{tmp_path / 'pool'},size=96M"
    kvbm_cxl.format_pool(spec, cells=f"{LEN}:50%")
    return spec


def _run(spec, folder, cpus):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CXL_")}
    environment |= {"CXL_STATE_DIR": str(folder / "state"), "CXL_MACHINE_ID": "test", "CXL_COPY": "engine=cpu,workers=2"}
    environment |= {"PYTHONPATH": str(ROOT / "python"), **({"CXL_CPUS": cpus} if cpus else {})}
    return subprocess.run([sys.executable, "-c", TOLD, spec], env=environment, capture_output=True, text=True, timeout=240)


def _listed(cpus):
    """The kernel's form of a list, of CPUs that follow one another or are one."""
    return str(cpus[0]) if len(cpus) == 1 else f"{cpus[0]}-{cpus[-1]}"


@pytest.mark.skipif(len(CPUS) < 2, reason="a machine with one CPU has no choice")
def test_each_kind_of_threads_runs_where_it_is_told(big_cells, tmp_path):
    first, last = CPUS[0], CPUS[-1]
    ran = _run(big_cells, tmp_path, f"copy={first};upkeep={last};workers={first}")
    assert ran.returncode == 0, ran.stderr
    told = dict(map(tuple, json.loads(ran.stdout)))
    assert told.pop("main") == CPUS, "the program's own threads are its own affair"
    assert told.pop("worker") == [first]
    expected = {"cxl-copy-1": str(first), "cxl-copy-2": str(first)}
    upkeep = {name: str(last) for name in ("cxl-service", "cxl-witness", "cxl-cache", "cxl-alloc")}
    assert {name: cpus for name, cpus in told.items() if name in expected | upkeep} == expected | upkeep, told


def test_threads_run_where_the_process_does_unless_told(big_cells, tmp_path):
    for cpus in (None, "any", "device"):
        ran = _run(big_cells, tmp_path, cpus)
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert len(told) >= 6
        if cpus != "device":
            assert all(where in (CPUS, _listed(CPUS)) for _, where in told), told


@pytest.mark.parametrize("cpus", ["65000", "node:77", "3-1", "cores=1", "copy=0;copy=0", ""])
def test_what_cannot_be_is_refused_by_kind(big_cells, tmp_path, monkeypatch, cpus):
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CXL_MACHINE_ID", "test")
    monkeypatch.setenv("CXL_CPUS", cpus)
    expected = kvbm_cxl.NotFoundError if cpus == "node:77" else kvbm_cxl.InvalidError
    with pytest.raises(expected) as refused:
        kvbm_cxl.Pool(big_cells)
    assert cpus in str(refused.value) or "NUMA node 77" in str(refused.value)
    monkeypatch.delenv("CXL_CPUS")
    with kvbm_cxl.Pool(big_cells):
        assert sorted(os.sched_getaffinity(0)) == CPUS
