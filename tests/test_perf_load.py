# SPDX-License-Identifier: Apache-2.0
"""perf/load.py over a graph that is not one: the requests and their times, what a request's time is made of, and what ends it with 1."""

import contextlib
import hashlib
import json
import statistics
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import tidy

sys.path.insert(0, str(tidy.ROOT / "perf"))
import load  # noqa: E402
import load_runs  # noqa: E402
import openloop  # noqa: E402
import workload  # noqa: E402
from graph.client import Answer, RequestFailed  # noqa: E402

PATIENCE_S = 300
TOKENS = {"computed": "local_compute", "pulled": "external_kv_transfer"}
PAGE = {
    "requests": 'vllm:request_success_total{{finished_reason="stop"}} {}',
    "failed": 'vllm:request_success_total{{finished_reason="error"}} {}',
    "computed": 'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {}',
    "pulled": 'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {}',
    "first": "vllm:time_to_first_token_seconds_sum {}",
    "queue": "vllm:request_queue_time_seconds_sum {}",
    "prefill": "vllm:request_prefill_time_seconds_sum {}",
    "lookup": "vllm:kvbm_cxl_lookup_seconds_sum {}",
    "pull": "vllm:kvbm_cxl_pull_seconds_sum {}",
    "noticed": "vllm:kvbm_cxl_noticed_seconds_sum {}",
    "publish": "vllm:kvbm_cxl_publish_seconds_sum {}",
    "damaged": 'vllm:kvbm_cxl_pulled_blocks_total{{result="checksum"}} {}',
}
# What a request costs each worker, in seconds, and how long its client waits for the first token.
PREFILL = {"first": 0.5, "queue": 0.2, "prefill": 0.25, "lookup": 0.01, "pull": 0.03, "noticed": 0.01, "publish": 0.07}
DECODE = {"first": 0.1, "queue": 0.05, "prefill": 0.04, "lookup": 0.002, "pull": 0.02, "noticed": 0.005}
TTFT_S = 0.7
PARTS = {"wait": 0.2, "lookup": 0.01, "pull": 0.04, "compute": 0.25, "hand-over": 0.06, "decode": 0.04, "rest": 0.1}
BESIDE = {"queue": 0.2, "publish": 0.07, "decode's lookup": 0.002, "decode's pull": 0.025}


class Fake:
    """Counts as workers do. A prompt that it has met is pulled but for its last token."""

    workers = ("prefill-0", "decode-0")
    options = SimpleNamespace(slowness=1)

    def __init__(self, spoil=None):
        self.lock, self.spoil, self.asked, self.met = threading.Lock(), spoil, 0, set()
        self.counted = {name: Counter() for name in self.workers}

    def metrics(self, name):
        with self.lock:
            return "".join(line.format(self.counted[name][what]) + "\n" for what, line in PAGE.items())

    def ask(self, prompt, max_tokens):
        assert max_tokens == load.MAX_TOKENS
        with self.lock:
            self.asked += 1
            computed = 1 if tuple(prompt) in self.met else len(prompt)
            self.met.add(tuple(prompt))
            self.counted["prefill-0"].update({**PREFILL, "requests": 1, "computed": computed, "pulled": len(prompt) - computed})
            self.counted["decode-0"].update({**DECODE, "requests": 1, "pulled": len(prompt)})
            text = text_of(prompt)
            if self.spoil and self.asked > len(load.LENGTHS) * load.ALONE_EACH:
                text = self.spoil(self, text)
        return Answer(text, len(prompt), TTFT_S, TTFT_S + 0.1, "length")


def text_of(prompt):
    return hashlib.sha256(repr(prompt).encode()).hexdigest()


def other_text(fake, text):
    return text[::-1]


def no_answer(fake, text):
    raise RequestFailed(0, "the stream ended")


