# SPDX-License-Identifier: Apache-2.0
"""KVCR with the NIXL plugin: blocks to its memory and back, from one host to another, and hosts that are killed in between.

The tests are in kvcr_hosts.py. They run in a network of their own: NIXL's listener, which KVCR turns on, listens on all addresses.
"""

import os
import re
import shlex
import subprocess

import pytest
from peers import HERE, ROOT

KVCR, PLUGIN = ROOT / ".venv" / "kvcr", ROOT / "target" / "nixl_plugin"
if not (KVCR / "kvcr").exists():
    pytest.skip("KVCR is not installed: `make setup-kvcr`", allow_module_level=True)
if not (PLUGIN / "libplugin_CXL.so").exists():
    pytest.skip("the NIXL plugin is not built: `make build-plugin`", allow_module_level=True)
NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]


def test_hosts_exchange_blocks():
    if subprocess.run([*NETWORK, "ip link set lo up"], capture_output=True).returncode:
        pytest.skip("this machine allows no networks of their own (unshare, ip), and KVCR would listen to all")
    # Not vLLM's environment, in which there is another NIXL.
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "kvcr_hosts.py")]
    environment = {**os.environ, "PYTHONPATH": str(KVCR), "NIXL_PLUGIN_DIR": str(PLUGIN)}
    inside = f"ip link set lo up && exec {shlex.join(command)}"
    done = subprocess.run([*NETWORK, inside], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and re.search(r"\b6 passed", done.stdout), done.stdout[-6000:] + done.stderr[-2000:]
