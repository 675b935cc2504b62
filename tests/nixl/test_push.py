# SPDX-License-Identifier: Apache-2.0
"""vLLM's push worker: it WRITEs blocks of lists that are prepared once, many requests at a time, takes NIXL's telemetry of each, and tells
by notifications that it lives."""

import numpy
import pytest
from test_lifecycle import KIB

BLOCKS, REQUESTS = 256, 24


@pytest.fixture
def pair(cluster):
    """A prefill worker and a decode worker, which capture telemetry."""
    hosts = []
    for name in ("prefill", "decode"):
        host = cluster.host(name, agent=False)
        host.agent(name, "CXL", telemetry=True)
        hosts.append(host)
    return hosts


@pytest.mark.parametrize("where", ["heap", "pool"])
def test_blocks_are_pushed_with_telemetry_and_heartbeats(cluster, pair, where):
    prefill, decode = pair
    block_bytes = 20 * KIB
    mine, theirs = (cluster.buffer(host, where, BLOCKS * block_bytes) for host in pair)
    cluster.introduce(prefill, decode)
    rows = [side.rows(numpy.arange(BLOCKS) * block_bytes, block_bytes) for side in (mine, theirs)]
    prefill.prepare_sides(*rows, decode.name)
    choose = numpy.random.default_rng(3)
    pieces = {}
    for turn in range(3):
        here, there = choose.permutation(BLOCKS), choose.permutation(BLOCKS)
        per_request = BLOCKS // REQUESTS
        requests = []
        for number in range(REQUESTS):
            part = slice(number * per_request, (number + 1) * per_request)
            requests.append((here[part], there[part], b"request-%d-%d:1" % (turn, number)))
            pieces.update(zip(there[part].tolist(), here[part].tolist(), strict=True))
        decode.heartbeat(prefill.name, b"HB:" + b",".join(b"request-%d" % number for number in range(REQUESTS)))
        told = prefill.push(requests)
        assert [state for state, *_ in told] == ["DONE"] * REQUESTS
        assert {(sent, count) for _, sent, count, _ in told} == {(per_request * block_bytes, per_request)}
        assert all(duration_us > 0 for *_, duration_us in told)
        prefill.heartbeat(decode.name, b"HB:all")
        came = decode.notifications(REQUESTS + 1)[prefill.name]
        assert sorted(came) == sorted([b"HB:all", *(notification for *_, notification in requests)])
        assert prefill.notifications(1)[decode.name][0].startswith(b"HB:request-0,")
        theirs.check([(at * block_bytes, block_bytes, mine.seed, of * block_bytes) for at, of in sorted(pieces.items())])
        mine.check()


def test_a_push_to_a_worker_that_has_ended_fails_and_its_heartbeats_stop(cluster, pair):
    prefill, decode = pair
    mine, theirs = (cluster.buffer(host, "heap", 64 * KIB) for host in pair)
    cluster.introduce(prefill, decode)
    prefill.prepare_sides(mine.rows([0], 64 * KIB), theirs.rows([0], 64 * KIB), decode.name)
    assert prefill.push([([0], [0], b"first")])[0][0] == "DONE"
    decode.heartbeat(prefill.name, b"HB:first")
    assert prefill.notifications(1) == {decode.name: [b"HB:first"]}
    assert decode.stop() == 0
    with pytest.raises(Exception, match="nixlRemoteDisconnectError|nixlNotFoundError"):
        prefill.push([([0], [0], b"second")])
        prefill.heartbeat(decode.name, b"HB:second")
        prefill.push([([0], [0], b"third")])