def counted(name, what):
    """One more of it, counted by a worker."""

    def spoil(fake, text):
        fake.counted[name][what] += 1
        return text

    return spoil


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the program over graphs that `spoil` what they do: its status, its last line, its complaint, its runs."""
    ratios = load_runs.ratios

    def run(spoil=None, requests=6):
        @contextlib.contextmanager
        def opened(connector, prompts):
            yield openloop.Asked(Fake(spoil), {tuple(prompt): text_of(prompt) for prompt in prompts}, load.MAX_TOKENS)

        monkeypatch.setattr(load, "opened", opened)
        # At these loads times are a part of a second.
        runs = []
        monkeypatch.setattr(load_runs, "ratios", lambda found: ratios(runs.extend(found) or found))
        status = load.main(["--requests", str(requests), "--rates", "60", "20", "40"])
        said = capsys.readouterr()
        last = said.out.rpartition("\n")[0].rpartition("\n")[2]
        return SimpleNamespace(status=status, last=last, complaint=said.err, runs=runs)

    return run


def test_every_load_has_the_same_requests_in_other_words():
    rates = (0.5, 1.0)
    half, whole = load.sweep(rates, 200, 8, seed=3)
    assert [len(prompt) for prompt in half.prompts] == [len(prompt) for prompt in whole.prompts]
    assert half.prompts == load.sweep(rates, 200, 8, seed=3)[0].prompts
    other = load.sweep(rates, 200, 8, seed=4)[0]
    assert {prompt[0] for prompt in half.prompts} != {prompt[0] for prompt in other.prompts} and half.times != other.times
    met = Counter(tuple(prompt[: load.BLOCK_TOKENS]) for prompt in half.prompts)
    assert not set(met) & {tuple(prompt[: load.BLOCK_TOKENS]) for prompt in whole.prompts}, "another load finds nothing of this one"
    often = [count for _, count in met.most_common()]
    assert len(often) == 8 and often[0] > 2 * often[3], "beginnings come by Zipf's law"
    assert {len(prompt) for prompt in half.prompts} == set(load.LENGTHS) and max(load.LENGTHS) <= 3000
    counts = Counter(len(prompt) for prompt in half.prompts)
    assert counts[800] > counts[1600] > counts[3000]
    first = half.prompts[0]
    same = next(prompt for prompt in half.prompts[1:] if prompt[: load.BLOCK_TOKENS] == first[: load.BLOCK_TOKENS])
    shared = next(at for at, (one, other) in enumerate(zip(first, same, strict=False)) if one != other)
    assert min(len(first), len(same)) * 0.6 < shared < min(len(first), len(same)) * 0.8


def test_a_load_is_a_part_of_what_prefill_takes():
    compute_s = {800: 0.1, 1600: 0.2, 3000: 0.4}
    half, whole = load.sweep((0.5, 1.0), 500, 8, seed=1)
    one, two = (each.times_s(compute_s) for each in (half, whole))
    assert one[0] == 0 and one == sorted(one) and one == pytest.approx([2 * at for at in two]), "the same times, twice as far apart"
    work_s = sum(compute_s[len(prompt)] for prompt in whole.prompts)
    assert work_s / two[-1] == pytest.approx(1, rel=0.15)
    gaps = [later - sooner for sooner, later in zip(two, two[1:], strict=False)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.15), "Poisson"


def test_prompts_of_table_1_are_those_of_earlier_records():
    assert text_of(workload.of_table_1(120, 12))[:16] == "5ca1802f6afb3637"


def test_requests_come_whether_others_were_answered_or_not():
    together, order = threading.Barrier(3), []

    def ask(prompt):
        order.append(prompt)
        together.wait(PATIENCE_S)
        return SimpleNamespace(ttft_s=1.0 + prompt, total_s=2.0)

    found = openloop.served(ask, [1, 2, 3], [0.0, 0.05, 0.1])
    assert order == [1, 2, 3] and [each.due_s for each in found] == [0.0, 0.05, 0.1]
    for prompt, each in zip((1, 2, 3), found, strict=True):
        assert each.late_s >= 0 and each.ttft_s == each.late_s + 1.0 + prompt, "being late is a part of it"
        assert each.ended_s == each.due_s + each.late_s + 2.0


def test_percentiles_are_values_that_were_met():
    values = [float(value) for value in range(60, 0, -1)]
    assert [openloop.percentile(values, percent) for percent in (50, 90, 99)] == [30, 54, 60]
    assert openloop.percentile([7.0], 50) == 7


def test_parts_add_up(run):
    done = run()
    assert done.status == 0 and done.complaint == ""
    assert len({(each.system, each.offered) for each in done.runs}) == len(done.runs) == 9
    for each in done.runs:
        assert sum(each.parts.values()) == pytest.approx(each.mean_s, abs=1e-5)
        late_s = each.mean_s - TTFT_S
        assert each.parts == pytest.approx(PARTS | {"rest": PARTS["rest"] + late_s}, abs=1e-5) and late_s >= 0
        assert each.beside == pytest.approx(BESIDE, abs=1e-5)
        assert len(each.ttft_s) == 6 and statistics.mean(each.ttft_s) == pytest.approx(each.mean_s, abs=1e-5)
        # The second time, the pool has every token but the last.
        assert (each.found_share > 0.99) == (each.system == load_runs.AGAIN)
    ratios = json.loads(done.last.removeprefix("RATIOS "))
    assert all(value > 0 for value in ratios.values())
    assert {"ttft_mean_ucx_over_pool_middle", "answered_ucx_over_again_highest"} <= set(ratios)


def seen(**counted):
    page = "".join(line.format(counted.get(what, 0)) + "\n" for what, line in PAGE.items())
    return openloop.Seen.of(page)


def test_more_time_than_passed_is_an_error_of_the_counting():
    prefill, decode = seen(**PREFILL), seen(**DECODE)
    parts, _ = load_runs.breakdown(prefill, decode, [0.6 - 0.02])
    assert parts["rest"] == pytest.approx(-0.02), "within the tolerance, and shown"
    with pytest.raises(openloop.Wrong, match="rest"):
        load_runs.breakdown(prefill, decode, [0.5])
    with pytest.raises(openloop.Wrong, match="wait"):
        load_runs.breakdown(seen(**{**PREFILL, "pull": 0.5}), decode, [0.7])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (other_text, "is not the answer"),
        (no_answer, "no answer: the stream ended"),
        (counted("prefill-0", "damaged"), "prefill-0 found"),
        (counted("decode-0", "damaged"), "decode-0 found"),
        (counted("prefill-0", "failed"), "requests failed"),
        (counted("decode-0", "computed"), "decode computed"),
    ],
)
def test_what_is_wrong_is_not_timed(run, spoil, complaint):
    done = run(spoil)
    assert done.status == 1 and complaint in done.complaint and not done.last.startswith("RATIOS") and not done.runs


def run_of(system, offered, seconds, compute_s=0.5):
    """A run of prompts of 800, 800 and 3000 tokens; the last of `seconds` is how long the longer one took."""
    requests = tuple(openloop.Served(float(number), 0.0, took, number + 10 * took) for number, took in enumerate(seconds))
    parts = {part: 0.25 for part in PARTS} | {"compute": compute_s}
    found = {"local_compute": 460, "external_kv_transfer": 4140, "local_cache_hit": 0}
    return load_runs.Run(system, offered, 1.0, (800, 800, 3000), requests, parts, BESIDE, found)


def test_ratios_say_which_is_faster():
    runs = []
    # What is slow at other loads is not what is to be told.
    for offered, times in ((0.3, 9.0), (0.7, 1.0), (0.9, 1.0), (2.0, 2.0)):
        runs.append(run_of(load_runs.POOL, offered, [times * each for each in (0.5, 1.0, 1.5)]))
        runs.append(run_of(load_runs.UCX, offered, [each * (times if offered != 0.9 else 100) for each in (2.0, 3.0, 7.0)], 1.0))
        runs.append(run_of(load_runs.AGAIN, offered, [times * each for each in (0.1, 0.1, 0.4)], 0.1))
    assert runs[0].found_share == pytest.approx(0.9) and runs[1].achieved_per_s == pytest.approx(3 / (2 + 10 * 63))
    found = load_runs.ratios(runs)
    assert found["ttft_mean_ucx_over_pool_middle"] == 4 and found["ttft_mean_first_over_again_middle"] == 5
    assert found["ttft_p99_ucx_over_pool_middle"] == pytest.approx(7 / 1.5, abs=1e-3) and found["ttft_mean_ucx_over_again_middle"] == 20
    assert found["answered_ucx_over_pool_middle"] == pytest.approx(72 / 17, abs=1e-3)
    assert found["answered_ucx_over_pool_highest"] == pytest.approx(142 / 32, abs=1e-3)
    assert found["ttft_800_ucx_over_again_middle"] == 25 and found["ttft_3000_ucx_over_again_middle"] == 17.5
    assert found["compute_ucx_over_pool_highest"] == 2
    assert found["moving_of_ttft_ucx_middle"] == pytest.approx(0.75 / 4, abs=1e-4)
    assert found["computing_of_ttft_again_highest"] == pytest.approx(0.35 / 0.4, abs=1e-4)


def test_the_first_graph_says_what_a_load_is(run, monkeypatch):
    times = iter([{length: 0.05 for length in load.LENGTHS}, {length: 5.0 for length in load.LENGTHS}])
    monkeypatch.setattr(load, "alone", lambda asked, prompts: next(times))
    done = run()
    assert done.status == 0
    asked = {each.offered_per_s for each in done.runs if each.offered == 60}
    assert len(asked) == 1 and asked.pop() > 60 / 0.05 / 10, "the same times for all"


def test_prompts_alone_have_to_be_computed(run, monkeypatch):
    monkeypatch.setattr(load, "ALONE_EACH", 1)
    with contextlib.ExitStack() as held:
        fake = Fake()
        prompts = [[1, 2, 3], [4, 5, 6, 7]]
        asked = openloop.Asked(fake, {tuple(prompt): text_of(prompt) for prompt in prompts}, load.MAX_TOKENS)
        assert load.alone(asked, prompts) == pytest.approx({3: PREFILL["prefill"], 4: PREFILL["prefill"]})
        held.enter_context(pytest.raises(openloop.Wrong, match="found in part"))
        load.alone(asked, prompts)


@pytest.mark.parametrize("arguments", [["--requests", "1"], ["--rates", "0"], ["--rates", "1", "1"], ["--families", "0"]])
def test_what_makes_no_sense_is_refused(arguments):
    with pytest.raises(SystemExit):
        load.main(arguments)
