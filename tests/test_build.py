# SPDX-License-Identifier: Apache-2.0
"""What is compiled into what ships, and that the workspaces beside the main one follow it."""

import subprocess
import tomllib

import pytest
import tidy


def feature_tree(*packages):
    command = ["cargo", "tree", "--locked", "--offline", "--edges", "features,no-dev"]
    for package in packages:
        command += ["--package", package]
    return subprocess.run(command, cwd=tidy.ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(("packages", "faults"), [(("cxl-pool", "cxl-capi", "cxlctl", "kvbm-cxl-python"), False), (("cxl-sim",), True)])
def test_named_faults_are_compiled_into_the_simulator_alone(packages, faults):
    assert ('cxl-pool feature "faults"' in feature_tree(*packages)) is faults


@pytest.mark.parametrize("folder", ["kvbm_cxl/fuzz", "kvbm_cxl/tier"])
def test_locks_beside_the_main_one_have_what_the_pool_needs(folder):
    wanted = set(tomllib.loads(tidy.read("kvbm_cxl/pool/Cargo.toml"))["dependencies"])
    packages = tomllib.loads(tidy.read(f"{folder}/Cargo.lock"))["package"]
    locked = {name.split()[0] for package in packages if package["name"] == "cxl-pool" for name in package["dependencies"]}
    assert not wanted - locked, f"run `cargo update --package cxl-pool` in {folder}"
    assert folder in tomllib.loads(tidy.read("Cargo.toml"))["workspace"]["exclude"]


def test_every_fuzz_target_is_built():
    named = {binary["path"] for binary in tomllib.loads(tidy.read("kvbm_cxl/fuzz/Cargo.toml"))["bin"]}
    prefix = "kvbm_cxl/fuzz/"
    assert named == {name.removeprefix(prefix) for name in tidy.tracked() if name.startswith(prefix) and name.endswith(".rs")}
