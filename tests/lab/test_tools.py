# SPDX-License-Identifier: Apache-2.0
"""What an operator runs on /dev/dax: format, doctor with two hosts, fsck with damage."""

import json
import re

from rack import CXLCTL, PYTHON

# Flips a bit of a device, through a mapping of its own.
FLIP = """
import mmap, os, sys
place = int(sys.argv[2])
device = os.open(sys.argv[1], os.O_RDWR)
begin = place >> 21 << 21
with mmap.mmap(device, 2 << 20, offset=begin) as memory:
    memory[place - begin] ^= 16
"""


def test_two_hosts_make_sure_that_they_see_each_others_writes(pair):
    # What is behind the pool is free.
    pair.format("--size", "128M")
    roles = [
        pair[name].start(
            [CXLCTL, "doctor", "--json", "--rounds", "256", "--scratch-offset", "128M"]
            + ["--scratch-bytes", "8M", "--peer-role", role, "--timeout-ms", "120000"],
            {"CXL_POOL": pair.spec},
        )
        for name, role in (("A", "a"), ("B", "b"))
    ]
    for role in roles:
        report = json.loads(role.finish(300).output)
        assert report["verdict"] != "not-usable", report
    assert "0 errors" in pair.fsck()


def test_damage_on_a_device_is_found_and_repaired(pair, seed):
    layout = pair.cxlctl("A", "info").output
    place = int(re.search(r"Hint +(0x[0-9a-f]+)", layout)[1], 16) + 64 + 20
    pair["B"].run([PYTHON, "-Sc", FLIP, pair.spec, place])
    found = pair.cxlctl("A", "fsck", status=1)
    assert "Hint" in found.output
    pair.cxlctl("B", "fsck", "--repair", "--watch-ms", "300")
    assert "0 errors" in pair.fsck("A")
    pair.exchange(seed)
