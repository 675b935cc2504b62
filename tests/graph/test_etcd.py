# SPDX-License-Identifier: Apache-2.0
"""Discovery by etcd: the hosts' slots come from leases there, and one whose lease ends is fenced and serves on."""

import json
import subprocess
import time

import pytest
from graph import counters, etcd
from graph.counters import COMPUTED, PULLED
from graph.errors import GraphError
from graph.pool import cxlctl
from serving import serving, tokens

PROMPTS = [tokens(f"leased {number}", 400) for number in range(3)]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def served():
    try:
        etcd.programs()
    except GraphError as error:
        pytest.skip(str(error))
    with serving(PROMPTS, connector="cxl", discovery="etcd") as one:
        yield one


def incarnations(served):
    """Slot -> incarnation, of the hosts that are in the pool."""
    slots = json.loads(cxlctl(served.graph.pool.spec, "hosts", "--json"))["slots"]
    return {slot["slot"]: slot["incarnation"] for slot in slots if slot["state"].lower() == "live"}


def ask_and_check(served, prompt):
    before = counters.read(served.graph)
    served.ask(prompt)
    after = counters.wait_settled(served.graph, before)
    decode = counters.of_role(after, "decode") - counters.of_role(before, "decode")
    assert (decode.tokens[COMPUTED], decode.tokens[PULLED]) == (0, len(prompt))


def test_workers_find_each_other_and_their_blocks(served):
    served.ask_round()
    ask_and_check(served, PROMPTS[0])
    told = [json.loads(served.graph.children[f"keeper-{name}"].text().splitlines()[0]) for name in served.graph.workers]
    assert {one["slot"] for one in told} <= set(incarnations(served)) and len({one["slot"] for one in told}) == len(told)


def test_a_worker_whose_lease_ended_is_fenced_and_serves_on(served):
    keeper = served.graph.children["keeper-decode-0"]
    told = json.loads(keeper.text().splitlines()[0])
    body = json.dumps({"ID": str(int(told["lease"], 16))})
    url = f"{etcd.url(served.graph.etcd_port)}/v3/lease/revoke"
    subprocess.run(["curl", "-fsS", "-X", "POST", "-d", body, url], check=True, capture_output=True, timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while incarnations(served).get(told["slot"], 0) <= told["incarnation"]:
        assert time.monotonic() < deadline, "it was not fenced, or did not come back"
        time.sleep(0.1)
    # Its heart never stopped beating; only the lease can have led to the fence.
    for prompt in PROMPTS[1:]:
        ask_and_check(served, prompt)
