# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch, whose numbers are never copied by us; in the environment that has torch."""

import os
import subprocess

import pytest
from pools import ROOT

PYTHON = ROOT / ".venv" / "serve" / "bin" / "python"
PROGRAM = """
import os, sys, torch, kvbm_cxl
from pools import chain, namespace, opened

torch.manual_seed(7)
NS, keys = namespace(), chain(20)
with opened(sys.argv[1]) as pool, pool.cache() as cache:
    # A tensor as one block, of any type.
    for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]):
        tensor = torch.randn(7, 11).to(dtype)
        assert cache.publish(NS, keys[number], tensor) == "stored"
        into = torch.zeros(7, 11, dtype=dtype)
        assert cache.pull(NS, keys[number], into).len_bytes == tensor.nbytes
        assert torch.equal(into.view(torch.uint8), tensor.view(torch.uint8))
    whole = torch.randn(6, 8)
    for wrong in (whole.t(), whole[:, ::2]):
        try:
            cache.publish(NS, keys[5], wrong)
            raise SystemExit("taken")
        except kvbm_cxl.InvalidError as error:
            assert "contiguous" in str(error)
    assert cache.publish(NS, keys[5], [whole[0], whole[3:]]) == "stored"

    # Layers of a paged KV cache, [blocks, heads, tokens, channels], each block of a layer in one piece, layers in one allocation.
    memory = torch.randn(3, 40, 2, 16, 8)
    layers = [memory[layer] for layer in range(3)]
    layout = kvbm_cxl.BlockLayout.of_tensors(layers)
    assert layout.block_bytes == 3 * 2 * 16 * 8 * 4 and len(layout) == 40
    ids = [39, 0, 7, 21]
    assert cache.publish_blocks(NS, keys[6:10], layout, ids) == ["stored"] * 4
    before = [layer[ids].clone() for layer in layers]
    memory.zero_()
    assert cache.pull_blocks(NS, keys[6:10], layout, ids) == [None] * 4
    assert all(torch.equal(layer[ids], kept) for layer, kept in zip(layers, before, strict=True))
    assert memory.count_nonzero() == sum(kept.count_nonzero() for kept in before)
    # Blocks with their layers side by side: [blocks, layers, ...], sliced.
    beside = torch.zeros(40, 3, 2, 16, 8)
    assert cache.pull_blocks(NS, keys[6:10], kvbm_cxl.BlockLayout.of_tensors([beside[:, layer] for layer in range(3)]), ids) == [None] * 4
    assert all(torch.equal(beside[ids, layer], before[layer]) for layer in range(3))
    try:
        kvbm_cxl.BlockLayout.of_tensors([beside.transpose(1, 2)])
        raise SystemExit("taken")
    except kvbm_cxl.InvalidError as error:
        assert "put blocks first" in str(error)

    # Memory of the pool under a tensor.
    pooled = pool.allocate(4096, name="tensor")
    tensor = torch.frombuffer(pooled, dtype=torch.float32)
    assert tensor.data_ptr() == pooled.address and tensor.numel() == 1024
    tensor.copy_(torch.arange(1024))
    pooled.flush()
    again = torch.frombuffer(pool.find("tensor"), dtype=torch.float32)
    assert again.data_ptr() == tensor.data_ptr() and again[1000] == 1000
    del tensor, again
    pooled.free()
print("all of it")
"""


HAS_TORCH = PYTHON.exists() and list(PYTHON.parents[1].glob("lib/python3*/site-packages/torch"))


@pytest.mark.skipif(not HAS_TORCH, reason="torch comes with `make setup-serve`")
def test_tensors(spec):
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "python" / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, "-c", PROGRAM, spec], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout == "all of it\n", done.stdout + done.stderr
