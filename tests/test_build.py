# SPDX-License-Identifier: Apache-2.0
"""What is compiled into what ships."""

import subprocess

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
