# SPDX-License-Identifier: Apache-2.0
"""The parts of `make perf-gpu` that need PyTorch, over tensors of a CPU: the connector's worker, with vLLM and without it, and the first
tokens of a model."""

import os
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "perf"
WRONG = """
import sys
sys.path.insert(0, {folder!r})
import gpu, gpu_{module}
{code}
sys.exit(gpu.main())
"""
DAMAGED_LOAD = """
load = gpu_worker.Side.load
def damaging(side, keys, block_ids):
    failed = load(side, keys, block_ids)
    side.memory[3, block_ids[5], 2, 1, 7] += 1
    return failed
gpu_worker.Side.load = damaging
"""
DAMAGED_DIGEST = """
digest = gpu_serving.Model.digest
def damaging(model, blocks):
    if gpu_serving.time.damage:
        model.kv[1][1, blocks[-1], 3, 1, 9] += 1
    return digest(model, blocks)
gpu_serving.Model.digest = damaging
gpu_serving.time.damage = "decode" in sys.argv
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return fake_gpu.compiled(tmp_path_factory.mktemp("driver"))


def run(driver, folder, part, program=FOLDER / "gpu.py", **environment):
    command = [sys.executable, program, "--dry", f"--part={part}", f"--pool={folder / 'pool'}"]
    environment = os.environ | {"CXL_CUDA_LIBRARY": str(driver), "CXL_STATE_DIR": str(folder)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("without", ("", "1"), ids=("with vLLM", "without"))
def test_the_connector_loads_every_byte(driver, tmp_path, without):
    done = run(driver, tmp_path, "connector", KVBM_CXL_WITHOUT_VLLM=without)
    assert done.returncode == 0 and "worker_step_summed_over_whole" in done.stdout, done.stdout + done.stderr


def test_a_prompt_from_the_pool_has_every_byte_and_the_same_token(driver, tmp_path):
    done = run(driver, tmp_path, "serving")
    assert done.returncode == 0, done.stdout + done.stderr
    for tokens in (64, 256):
        assert f'"first_token_{tokens}_pool_over_computed"' in done.stdout and f'"first_token_{tokens}_plain_pool' in done.stdout
        assert done.stdout.count(f"{tokens} tokens: the first token is that of the computed prompt") == 2, done.stdout


@pytest.mark.parametrize(("part", "module", "code"), [("connector", "worker", DAMAGED_LOAD), ("serving", "serving", DAMAGED_DIGEST)])
def test_a_wrong_byte_ends_a_part(driver, tmp_path, part, module, code):
    program = tmp_path / "damaged.py"
    program.write_text(WRONG.format(folder=str(FOLDER), module=module, code=code))
    done = run(driver, tmp_path, part, program, KVBM_CXL_WITHOUT_VLLM="1")
    assert done.returncode != 0 and "WRONG bytes: of" in done.stderr, done.stdout + done.stderr
