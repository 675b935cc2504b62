# SPDX-License-Identifier: Apache-2.0
"""Pools that are too small, full of pinned blocks, lost, and there again: requests are answered with the right text all the while."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import leftovers
import pytest
from graph import counters
from graph.counters import COMPUTED, PULLED
from graph.pool import format_pool
from serving import blocks, serving, tokens
from traffic import Traffic

SMALL_BYTES = 64 << 20
CELLS = 96  # At most: three quarters of the pool, in cells of 512 KiB.
LONG = [tokens(f"small {number}", 2500) for number in range(10)]
NEW = [tokens(f"while it is full {number}", 600) for number in range(12)]
LATER = [tokens(f"later {number}", 600) for number in range(4)]
LOST = [tokens(f"lost {number}", 1500) for number in range(12)]
BACK = [tokens(f"back {number}", 600) for number in range(12)]


@pytest.fixture(scope="module")
def served():
    with serving([*LONG, *NEW, *LATER, *LOST, *BACK], connector="cxl", pool_bytes=SMALL_BYTES) as one:
        yield one


@pytest.fixture
def pinned(served, tmp_path):
    """Every block that is in the pool, pinned by another host."""
    cells = served.cells("--state", "ready")["cells"]
    told = {**os.environ, "CXL_MACHINE_ID": uuid.uuid4().hex, "CXL_STATE_DIR": str(tmp_path / "host")}
    command = [sys.executable, str(Path(__file__).with_name("pin_everything.py")), served.graph.pool.spec]
    with subprocess.Popen(command, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdin.write("".join(f"{cell['namespace']} {cell['key']}\n" for cell in cells) + "\n")
        holder.stdin.flush()
        count = int(holder.stdout.readline())
        yield count
        holder.stdin.close()
        assert holder.wait(30) == 0


def spent(served, before, role):
    return counters.of_role(counters.read(served.graph), role) - counters.of_role(before, role)


def outcome(served, name):
    pages = [counters.Sample.parse(served.graph.metrics(worker)) for worker in served.graph.workers]
    return sum(page.sum("vllm:kvbm_cxl_published_blocks_total", outcome=name) for page in pages)


def test_more_blocks_than_cells_make_room_for_each_other(served):
    assert sum(map(blocks, LONG)) > 2 * CELLS
    before = counters.read(served.graph)
    assert served.ask_all(LONG + LONG[::-1]) == []
    assert spent(served, before, "prefill").published_blocks > CELLS
    assert len(served.cells()["cells"]) <= CELLS
    served.assert_whole()


def test_a_pool_full_of_pinned_blocks_takes_nothing_and_everything_is_answered(served, pinned):
    assert pinned > CELLS // 2
    refused = outcome(served, "no_cell")
    before = counters.read(served.graph)
    assert served.ask_all(NEW) == []
    after = counters.wait_settled(served.graph, before, len(NEW))
    decode = counters.of_role(after, "decode") - counters.of_role(before, "decode")
    # Only the newest blocks can make room for each other, so some are gone before decode comes for them.
    assert decode.tokens[COMPUTED] > 0
    leftovers.wait_for(lambda: outcome(served, "no_cell") > refused, what="nothing was refused")


def test_it_takes_blocks_again_when_the_pins_are_gone(served):
    before = counters.read(served.graph)
    assert served.ask_all(LATER, at_once=1) == []
    decode = spent(served, before, "decode")
    assert decode.tokens[COMPUTED] == 0 and decode.tokens[PULLED] == sum(map(len, LATER))
    served.assert_whole()


def test_a_pool_that_vanishes_under_the_workers_is_done_without_until_it_is_back(served):
    pool = served.graph.pool
    traffic = Traffic(served, LOST)
    traffic.wait_for(3)
    os.truncate(pool.own, 0)
    refused = traffic.end()
    assert len(refused) < len(LOST) - 3
    # Nothing can be pulled, so all is computed where it is needed.
    before = counters.read(served.graph)
    assert served.ask_all(LOST) == []
    assert spent(served, before, "decode").tokens[PULLED] == 0
    served.graph.check()
    pool.own.unlink()
    format_pool(f"{pool.own},size={SMALL_BYTES}", served.graph.model.block_bytes)
    left = iter(BACK)

    def pulls():
        before = counters.read(served.graph)
        served.ask(next(left))
        return spent(served, before, "decode").tokens[PULLED] > 0

    leftovers.wait_for(pulls, what="the workers did not find the pool again", pause_s=4)
    served.assert_whole()
