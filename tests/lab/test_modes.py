# SPDX-License-Identifier: Apache-2.0
"""Every other form in which hosts can get at the same memory: nvdimm, persistent CXL memory, two devices interleaved, and striped by the pool."""

import pytest


@pytest.mark.parametrize("mode", ["nvdimm", "cxl-pmem", "cxl-interleaved", "cxl-two"])
def test_two_hosts_exchange_blocks(racks, mode, seed):
    racks.formatted(mode).exchange(seed)


def test_the_order_of_striped_devices_does_not_matter(racks, seed):
    rack = racks.formatted("cxl-two")
    a, b = rack["A"].devices
    assert rack.cxlctl("A", "info", "--json").output.count("/dev/dax") == 2
    first = rack.start("A").ready()
    assert first("publish", "tiny", seed, 40, 65536) == ["stored"] * 40
    rack.spec = f"{b},{a}"
    second = rack.start("B").ready()
    assert second("outcomes", "tiny", seed, 40, 65536) == ["hit"] * 40
    assert second("publish", "tiny", seed + 1, 40, 65536) == ["stored"] * 40
    assert first("outcomes", "tiny", seed + 1, 40, 65536) == ["hit"] * 40
    for peer in (first, second):
        peer.end()
    assert "0 errors" in rack.fsck("B")


@pytest.mark.parametrize(("devices", "reason"), [((0,), "2 devices"), ((1,), "2 devices"), ((0, 0), "twice")])
def test_what_is_not_all_of_a_striped_pool_is_refused(racks, devices, reason):
    rack = racks.formatted("cxl-two")
    rack.spec = ",".join(rack["A"].devices[index] for index in devices)
    refused = rack.cxlctl("B", "info", status=3)
    assert reason in refused.error
