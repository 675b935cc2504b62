# SPDX-License-Identifier: Apache-2.0
"""The NIXL wheel with the CXL plugin in two virtual hosts that nothing but the memory connects."""

import pytest
from conftest import ROOT

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def agents(pair):
    """A NIXL agent in each host."""
    if not (ROOT / "target/nixl_plugin/libplugin_CXL.so").is_file():
        pytest.skip("no plugin: `make build-plugin` builds it")
    if not list((ROOT / ".venv").glob("lib/python3*/site-packages/nixl/__init__.py")):
        pytest.skip("no NIXL: `make setup-nixl` gets it")
    for name in "AB":
        assert pair[name].run(["ls", "/sys/class/net"]).output.split() == ["lo"]
    started = [pair.start_nixl(name) for name in "AB"]
    for name, agent in zip("AB", started, strict=True):
        agent.ready()
        agent("agent", name, "CXL")
    return started


def introduce(agents):
    """Each learns what the other has registered."""
    for here, there in (agents, agents[::-1]):
        here("add", there("metadata"))


def test_agents_move_data_between_hosts(agents, pair, seed):
    # One after the other with the same agents, which an emulated processor takes half a minute to start.
    for places in (("heap", "heap"), ("heap", "pool")):
        move_both_ways(agents, pair, places, seed % (1 << 20))


def move_both_ways(agents, pair, places, seed):
    """One agent writes and reads memory of the other, wherever each has its own; then they forget each other."""
    a, b = agents
    addresses = []
    for number, (agent, where) in enumerate(zip(agents, places, strict=True)):
        if where == "pool":
            agent("open_pool", pair.spec)
        addresses.append(agent("buffer", "memory", where, MIB, seed + number))
    introduce(agents)

    # B writes two pieces of its memory into that of A, and A hears of it.
    rows = [(0, 64 * KIB, 128 * KIB), (300 * KIB, 700 * KIB, 4 * KIB)]
    local = [(addresses[1] + start, length, 0) for _, start, length in rows]
    remote = [(addresses[0] + at, length, 0) for at, _, length in rows]
    assert b("transfer", "WRITE", local, remote, "A", b"written", 100) == "DONE"
    assert a("notifications", 1, 100) == {"B": [b"written"]}
    assert a("check", "memory", [(at, length, seed + 1, start) for at, start, length in rows]) == ""
    assert b("check", "memory") == ""

    # B fetches from A what no host has touched.
    local, remote = (addresses[1] + 512 * KIB, 100 * KIB, 0), (addresses[0] + 800 * KIB, 100 * KIB, 0)
    assert b("transfer", "READ", [local], [remote], "A", b"", 100) == "DONE"
    assert b("check", "memory", [(512 * KIB, 100 * KIB, seed, 800 * KIB)]) == ""
    for agent, other in zip(agents, "BA", strict=True):
        agent("deregister", "memory")
        agent("remove", other)
