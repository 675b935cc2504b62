# SPDX-License-Identifier: Apache-2.0
"""A container that gets /dev/dax0.0 and nothing else, as another user than root and without any capability, is a host of the pool."""

import containers
import pytest

pytestmark = pytest.mark.rare

# What a process in the container is and has; then what it must not be able to do.
LOOK = r"""
id -u; id -G
grep -E '^(CapPrm|CapEff|CapBnd|NoNewPrivs)' /proc/self/status
echo devices: $(cd /dev; find . -type c | sort)
echo other: $(mknod /tmp/mem c 1 1 2>&1 || true)
head -c 1 /dev/zero >/dev/dax0.0 2>/dev/null && echo written || echo devdax takes no write
echo changed >/etc/changed 2>/dev/null && echo changed || echo the root is read-only
"""


@pytest.fixture
def rack(pair):
    """Hosts A and B with a pool that root of A has formatted."""
    if not containers.runc():
        pytest.skip("no runc: `make setup-deploy` unpacks it")
    return pair


def test_the_container_has_the_device_and_no_right_beside(rack):
    done = containers.run(rack, "A", "sh", "-c", LOOK)
    said = done.output.splitlines()
    assert done.status == 0, done.output + done.error
    assert said[:2] == [str(containers.USER), f"{containers.USER} {containers.GROUP}"]
    rights = dict(line.split(":\t") for line in said[2:6])
    assert {name: int(value, 16) for name, value in rights.items()} == {"CapPrm": 0, "CapEff": 0, "CapBnd": 0, "NoNewPrivs": 1}
    devices = set(said[6].split()[1:])
    assert "./dax0.0" in devices and not devices & {"./mem", "./kmem", "./port", "./kmsg"}
    assert "not permitted" in said[7] and said[8:] == ["devdax takes no write", "the root is read-only"], said


def test_containers_of_two_hosts_exchange_blocks_and_one_comes_back(rack, seed):
    peers = [containers.start(rack, name) for name in "AB"]
    rack.exchange(seed, peers=[peer.ready() for peer in peers])
    # Another run of A's container, with its state of before, is killed; its successor finds what it had published.
    chain = ("killed", seed, 16, 40_000)
    one = containers.start(rack, "A").ready()
    assert one("publish", *chain) == ["stored"] * 16
    rack["A"].run([*containers.tool("kill"), "peer-a", "KILL"])
    assert one.process.wait(120) != 0
    again, other = containers.start(rack, "A").ready(), containers.start(rack, "B").ready()
    assert again("outcomes", *chain) == other("outcomes", *chain) == ["hit"] * 16
    for peer in (again, other):
        peer.end()
    assert "0 errors" in rack.fsck("B")
