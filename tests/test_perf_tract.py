# SPDX-License-Identifier: Apache-2.0
"""perf/tract.py: lengths that are not the paper's end it, ratios are what they say, and AIPerf's synthesizer gives the wanted means."""

import json
import subprocess
import sys

import pytest
import tidy

sys.path.insert(0, str(tidy.ROOT / "perf"))
import tract  # noqa: E402

LENGTHS = {"input": [4450.0, 1.0], "unique": [1080.0, 1.0], "answer": [215.0, 1.0]}
TIMEOUT_S = 600


def test_lengths_of_the_table_pass_and_others_do_not():
    assert tract.checked("A", LENGTHS) == LENGTHS
    for what in LENGTHS:
        with pytest.raises(tract.Wrong, match=f"workload A: {what}"):
            tract.checked("A", {**LENGTHS, what: [LENGTHS[what][0] * 1.08, 1.0]})
    with pytest.raises(tract.Wrong, match="workload C: unique"):
        tract.checked("C", LENGTHS)


def row(hit_rate, mean_s, p99_s, requests, span_s):
    return {"hit_rate": hit_rate, "ttft": {"mean_s": mean_s, "p99_s": p99_s}, "counts": {"requests_in": requests}, "span_s": span_s}


def test_ratios_above_one_are_better_with_the_pool():
    at_one = {"none": row(0, 8, 9, 1, 1), "own": row(0.2, 3, 5, 1, 1), "pool": row(0.3, 2, 3, 1, 1)}
    at_three = {"none": row(0, 0, 0, 100, 100), "own": row(0, 0, 0, 100, 40), "pool": row(0, 0, 0, 100, 50)}
    assert tract.compared("B", at_one, at_three) == pytest.approx(
        {"hits_pool_over_own_b": 1.5, "ttft_mean_none_over_pool_b": 4, "ttft_p99_none_over_pool_b": 3, "peak_pool_over_none_b": 2}
        | {"peak_pool_over_own_b": 0.8}
    )


def test_requests_come_at_the_rate_and_keep_their_blocks():
    lines = [json.dumps({"input_length": 512 + number, "output_length": 3, "hash_ids": [number]}) for number in range(3000)]
    requests = tract.at_rate(lines, 2.0, 2000)
    assert [request[1:] for request in requests] == [(512 + number, 3, [number]) for number in range(2000)]
    times = [request[0] for request in requests]
    assert times == sorted(times) and times[-1] == pytest.approx(1000, rel=0.1)
    assert requests == tract.at_rate(lines, 2.0, 2000)


def test_a_folder_without_the_trace_is_an_error(tmp_path):
    done = subprocess.run([sys.executable, tidy.ROOT / "perf/tract.py", tmp_path], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and "TRACES=" in done.stderr and "RATIOS" not in done.stdout


@pytest.mark.skipif(not (tidy.ROOT / ".venv/aiperf/installed").exists(), reason="AIPerf's synthesizer is not there: make setup-aiperf")
def test_the_synthesizer_gives_the_means_and_keeps_what_begins_alike(tmp_path):
    trace, own = tmp_path / "trace.jsonl", iter(range(1 << 20, 1 << 30))
    with trace.open("w") as file:
        for number in range(400):
            shared, alone = 10 + number % 7, 4 + number % 5
            ids = [(number % 4) * 1000 + place for place in range(shared)] + [next(own) for _ in range(alone)]
            request = {"timestamp": number, "input_length": len(ids) * 512 + 100, "output_length": 300, "hash_ids": [*ids, next(own)]}
            file.write(json.dumps(request) + "\n")
    lengths, lines = tract.synthesized("A", trace)
    requests = [json.loads(line) for line in lines]
    assert len(requests) == 400
    assert sum(request["input_length"] for request in requests) / 400 == pytest.approx(lengths["input"][0])
    first = [request["hash_ids"][0] for request in requests]
    assert first == [(number % 4) * 1000 for number in range(400)]
