# SPDX-License-Identifier: Apache-2.0
"""perf/ucx_calls.c: what it answers, and that it notices a response that is not that of its request."""

import subprocess

import pytest
import tidy

SOURCE = (tidy.ROOT / "perf/ucx_calls.c").read_text()
TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(not (tidy.ROOT / ".venv/ucx/installed").exists(), reason="UCX is not there: make setup-ucx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ucx-calls")


def built(folder, name, source):
    """The program made of this text."""
    text, program = folder / f"{name}.c", folder / name
    text.write_text(source)
    subprocess.run([tidy.ROOT / "scripts/ucx-calls", text, program], check=True, timeout=TIMEOUT_S)
    return program


@pytest.fixture(scope="module")
def program(folder):
    return built(folder, "as-it-is", SOURCE)


def asked(program, way, *lines):
    """The exit status and the lines of its answers."""
    result = subprocess.run([program, way], input="\n".join([*lines, "quit", ""]), capture_output=True, text=True, timeout=TIMEOUT_S)
    return result.returncode, result.stdout.splitlines()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_each_batch_is_answered_with_the_times_of_its_calls(program, way):
    status, (ready, *answers) = asked(program, way, "calls 1 256", "calls 128 4096", "calls 3 1", "calls 7 100")
    assert status == 0 and ready.startswith("ready UCX ") and ready.endswith(f"UCX_TLS={way}")
    times = [[float(word) for word in answer.removeprefix("ns ").split()] for answer in answers]
    assert [len(each) - 1 for each in times] == [256, 4096, 1, 100]
    assert all(time > 0 for each in times for time in each)
    # One at a time, a call takes what its share of the batch does, or less; with many under way it takes longer.
    assert min(times[0][1:]) <= times[0][0] and max(times[1][1:]) > times[1][0]


def test_what_is_no_request_is_refused_and_the_next_one_is_answered(program):
    refused = ["calls 0 1", "calls 129 1", "calls 1 0", "calls 1 4097", "calls", "call 1 1"]
    status, answers = asked(program, "shm", *refused, "calls 1 2")
    assert status == 0 and answers[1:-1] == [f"error {line} is no request" for line in refused]
    assert answers[-1].startswith("ns ")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("*out = response(data);", "*out = response(data), out->bytes[63] ^= 1;"),
        ("*out = response(data);", "*out = response(((message_t *)data)->bytes), end.done == 5 ? (void)memset(out, 0, 64) : (void)0;"),
        ("send_message(RESPONSE, out);", "send_message(RESPONSE, &end.out[0]);"),
    ],
)
def test_a_wrong_response_ends_it(folder, right, wrong):
    assert SOURCE.count(right) == 1
    program = built(folder, f"wrong-{len(list(folder.iterdir()))}", SOURCE.replace(right, wrong))
    status, answers = asked(program, "shm", "calls 1 256", "calls 1 256")
    assert status == 1 and answers[1:] == ["error a response is not that of its request"]
