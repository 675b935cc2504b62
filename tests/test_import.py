# SPDX-License-Identifier: Apache-2.0
"""`import kvbm_cxl` at the root of the checkout, where a folder of that name holds Rust crates, never yields an empty module."""

import os
import subprocess
import sys

import pytest
import tidy


def imported(program, *path):
    """Runs a program at the root of the checkout, with nothing but `path` besides it on sys.path; its output and its errors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | ({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {})
    # -S: no site-packages, which may hold an installed wheel; -B: nothing is written into the folder of crates.
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", program], cwd=tidy.ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("path", [[], [tidy.ROOT], [tidy.ROOT / "tests"]])
def test_the_folder_of_crates_is_no_package(path):
    output, errors = imported("import kvbm_cxl; print(kvbm_cxl)", *path)
    assert not output and "ImportError" in errors and "make python-extension" in errors and f"PYTHONPATH={tidy.ROOT}/python" in errors


def test_the_package_is_found_behind_the_folder_of_crates(tmp_path):
    (tmp_path / "kvbm_cxl" / "nixl").mkdir(parents=True)
    (tmp_path / "kvbm_cxl" / "__init__.py").write_text("from . import nixl\nVALUE = 7\n")
    (tmp_path / "kvbm_cxl" / "nixl" / "__init__.py").write_text("import kvbm_cxl\n")
    for program in ("import kvbm_cxl.nixl", "from kvbm_cxl import VALUE; import kvbm_cxl; assert VALUE == 7"):
        output, errors = imported(f"{program}; print(kvbm_cxl.VALUE, kvbm_cxl.nixl.kvbm_cxl is kvbm_cxl, kvbm_cxl.__file__)", tmp_path)
        assert output == f"7 True {tmp_path / 'kvbm_cxl' / '__init__.py'}", errors


def test_a_package_that_fails_fails_with_its_own_error(tmp_path):
    (tmp_path / "kvbm_cxl").mkdir()
    (tmp_path / "kvbm_cxl" / "__init__.py").write_text("raise ImportError('its own reason')\n")
    output, errors = imported("import kvbm_cxl", tmp_path)
    assert not output and errors.strip().endswith("ImportError: its own reason")
