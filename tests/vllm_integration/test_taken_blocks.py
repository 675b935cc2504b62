# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step has been given, told by vLLM's own description of a step."""

from types import SimpleNamespace

import pytest
from kvbm_cxl.vllm_integration.groups import Group, Kind, Shape
from kvbm_cxl.vllm_integration.metadata import Blocks
from kvbm_cxl.vllm_integration.saving import taken_blocks
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

# Of the three rows of a table, the last is of a group that holds nothing of a prefix.
SHAPE = Shape((Group(0, ("full",), 16, Kind.FULL), Group(1, ("window",), 8, Kind.WINDOW, 40, slices=2)), 16, 16)


@pytest.fixture
def step() -> SchedulerOutput:
    return SchedulerOutput.make_empty()


def _new(rows, computed: int) -> SimpleNamespace:
    return SimpleNamespace(req_id="new", block_ids=rows, num_computed_tokens=computed)


def _cached(rows, computed: int, resumed: bool = False) -> CachedRequestData:
    return CachedRequestData(["old"], {"old"} if resumed else set(), [], {}, [rows], [computed], [1])


def test_a_step_without_requests_has_none(step):
    assert taken_blocks(step, [], SHAPE) == []


@pytest.mark.parametrize("computed, taken", ((0, [1, 2, 3, 11, 12, 13, 20, 21]), (16, [2, 3, 12, 13, 20, 21]), (47, [3, 13, 20, 21])))
@pytest.mark.parametrize("resumed", (False, True))
def test_what_a_request_had_computed_is_not_written(step, computed, taken, resumed):
    """Blocks of the prefix are other requests', too, and may be on their way into the pool for long."""
    rows = [1, 2, 3], [0 if computed == 47 else 11, 12, 13], [20, 21]
    if resumed:
        step.scheduled_cached_reqs = _cached(rows, computed, resumed=True)
    else:
        step.scheduled_new_reqs = [_new(rows, computed)]
    assert taken_blocks(step, [], SHAPE) == taken


def test_every_block_that_a_running_request_gets_counts(step):
    step.scheduled_cached_reqs = _cached(([7], [8, 9], []), 600)
    assert taken_blocks(step, [], SHAPE) == [7, 8, 9]
    step.scheduled_cached_reqs = _cached(None, 600)
    assert taken_blocks(step, [], SHAPE) == []


def test_what_is_loaded_cleared_copied_or_exchanged_counts(step):
    loads = [Blocks("a", [b"1", b"2"], [30, 31], group=0), Blocks("a", [b"3", b"4", b"5"], [80, 81, 82], group=1)]
    step.new_block_ids_to_zero, step.kv_cache_block_copies, step.block_table_updates = [50], [(51, 52)], {"b": ([60], [0, 61])}
    assert taken_blocks(step, loads, SHAPE) == [30, 31, 40, 41, 50, 52, 60, 61]
