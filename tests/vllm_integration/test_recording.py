# SPDX-License-Identifier: Apache-2.0
"""The record of an engine's requests: what the scheduler's side enters, and that no request depends on it."""

import json
import time
from pathlib import Path

from requests_of_vllm import Scheduled, allocation, request, tokens
from test_scheduler_side import bench  # noqa: F401  the fixture


def lines(folder: Path) -> list[dict]:
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_are_recorded_once_with_what_was_found(bench, tmp_path):  # noqa: F811
    here = bench(producer=False, record_dir=str(tmp_path), record_salt="secret")
    first, second = request("a", tokens(100)), request("b", tokens(100))
    here.admit(first)
    here.publish(first, 6, tail=True)
    here.side.match(second, 32)
    assert here.side.match(second, 32) == (68, True), "asked again, as vLLM does"
    here.side.note_allocation(second, allocation(list(range(7))), 68)
    here.side.step(Scheduled())
    here.finish_load("b")
    here.side.close()
    head, one, two, end = lines(tmp_path)
    assert head["block_tokens"] == 16
    assert (one["input_length"], one["found"], len(one["hash_ids"])) == (100, 0, 6)
    assert (two["input_length"], two["found"], two["hash_ids"]) == (100, 100, one["hash_ids"])
    assert end["dropped"] == end["failed"] == 0 and "secret" not in json.dumps([head, one, two, end])


def test_entries_are_counted(bench, tmp_path):  # noqa: F811
    here = bench(record_dir=str(tmp_path), record_salt="secret")
    here.admit(request("a", tokens(100)))
    counted, deadline = 0, time.monotonic() + 120
    while not counted and time.monotonic() < deadline:
        counted += here.counts().get("recorded_entries/written", 0)
        time.sleep(0.02)
    assert counted == 1


def test_a_folder_that_cannot_be_costs_no_request(bench):  # noqa: F811
    here, asked = bench(producer=False, record_dir="/proc/nowhere", record_salt="secret"), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.recording is None and here.admit(asked)[0] == 100
    here.finish_load("a")
    error = here.access.failures.last_error
    assert error is not None and "/proc/nowhere" in error.detail
    assert here.counts()["thread_errors/os"] == 1
