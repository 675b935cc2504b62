# SPDX-License-Identifier: Apache-2.0
"""A graph whose prefill and decode workers are on two hosts that share the pool and a network, and nothing else."""

import os

import leftovers
import pytest
from graph import counters, environment, question
from graph.counters import COMPUTED, PULLED
from graph.errors import GraphError
from graph.hosts import InLab
from graph.model import BLOCK_TOKENS, choose
from graph.options import parse
from serving import serving, tokens

PROMPTS = [tokens(f"two hosts {number}", 300 + 128 * number) for number in range(3)]
KINDS = ("net", "pid", "mnt", "uts")


@pytest.fixture(scope="module")
def served():
    try:
        with serving(PROMPTS, connector="cxl", hosts="namespaces") as one:
            yield one
    except GraphError as error:
        if "cannot be made here" not in str(error) and "lab-agent" not in str(error):
            raise
        pytest.skip(str(error))


def namespaces(served, name):
    """Of the processes of a worker, in the words of the kernel."""
    script = f"for kind in {' '.join(KINDS)}; do readlink /proc/self/ns/$kind; done; ls /dev/shm"
    return served.graph.place.host(name).run(["sh", "-c", script]).output.split()


def test_the_hosts_share_the_pool_and_no_namespace(served):
    prefill, decode = namespaces(served, "prefill-0"), namespaces(served, "decode-0")
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS]
    for mine, one, other in zip(here, prefill, decode, strict=False):
        assert len({mine, one, other}) == 3
    assert "pool" in prefill[len(KINDS) :] and "pool" in decode[len(KINDS) :]
    assert served.graph.place.address("prefill-0") != served.graph.place.address("decode-0")


def test_decode_pulls_what_prefill_published_on_the_other_host(served):
    served.ask_round()
    for prompt in PROMPTS:
        before = counters.read(served.graph)
        served.ask(prompt)
        decode = counters.of_role(counters.wait_settled(served.graph, before), "decode") - counters.of_role(before, "decode")
        assert (decode.tokens[COMPUTED], decode.tokens[PULLED]) == (0, len(prompt))
    slots = {cell["stamp"]["owner"] for cell in served.cells()["cells"]}
    assert len(slots) == 1, "only prefill has published"
    served.assert_whole()


def test_a_host_ends_with_all_that_ran_in_it():
    # Of its own, for it ends in the middle.
    options = parse(["--hosts", "namespaces"])
    try:
        place = InLab(options, options.state / "tests" / f"hosts-{os.getpid()}", lambda line: None)
    except GraphError as error:
        pytest.skip(str(error))
    marker = f"marker-{os.getpid()}-two-hosts"
    log = place.lab.folder / "child.log"
    child = place.child("decode-0", ["sh", "-c", f": {marker}; echo begun; sleep 1000; :"], dict(os.environ), log)
    try:
        leftovers.wait_for(lambda: log.exists() and "begun" in child.text())
        assert child.status() is None
        place.lab["B"].kill()
        leftovers.wait_for(lambda: child.status() == -9)
        assert place.lab["A"].alive()
    finally:
        place.end()
    leftovers.wait_for(lambda: not leftovers.processes_with(marker))


def test_a_pool_of_this_machine_is_not_for_other_hosts(capsys):
    with pytest.raises(SystemExit):
        parse(["--hosts", "lab", "--pool", "/dev/dax0.0"])
    assert "have a memory device of their own" in capsys.readouterr().err
    assert parse(["--hosts", "lab"]).discovery == "etcd" and parse(["--hosts", "namespaces"]).discovery == "file"


def test_virtual_hosts_have_more_time_for_all_that_ends_by_the_clock(tmp_path):
    here, lab = (parse(["--discovery", "etcd", *words]) for words in ([], ["--hosts", "lab"]))
    told, told_lab = (environment.common(options, tmp_path) for options in (here, lab))
    timed = {name for name in told if told[name] != told_lab[name]}
    assert timed >= {"ETCD_LEASE_TTL", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"}
    assert all(int(told_lab[name]) == lab.slowness * int(told[name]) for name in timed) and lab.slowness > here.slowness == 1
    assert lab.ready_timeout_s == lab.slowness * here.ready_timeout_s
    # A process less for each worker; here they are as they are with a GPU.
    assert told_lab["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in told
    assert parse(["--hosts", "lab", "--ready-timeout", "77"]).ready_timeout_s == 77
    # To look is dear there as well: members of the pool do it less often.
    pools = [environment.pool(options, "/dev/dax0.0", None, tmp_path) for options in (here, lab)]
    assert int(pools[1]["CXL_POLL_US"]) == lab.slowness * int(pools[0]["CXL_POLL_US"]) and pools[0]["CXL_POOL"] == "/dev/dax0.0"


def test_questions_for_virtual_hosts_are_short_and_show_the_same():
    class Asks:
        pool = None

        def __init__(self, *words):
            self.options = parse(list(words))

    here, lab = Asks(), Asks("--hosts", "lab")
    tokenizer = choose(here.options).tokenizer()
    for asks, most in ((here, 900), (lab, 250)):
        one, other = (tokenizer.encode(prompt).ids for prompt in question.prompts(asks))
        same = next(at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
        assert question.length(asks).shared_blocks * BLOCK_TOKENS <= same < len(one) <= most
    assert question.length(lab).max_tokens < question.length(here).max_tokens
