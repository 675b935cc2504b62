# SPDX-License-Identifier: Apache-2.0
"""A device that is told which blocks come next (`copy="read_ahead=..."`), while another host evicts them and publishes others in their
cells: what was told of may be old by then, and no reader ever gets a wrong byte."""

import kvbm_cxl
import numpy
import pools
import pytest
from pools import chain, namespace, payload

NS = namespace()
# As long as a cell nearly: a pool has few of them, so that each is written again and again.
LEN_BYTES = 60_000
# Keys that a publisher goes round in (`Calls.stream`), and those of them that fit the pool at a time, at least.
AROUND, FITTING = 4096, 256


@pytest.mark.parametrize("ahead", ["read_ahead=8", "read_ahead=2,ahead_page=36K", "read_ahead=auto"])
def test_blocks_told_of_are_what_they_are_when_they_are_copied(coherence, pool, peer, ahead):
    publisher, keys = peer("another"), chain(AROUND, 1)
    target = numpy.zeros((64, LEN_BYTES), numpy.uint8)
    layout = kvbm_cxl.BlockLayout.of_tensors([target])
    hits = 0
    with pool.cache(copy=ahead) as cache:
        publisher.send("stream", "tiny", 1, LEN_BYTES)
        for _ in range(12):
            said = publisher.answer()
            # The oldest that may be there: they go while they are pulled.
            begin = max(0, said - FITTING)
            some = [keys[place % AROUND] for place in range(begin, begin + 64)]
            for place, miss in enumerate(cache.pull_blocks(NS, some, layout, range(64))):
                if miss is None:
                    hits += 1
                    assert target[place].tobytes() == payload(some[place], LEN_BYTES), f"block {begin + place}"
        publisher.kill()
        said = max([said, *publisher.drain()])
        newest = [keys[place % AROUND] for place in range(said - 16, said)]
        assert cache.pull_blocks(NS, newest, layout, range(16)) == [None] * 16
        hits += 16

        def counted():
            return cache.metrics()["cxl_copy_ahead_pages_total"]

        if ahead != "read_ahead=auto":
            pools.until(lambda: counted()["used"] > 0, "the pages that were told of")
            pools.until(lambda: counted()["given"] == counted()["used"] + counted()["wasted"], "every page to be one or the other")
    assert hits >= 16


@pytest.mark.parametrize("copy", ["read_ahead=0", "read_ahead=9", "read_ahead=on", "ahead_page=5K"])
def test_what_cannot_be_meant_is_refused(pool, copy):
    with pytest.raises(kvbm_cxl.InvalidError, match=r"read_ahead|multiple"):
        pool.cache(copy=copy)


def test_nothing_is_told_of_unless_it_is_asked_for(pool, cache):
    key = chain(1, 7)[0]
    assert cache.publish(NS, key, payload(key, LEN_BYTES)) == "stored"
    into = bytearray(LEN_BYTES)
    assert cache.pull(NS, key, into)
    pools.until(lambda: cache.metrics()["cxl_copy_bytes_total"]["cpu"] > LEN_BYTES, "what is counted of copies")
    assert cache.metrics()["cxl_copy_ahead_pages_total"] == {"given": 0, "used": 0, "wasted": 0}
