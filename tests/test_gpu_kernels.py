# SPDX-License-Identifier: Apache-2.0
"""The PTX in the sources is what the kernels' source gives, and has what it must have."""

import importlib.machinery
import importlib.util
import re

import pytest
import tidy

SCRIPT = tidy.ROOT / "scripts/gpu-kernels"


@pytest.fixture(scope="module")
def kernels():
    loader = importlib.machinery.SourceFileLoader("gpu_kernels", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_kernels", loader))
    loader.exec_module(module)
    return module


def bodies(ptx):
    """Kernel -> its instructions."""
    return {match[1]: match[2] for match in re.finditer(r"\.visible \.entry (\w+)\((.*?)^}", ptx, re.MULTILINE | re.DOTALL)}


def test_the_ptx_is_of_the_source_that_is_there(kernels):
    named = re.search(r"SHA-256 (\w+)$", kernels.PTX.read_text(), re.MULTILINE)[1]
    assert named == kernels.digest(kernels.SOURCE.read_bytes()), "move.cu was changed: scripts/gpu-kernels write"


def test_old_drivers_and_all_supported_gpus_take_it(kernels):
    ptx = kernels.PTX.read_text()
    version = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    assert (int(version[1]), int(version[2])) <= (7, 8), "drivers of CUDA 11.8 do not take it"
    assert re.search(r"^\.target sm_80$", ptx, re.MULTILINE) and ptx.isascii()


def test_kernels_load_past_caches_store_through_and_release(kernels):
    found = bodies(kernels.PTX.read_text())
    assert set(found) == {"cxl_move", "cxl_move_sum"}
    for name, body in found.items():
        assert re.search(r"\bld(\.global)?\.cv\.v2\.u64\b", body) and re.search(r"\bst(\.global)?\.wt\.v2\.u64\b", body), name
        # The last instruction before the end.
        assert re.search(r"membar\.sys;\s*(//[^\n]*\n\s*)*ret;\s*\Z", body), name
        assert body.count("membar.gl;") == (2 if name == "cxl_move_sum" else 0), name


def test_it_is_what_the_compiler_gives(kernels):
    if not kernels.TOOLS.exists():
        pytest.skip("NVRTC is not set up: make setup-gpu")
    source = kernels.SOURCE.read_bytes()
    assert kernels.PTX.read_text() == kernels.ptx_of(source), "scripts/gpu-kernels write"
    altered = source.replace(b"    __threadfence_system();\n", b"")
    assert altered != source and kernels.ptx_of(altered).splitlines()[2:] != kernels.PTX.read_text().splitlines()[2:]
    with pytest.raises(kernels.Failed, match="error"):
        kernels.compiled(source + b"}")
