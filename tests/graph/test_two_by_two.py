# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode workers, each a host of the pool by itself: what one computes all have, and the end of one harms no other."""

import random

import faults
import leftovers
import pytest
from graph import counters
from graph.counters import COMPUTED, PULLED, REUSED
from graph.model import BLOCK_TOKENS
from serving import serving, tokens
from traffic import Rounds

SHARED = tokens("shared", 5 * BLOCK_TOKENS + 30)
LONG = [tokens(f"long {number}", 2500) for number in range(24)]
REQUESTS = 100
PREFIXES = [tokens(f"prefix {number}", 1500) for number in range(8)]


def random_requests():
    """Prompts that begin as one of a few prefixes does, for a random length, and then go their own way."""
    choose = random.Random("requests")
    return [choose.choice(PREFIXES)[: choose.randrange(1, 1500)] + tokens(f"ending {n}", choose.randrange(1, 300)) for n in range(REQUESTS)]


RANDOM = random_requests()


@pytest.fixture(scope="module")
def served():
    with serving([SHARED, *LONG, *RANDOM], connector="cxl", prefill=2, decode=2) as one:
        yield one


def spent(served, before, after, name):
    return after[name] - before[name]


def test_a_prefix_is_computed_once_and_every_other_worker_pulls_it(served):
    before = counters.read(served.graph)
    for count in range(1, 5):
        served.ask(SHARED)
        after = counters.wait_settled(served.graph, before, count)
    prefill = [spent(served, before, after, f"prefill-{number}") for number in (0, 1)]
    decode = [spent(served, before, after, f"decode-{number}") for number in (0, 1)]
    full = len(SHARED) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [count.requests for count in prefill + decode] == [2, 2, 2, 2]
    assert sorted(count.tokens[COMPUTED] >= full for count in prefill) == [False, True], "one computes it"
    assert sorted(count.tokens[PULLED] >= full for count in prefill) == [False, True], "and the other one pulls it"
    for count in decode:
        assert count.tokens[COMPUTED] == 0 and count.tokens[PULLED] >= len(SHARED) and count.tokens[REUSED] <= full


def restart(served, name):
    """Starts it again and waits until it has answered something."""
    served.graph.restart_worker(name)
    served.graph.wait_until_ready()

    def answers():
        served.ask_all(LONG[:4])
        return served.counted(name).requests > 0

    leftovers.wait_for(answers, what=f"{name} gets no requests")


def test_100_requests_at_random_prefixes_survive_the_end_of_a_decode_worker_while_it_pulls(served):
    rounds = Rounds(served, RANDOM)
    pulls = faults.pulling(served, "decode-1")

    def pulls_in_the_middle():
        return REQUESTS // 4 <= rounds.round.done <= REQUESTS // 2 and pulls()

    # A round in which no such moment was met is followed by another one.
    faults.kill_while(served, "decode-1", pulls_in_the_middle, rounds.keep_busy, seed=1)
    left = REQUESTS - rounds.round.done
    assert left > REQUESTS // 4, "it ended in the middle"
    failed = rounds.end()
    # Requests of the dead worker go on elsewhere; those that cannot are refused, not answered with something else.
    assert len(failed) <= left // 2
    assert served.ask_all(RANDOM[:8]) == [], "the other decode worker is as it was"
    restart(served, "decode-1")
    assert served.ask_all(RANDOM[:24]) == []
    served.assert_whole()


def test_the_end_of_a_prefill_worker_while_it_publishes_harms_no_request(served):
    rounds = Rounds(served, LONG)
    faults.kill_while(served, "prefill-1", faults.publishing(served, "prefill-1"), rounds.keep_busy, seed=2)
    assert len(rounds.end()) <= len(LONG) // 2
    restart(served, "prefill-1")
    served.forget()
    assert served.ask_all(LONG) == []
    served.assert_whole()
