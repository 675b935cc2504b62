# SPDX-License-Identifier: Apache-2.0
"""Counters: from a thread that counts to a line for Prometheus."""

import re
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from kvbm_cxl.vllm_integration.stats import COUNTERS, PREFIX, CxlPromMetrics, CxlStats, Tally
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


def _tally() -> Tally:
    tally = Tally()
    tally.count("pulled_blocks", "hit", 3)
    tally.count("pulled_blocks", "checksum")
    tally.count("pulled_blocks", "hit")
    tally.count("bytes", "pulled", 0)
    tally.gauge("pinned_blocks", 5)
    tally.time("pull_seconds", 0.25)
    tally.time("pull_seconds", 0.75)
    return tally


def test_what_was_counted_is_taken_once():
    tally = _tally()
    taken = tally.take()
    assert taken.data == {
        "counters": {"pulled_blocks/hit": 4, "pulled_blocks/checksum": 1},
        "gauges": {"pinned_blocks": 5},
        "times": {"pull_seconds": [0.25, 0.75]},
    }
    assert tally.take() is None


def test_stats_survive_the_way_to_the_front_end_and_add_up():
    first = CxlStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(_tally().take().to_dict())))
    total = CxlStats().aggregate(first).aggregate(_tally().take())
    assert total.data["counters"]["pulled_blocks/hit"] == 8 and not total.is_empty()
    assert total.reduce() == {
        "pulled_blocks/hit": 8,
        "pulled_blocks/checksum": 2,
        "pinned_blocks": 5,
        "pull_seconds_count": 4,
        "pull_seconds_mean": 0.5,
        "pull_seconds_max": 0.75,
    }
    total.reset()
    assert total.is_empty() and total.reduce() == {}
    assert CxlStats().is_empty(), "each has data of its own"


@pytest.fixture
def registry():
    """Of its own: an engine of another test in this process has the same names in prometheus_client's."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    config = SimpleNamespace(kv_transfer_config=None)
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return CxlPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_prometheus_shows_them_by_engine(metrics, registry):
    tally = _tally()
    tally.gauge("pool_info", 1, "of-this-rack")
    metrics.observe(tally.take().data, 1)
    text = generate_latest(registry).decode()
    assert 'vllm:kvbm_cxl_pulled_blocks_total{engine="1",model_name="m",result="hit"} 4.0' in text
    assert 'vllm:kvbm_cxl_pulled_blocks_total{engine="0",model_name="m",result="hit"} 0.0' in text, "what did not happen is 0, not missing"
    assert 'vllm:kvbm_cxl_pinned_blocks{engine="1",model_name="m"} 5.0' in text
    assert 'vllm:kvbm_cxl_pool_info{engine="1",model_name="m",pool="of-this-rack"} 1.0' in text
    assert 'vllm:kvbm_cxl_pull_seconds_sum{engine="1",model_name="m"} 1.0' in text
    assert 'vllm:kvbm_cxl_pull_seconds_bucket{engine="1",le="0.5",model_name="m"} 1.0' in text
    shown = {name for name in re.findall(r"^# TYPE (\S+)", text, re.M) if "kvbm" in name}
    assert all(name.startswith(PREFIX) for name in shown) and len(shown) >= len(COUNTERS)


def test_names_of_a_newer_worker_are_skipped(metrics, registry):
    before = generate_latest(registry)
    metrics.observe({"counters": {"unknown/x": 1}, "gauges": {"unknown": 2}, "times": {"unknown": [1.0]}}, 0)
    assert generate_latest(registry) == before
    metrics.observe({"counters": {"unknown/x": 1, "loads/failed": 3}, "gauges": {}, "times": {}}, 0)
    assert 'vllm:kvbm_cxl_loads_total{engine="0",model_name="m",result="failed"} 3.0' in generate_latest(registry).decode()
