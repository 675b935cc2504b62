# SPDX-License-Identifier: Apache-2.0
"""The wheel as it ships: which systems it runs on."""

import re
import subprocess
import sys

import charts
import pytest

# Dynamo's and vLLM's images have a later C library than this one.
GLIBC = (2, 34)


def test_the_wheel_needs_no_later_c_library_than_documented():
    wheels = sorted((charts.ROOT / "target/wheels").glob("kvbm_cxl-*.whl"))
    if not wheels:
        pytest.skip("no wheel in target/wheels: run make python-package")
    command = [sys.executable, "-m", "auditwheel", "show", wheels[-1]]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_x86_64"', told)
    assert found and (int(found[1]), int(found[2])) <= GLIBC, told
    # It brings no library that the system or the plugin's NIXL has.
    assert "external shared libraries" not in told, told
    assert f"glibc {GLIBC[0]}.{GLIBC[1]}" in (charts.ROOT / "python/README.md").read_text()
