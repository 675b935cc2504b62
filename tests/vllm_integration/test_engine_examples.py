# SPDX-License-Identifier: Apache-2.0
"""The examples of vLLM: two engines that reuse each other's blocks, and the line with which a user starts a server."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Two engines import vLLM one after the other, on a machine that may do other things.
TIMEOUT_S = 900
SMALL = ["dtype=float32", "max_model_len=2048", "enforce_eager=True", f"kv_cache_memory_bytes={32 << 20}", "seed=0"]


def test_two_engines(model):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("CXL_")}
    command = [sys.executable, str(ROOT / "examples/vllm/two_engines.py"), model, *SMALL]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # 5 blocks of 128 tokens; 60 are computed.
    assert "engine 1: 0 tokens from the pool; engine 2: 640 tokens from the pool, of 700" in done.stdout


def test_serve(tmp_path):
    """`serve.sh` starts `vllm serve` with what a connector of ours takes."""
    said = tmp_path / "said"
    vllm = tmp_path / "vllm"
    vllm.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\n')
    vllm.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CXL_POOL": "/dev/dax0.0"}
    subprocess.run([str(ROOT / "examples/vllm/serve.sh"), "MODEL", "--port", "0"], env=environment, check=True, timeout=60)
    *arguments, option, transfer = said.read_text().splitlines()
    assert arguments == ["serve", "MODEL", "--port", "0"]
    assert option == "--kv-transfer-config"
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**json.loads(transfer))
    assert (config.kv_connector, config.kv_role, config.kv_load_failure_policy) == ("CxlConnector", "kv_both", "recompute")


def test_serve_wants_a_pool():
    environment = {name: text for name, text in os.environ.items() if name != "CXL_POOL"}
    done = subprocess.run([str(ROOT / "examples/vllm/serve.sh"), "MODEL"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "name the devices of the pool" in done.stderr
