# SPDX-License-Identifier: Apache-2.0
"""Racks of hosts for the tests of a session: booted when the first test asks, healed and with a new pool for each."""

import os
import platform
import random
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parents[1] / folder) for folder in ("python", "python/tests", "tests/peers"))]

from cxl_lab import FOLDER, ROOT, LabError  # noqa: E402
from cxl_lab.host import AGENT  # noqa: E402
from cxl_lab.lab import NAMES, NAMESPACES, Lab  # noqa: E402
from cxl_lab.namespace import children  # noqa: E402
from rack import CXLCTL, Rack, compile_programs  # noqa: E402

TEST_TIMEOUT_S = 600
# Enough for the NIXL wheel; what no program uses costs the machine nothing.
MEMORY_MB = 1024


def pytest_configure(config):
    """`-m smoke`: what shows in a minute that the lab works, and what hosts survive."""
    config.addinivalue_line("markers", "smoke: short tests that `make test-lab-smoke` runs")
    config.addinivalue_line("markers", "rare: tests of hosts that few other tests use")


def pytest_collection_modifyitems(items):
    """No test of the lab may take longer than this. Those of hosts that no others use come last: two racks stay up."""
    items.sort(key=lambda item: item.get_closest_marker("rare") is not None)
    for item in items:
        if HERE in Path(item.fspath).parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With a failure goes what is needed to look into it and to see it again."""
    report = yield
    if report.failed and (racks := item.session.stash.get(Racks.KEY, None)):
        report.sections.append(("lab", racks.story(item)))
    return report


def reason_to_skip(mode):
    """Why there can be no lab of this mode here; None where there can."""
    missing = [path for path in (AGENT, CXLCTL, ROOT / "target/release/libcxl_shm.so") if not path.is_file()]
    missing += [] if list((ROOT / "python/kvbm_cxl").glob("_native.*so")) else ["the Python extension"]
    if missing:
        return f"no {missing[0]}: `make setup-lab python-extension` builds it"
    if mode == NAMESPACES:
        return None
    if platform.machine() != "x86_64":
        return f"the lab's virtual machines are x86_64, this machine is {platform.machine()}"
    return None if (FOLDER / "initrd.gz").is_file() else "the lab is not set up: `make setup-lab` does it"


def lab_of_namespaces(hosts, folder):
    """A lab of so many hosts of namespaces; where there can be none the test is skipped."""
    if not AGENT.is_file():
        pytest.skip("no agent: `make build-lab` builds it")
    try:
        return Lab(hosts, NAMESPACES, folder=folder)
    except LabError as error:
        pytest.skip(str(error))


class Racks:
    """The racks of a session. At most two are up at a time: each host takes memory, and a little of the processors even while it idles."""

    KEY = pytest.StashKey()
    MOST = 2

    def __init__(self):
        self.folder = ROOT / "target" / "lab" / f"tests-{os.getpid()}"
        self.up, self.number, self.broke = {}, 0, False
        compile_programs()

    def get(self, mode, names="AB"):
        """The rack of this mode with these hosts up, healed, and with a pool that is not formatted yet."""
        if reason := reason_to_skip(mode):
            pytest.skip(reason)
        rack = self.up.pop(mode, None)
        if rack is None:
            while len(self.up) >= self.MOST:
                self.up.pop(next(iter(self.up))).lab.close()
            self.number += 1
            try:
                rack = Rack(Lab(len(NAMES), mode, memory_mb=MEMORY_MB, folder=self.folder / f"{self.number}-{mode}"))
            except LabError as error:
                if mode == NAMESPACES:
                    pytest.skip(str(error))
                raise
        # The one that was used last is the last to go.
        self.up[mode] = rack
        rack.heal(names)
        return rack

    def formatted(self, mode, names="AB", **options):
        """The same with a new pool."""
        rack = self.get(mode, names)
        rack.format(**options)
        return rack

    def story(self, item):
        """Where the logs are, the seed, and what the hosts of the test wrote last."""
        self.broke = True
        text = f"logs: {self.folder}\n"
        if "seed" in item.funcargs:
            text += f"seed: SEED={item.funcargs['seed']} gives the same data\n"
        for rack in list(self.up.values())[-1:]:
            text += rack.story()
        return text

    def close(self):
        """Ends all; logs stay where a test failed."""
        for rack in self.up.values():
            rack.lab.close()
        self.up = {}
        if not self.broke:
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def racks(request):
    """All racks. In the end no process is left."""
    before = set(children(os.getpid()))
    made = request.session.stash[Racks.KEY] = Racks()
    yield made
    made.close()
    assert not set(children(os.getpid())) - before, "processes of the lab are left"


@pytest.fixture
def seed():
    """Shapes the data of a test; the environment variable SEED gives it again."""
    return int(os.environ.get("SEED") or random.randrange(1 << 31))


@pytest.fixture
def pair(racks):
    """Hosts A and B on one CXL device, and a new pool on it."""
    return racks.formatted("cxl")


@pytest.fixture(params=["cxl", NAMESPACES])
def either_pair(racks, request):
    """Hosts A and B, virtual or of namespaces, and a new pool on their memory."""
    return racks.formatted(request.param)
