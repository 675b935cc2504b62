# SPDX-License-Identifier: Apache-2.0
"""Other forms of the same memory: nvdimm, persistent CXL memory, two devices interleaved, and two striped by the pool."""

import json

import pytest

pytestmark = pytest.mark.rare


@pytest.mark.parametrize("mode", ["nvdimm", "cxl-pmem", "cxl-interleaved", "cxl-two"])
def test_two_hosts_exchange_blocks(racks, mode, seed):
    racks.formatted(mode).exchange(seed)


def test_the_order_of_striped_devices_does_not_matter(racks, seed):
    rack = racks.formatted("cxl-two")
    a, b = rack["A"].devices
    told = json.loads(rack.cxlctl("A", "info", "--json").output)
    assert [device["name"] for device in told["devices"]] == [a, b]
    first = rack.start("A").ready()
    assert first("publish", "tiny", seed, 16, 65536) == ["stored"] * 16
    rack.spec = f"{b},{a}"
    second = rack.start("B").ready()
    assert second("outcomes", "tiny", seed, 16, 65536) == ["hit"] * 16
    assert second("publish", "tiny", seed + 1, 16, 65536) == ["stored"] * 16
    assert first("outcomes", "tiny", seed + 1, 16, 65536) == ["hit"] * 16
    for peer in (first, second):
        peer.end()
    assert "0 errors" in rack.fsck("B")


@pytest.mark.parametrize(("devices", "status", "reason"), [((0,), 3, "is missing"), ((1,), 3, "is missing"), ((0, 0), 2, "twice")])
def test_what_is_not_all_of_a_striped_pool_is_refused(racks, devices, status, reason):
    rack = racks.formatted("cxl-two")
    rack.spec = ",".join(rack["A"].devices[index] for index in devices)
    refused = rack.cxlctl("B", "info", status=status)
    assert reason in refused.error and rack["A"].devices[devices[0]] in refused.error
