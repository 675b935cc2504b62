# SPDX-License-Identifier: Apache-2.0
"""The scripts for nodes start what the launcher starts: with a stand-in for Python that tells what it was called with."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from graph import workers
from graph.model import BLOCK_TOKENS
from graph.options import ROOT, Options
from graph.pool import DESCRIPTION_CELLS

NODES = ROOT / "deploy" / "dynamo" / "nodes"
SAYS = '#!/bin/sh\necho "$NIXL_PLUGIN_DIR"; echo "$CXL_POOL"; for argument; do echo "$argument" | tr -d "\\n"; echo; done\n'


def called(tmp_path, script, *arguments, **told):
    """NIXL_PLUGIN_DIR, CXL_POOL and the arguments that the script's program got."""
    for name, text in {"python3": SAYS, "cxlctl": SAYS, "kvbm-cxl": "#!/bin/sh\necho /overlay\n"}.items():
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **told}
    done = subprocess.run([NODES / script, *arguments], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def after(said, flag):
    return said[said.index(flag) + 1]


@pytest.mark.parametrize("connector", ["cxl", "nixl-cxl"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_get_the_launchers_configuration(tmp_path, monkeypatch, connector, role):
    monkeypatch.setattr(workers, "has_gpu", lambda: True)
    overlay, pool, *said = called(tmp_path, "worker.sh", role, "--max-num-seqs", "8", CONNECTOR=connector)
    assert (overlay, pool) == ("/overlay" if connector == "nixl-cxl" else "", "/dev/dax0.0")
    assert said[:2] == ["-m", "dynamo.vllm"] and said[-2:] == ["--max-num-seqs", "8"]
    assert after(said, "--disaggregation-mode") == role
    assert after(said, "--block-size") == str(BLOCK_TOKENS)
    wanted = workers.kv_transfer_config(Options(connector=connector), role)
    if connector == "cxl":
        del wanted["kv_connector_extra_config"]  # The launcher counts every token that is found.
    assert json.loads(after(said, "--kv-transfer-config")) == wanted


def test_the_frontend_gets_the_launchers_options(tmp_path):
    said = called(tmp_path, "frontend.sh", ROUTER="kv")[2:]
    wanted = workers.frontend_command(Options(router="kv"), 8000)
    flags = ("-m", "--router-mode", "--migration-limit", "--router-disk-cache-hit-weight")
    assert [after(said, flag) for flag in flags] == [after(wanted, flag) for flag in flags]


def test_workers_publish_their_events_for_the_kv_router(tmp_path):
    wanted = workers.kv_events_config(Path("/tmp"), workers.Worker("decode", 0, 9090, 1, 2))
    events = json.loads(after(called(tmp_path, "worker.sh", "decode", ROUTER="kv"), "--kv-events-config"))
    assert events | {"endpoint": ""} == wanted | {"endpoint": ""} and events["endpoint"].startswith("ipc:///tmp/kv-events-9090")
    assert "--kv-events-config" not in called(tmp_path, "worker.sh", "decode")


def test_the_pool_gets_cells_of_a_block(tmp_path):
    said = called(tmp_path, "format-pool.sh", CELL_BYTES="4M")
    assert [said[at + 1] for at, argument in enumerate(said) if argument == "--cells"] == ["4M:75%", DESCRIPTION_CELLS]


def test_only_known_connectors(tmp_path):
    environment = {"PATH": os.environ["PATH"], "CONNECTOR": "x"}
    done = subprocess.run([NODES / "worker.sh", "decode"], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "CONNECTOR is x" in done.stderr


def test_the_folder_has_no_other_scripts():
    assert {path.name for path in Path(NODES).iterdir()} == {"rack.env", "format-pool.sh", "frontend.sh", "worker.sh"}
