# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: turns as vLLM's own scheduler makes them, whose last tokens it replaces."""

from types import SimpleNamespace

import pytest
import vllm
from kvbm_cxl import versions
from kvbm_cxl.vllm_integration.keys import group_keys, tail_key
from requests_of_vllm import BLOCK_TOKENS, request, tokens
from test_scheduler_side import _begin, _run, bench  # noqa: F401
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import StreamingUpdate

PROMPT = tokens(100)
# From 0.32 on vLLM drops the hash of a block whose last token it replaces.
KEEPS_HASHES = versions.release(vllm.__version__) < (0, 32)


def _answered(here, session, until: int) -> None:
    """Computes the prompt, and generates until the session has `until` tokens, of which the last one is not computed."""
    _begin(here, session)
    _run(here, session, session.num_tokens)
    for token in tokens(until - session.num_tokens, seed=4):
        session.append_output_token_ids(token)
        if session.num_tokens < until:
            _run(here, session, 1)


def _next_turn(session, token_ids: list[int]) -> None:
    update = StreamingUpdate(None, token_ids, 8, session.arrival_time + 1, session.sampling_params)
    scheduler = SimpleNamespace(num_waiting_for_streaming_input=1, log_stats=False, hash_block_size=16)
    Scheduler._update_request_as_session(scheduler, session, update)


def _saved(orders) -> list[bytes]:
    return [key for save in orders.saves for key in save.keys]


def test_a_session_is_found_and_published_like_any_request(bench):  # noqa: F811
    here, session = bench(), request("s", PROMPT, resumable=True)
    here.publish(session, 6)
    assert here.side.match(session, 0) == (96, True)
    session = request("t", tokens(100, seed=8), resumable=True)
    _answered(here, session, 105)
    _next_turn(session, tokens(60, seed=5))
    again = request("u", list(session.all_token_ids))
    assert _saved(_run(here, session, session.num_tokens - session.num_computed_tokens)) == group_keys(again, 6, 10)
    assert here.side.finish(session)[1] is None, "it has no hand-over"


@pytest.mark.skipif(not KEEPS_HASHES, reason="this vLLM hashes the block again")
def test_a_block_that_ended_with_a_replaced_token_has_no_name(bench):  # noqa: F811
    here, session = bench(consumer=False), request("s", PROMPT, resumable=True)
    _answered(here, session, 7 * BLOCK_TOKENS)
    before = list(session.all_token_ids)
    _next_turn(session, [9999, *tokens(60, seed=5)])
    again = request("u", list(session.all_token_ids))
    assert session.block_hashes[6] != again.block_hashes[6], "vLLM keeps the hash of the tokens before"
    assert _saved(_run(here, session, session.num_tokens - session.num_computed_tokens)) == []
    # Nothing of it is looked up under that hash either, once it is preempted.
    here.publish(again, 10)
    session.num_computed_tokens = 0
    assert here.side.match(session, 0) == (96, True)
    # vLLM gives the wrong block to those that have the tokens of before: what they compute upon it is theirs alone.
    other, longer = request("v", before), request("w", before + tokens(50, seed=6))
    for asked in (other, longer):
        _begin(here, asked)
        assert _saved(_run(here, asked, asked.num_tokens)) == []
    unlike = request("x", tokens(100, seed=7))
    _begin(here, unlike)
    assert _saved(_run(here, unlike, 100)) == [*group_keys(unlike, 0, 6), tail_key(unlike, BLOCK_TOKENS)]
    here.side.finish(session)
    here.side.local_cache_was_reset()
    fresh = request("y", before)
    _begin(here, fresh)
    assert _saved(_run(here, fresh, fresh.num_tokens)) == group_keys(fresh, 0, 7)


@pytest.mark.parametrize("same", (False, True))
def test_a_first_block_with_a_replaced_token(bench, same):  # noqa: F811
    here, session = bench(), request("s", tokens(BLOCK_TOKENS - 1), resumable=True)
    _answered(here, session, BLOCK_TOKENS)
    last = session.all_token_ids[-1]
    _next_turn(session, [last if same else last + 1, *tokens(40, seed=5)])
    again = request("u", list(session.all_token_ids))
    saved = _saved(_run(here, session, session.num_tokens - session.num_computed_tokens))
    assert saved == (group_keys(again, 0, 3) if same or not KEEPS_HASHES else []), "a token that comes again leaves the hash right"
