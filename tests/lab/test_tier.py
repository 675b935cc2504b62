# SPDX-License-Identifier: Apache-2.0
"""The KVBM tier on two hosts that nothing but the memory connects: KVBM's own leaders, and a prefill host that loses power in a put.

The hosts run the tier's test program (kvbm_cxl/tier/tests/tier/child.rs), which compares every byte of what it gets.
"""

import time

import pytest
from cxl_lab import ROOT
from rack import CALL_TIMEOUT_S

# What `make test-lab` writes: the program, and where its libraries are.
PROGRAM = ROOT / "target" / "tier" / "lab-program"
# Cells of the program's blocks of 3 KiB.
CELLS = "4K:60%"
BLOCKS = 5
# An emulated processor can be silent for seconds while the machine has other work, and is not dead.
SUSPECT_MS = 10_000
# Where prefill's host loses power, with how many of its blocks may be there then.
DEATHS = {
    "cache.may_write 1": range(1),
    "cache.filled 1": range(1),
    "cache.commit 3": range(3),
    "cache.ready 1": range(BLOCKS, BLOCKS + 1),
}


class Tier:
    """The tier in a host, told what to do; reports begin with a word of their own among what the tests' runner prints."""

    def __init__(self, rack, name, task):
        if not PROGRAM.is_file():
            pytest.skip(f"no {PROGRAM}: `make test-lab` builds it")
        program, libraries = PROGRAM.read_text().split()
        environment = {
            "TIER_CHILD_TASK": task,
            "DYN_KVBM_CXL_POOL": rack.spec,
            "DYN_KVBM_CXL_CHECKSUMS": "on",
            "CXL_SUSPECT_MS": str(SUSPECT_MS),
            "LD_LIBRARY_PATH": libraries,
            "NIXL_LOG_LEVEL": "WARN",
        }
        self.process = rack[name].start([program, "child", "--exact", "--nocapture", "--test-threads=1"], environment)

    def report(self):
        """What it reports next."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            line = self.process.read_line(max(deadline - time.monotonic(), 0))
            if line.startswith("report: "):
                return line.removeprefix("report: ")

    def __call__(self, call, seed):
        """What became of each block of a put or a get; a word that is wrong in a block that was got ends the program."""
        self.process.write(f"{call} {seed} {BLOCKS}\n".encode())
        return self.report().split()

    def end(self):
        """Ends it; its host goes on."""
        self.process.end_input()
        self.process.finish(CALL_TIMEOUT_S)


def test_decode_gets_on_its_host_what_prefill_put_on_another(either_pair):
    either_pair.format(cells=CELLS)
    prefill = Tier(either_pair, "A", "prefill 24 0 1")
    assert prefill.report() == "completed 24 failed 0"
    # Its blocks lie in memory in another way.
    decode = Tier(either_pair, "B", "decode 24 1 1")
    assert decode.report() == "found 24 right 24"
    for tier in (decode, prefill):
        tier.end()
    assert "0 errors" in either_pair.fsck("B")


@pytest.mark.parametrize("point", DEATHS)
def test_prefill_loses_power_in_a_put(racks, seed, point):
    rack = racks.formatted("cxl", cells=CELLS)
    decode = Tier(rack, "B", "ask")
    assert decode.report() == "joined"
    seed %= 1 << 15
    prefill = Tier(rack, "A", f"stand {seed} {BLOCKS} {point}")
    assert prefill.report() == "stands"
    rack["A"].kill()
    # Whole blocks or misses, at once and after the host is taken for dead.
    there = decode("get", seed).count("done")
    assert there in DEATHS[point], (point, there)
    # No key is stuck: decode stores what is missing, and gets it.
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while set(put := decode("put", seed)) - {"done", "exists"}:
        assert time.monotonic() < deadline, f"keys of a dead host cannot be put: {put}"
        assert set(decode("get", seed)) <= {"done", "absent", "owner_gone"}
        time.sleep(0.2)
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while (got := decode("get", seed)) != ["done"] * BLOCKS:
        assert time.monotonic() < deadline, f"blocks that were put cannot be got: {got}"
        decode("put", seed)
    decode.end()
    assert "0 errors" in rack.fsck("B")
