# SPDX-License-Identifier: Apache-2.0
"""Pools, hosts, and pairs of agents that know each other."""

import shutil
import tempfile
from pathlib import Path

import pytest
import wheels
from cluster import Cluster

# The plugin's file, as `make build-plugin` leaves it.
PLUGIN = wheels.ROOT / "target" / "nixl_plugin" / "libplugin_CXL.so"


def pytest_collection_modifyitems(items):
    """None of these tests may take longer than this."""
    for item in items:
        if "nixl" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.timeout(300))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Lets fixtures know that their test failed."""
    report = yield
    if report.when == "call" and report.failed:
        item.broke = True
    return report


@pytest.fixture(scope="session")
def plugin():
    """The plugin is built."""
    if not PLUGIN.is_file():
        pytest.fail(f"{PLUGIN} is not there: run `make build-plugin`")
    return PLUGIN


@pytest.fixture(scope="module")
def folder():
    """A folder in memory that goes away with the module."""
    path = Path(tempfile.mkdtemp(prefix="kvbm-cxl-nixl-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def cluster(folder, plugin, request):
    """A pool of its own and hosts on it, for tests that break things. Parameters: (wheel, memory)."""
    wheel, memory = getattr(request, "param", (wheels.DEFAULT, "plain"))
    with Cluster(folder, "CXL", wheel, memory) as made:
        yield made
