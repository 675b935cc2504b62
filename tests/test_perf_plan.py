# SPDX-License-Identifier: Apache-2.0
"""perf/costs.py: costs that made times are found again from the times, and prompts become requests of a trace."""

import importlib.util
import json
import random
import sys

import pytest
import tidy

sys.path.insert(0, str(tidy.ROOT / "perf"))
pytest.importorskip("numpy")
SPEC = importlib.util.spec_from_file_location("perf_costs", tidy.ROOT / "perf" / "costs.py")
costs = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = costs
SPEC.loader.exec_module(costs)

MOVED = costs.Moved(pulled_bytes=10**9, pulled_s=0.1, published_bytes=10**9, published_s=0.5, noticed_s=0.3, loads=100)
SHAPES = [(0, 200), (0, 800), (0, 1600), (0, 3000), (512, 200), (1024, 300), (2048, 200)]


def singles(fixed_s=0.009, token_s=1e-4, attention=3000, overhead_s=0.03, noise=0.0):
    """Requests whose times the planner's formula gives."""
    choose = random.Random(1)
    made = []
    for cached, computed in SHAPES:
        dearer = 1 + (cached + computed / 2) / attention if attention else 1
        prefill_s = (fixed_s + computed * token_s * dearer) * (1 + noise * choose.uniform(-1, 1))
        made.append(costs.Single(cached, computed, prefill_s, 0.002, prefill_s + 0.002 + overhead_s))
    return made


def test_costs_are_found_again():
    found = costs.costs(singles(), MOVED)
    assert found["model.fixed_ms"] == pytest.approx(9) and found["model.prefill_tokens_per_s"] == pytest.approx(1e4)
    assert found["model.attention_tokens"] == pytest.approx(3000) and found["model.overhead_ms"] == pytest.approx(30)
    assert (found["device.read_gb_s"], found["device.write_gb_s"], found["device.device_gb_s"]) == (10, 2, 10)
    assert found["device.latency_ns"] == pytest.approx(3e6)
    noisy = costs.costs(singles(noise=0.05), MOVED)
    assert noisy["model.prefill_tokens_per_s"] == pytest.approx(1e4, rel=0.3)


def test_no_cost_is_below_nothing():
    found = costs.prefill_costs(singles(attention=0))
    assert found["model.attention_tokens"] == 0 or found["model.attention_tokens"] > 1e6, "no context, or none to speak of, is dearer"
    cheaper = [costs.Single(0, computed, 0.01 + computed**0.8 * 1e-4, 0, 1) for computed in (200, 800, 1600, 3000)]
    assert costs.prefill_costs(cheaper)["model.attention_tokens"] == 0
    with pytest.raises(ValueError, match="does not grow"):
        costs.prefill_costs([costs.Single(0, computed, 1 / computed, 0, 1) for computed in (200, 800, 1600, 3000)])


@pytest.mark.parametrize("change", [{"pulled_s": 0}, {"published_s": 0}, {"loads": 0}])
def test_too_little_tells_nothing(change):
    with pytest.raises(ValueError, match="tell no costs"):
        costs.costs(singles(), costs.Moved(**{**vars(MOVED), **change}))
    with pytest.raises(ValueError, match="tell no costs"):
        costs.costs(singles()[:3], MOVED)


def test_prompts_share_the_blocks_that_begin_alike(tmp_path):
    first = list(range(300))
    second = first[:256] + [7] * 50
    third = [9] + first[1:]
    one, two, other = (costs.ids(prompt, 128) for prompt in (first, second, third))
    assert len(one) == len(two) == 3 and one[:2] == two[:2] and one[2] != two[2]
    assert not set(one) & set(other), "an id says what is in front of its block too"
    costs.write_trace(tmp_path / "trace", [first, second], [0.0, 1.2345], 4, 128)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert lines[1] == {"timestamp": 1234, "input_length": 306, "output_length": 4, "hash_ids": two}
