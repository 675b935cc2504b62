# SPDX-License-Identifier: Apache-2.0
"""What the tier tells vLLM (counters, events), and what it learns of its engine: weights that are replaced while it runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from kvbm_cxl.options import ConfigError
from peers import ROOT, until

pytest.importorskip("vllm", reason="vLLM is not installed: `make setup-serve`")
from kvbm_cxl.vllm_integration import tier as tier_module  # noqa: E402
from kvbm_cxl.vllm_integration import tier_engine  # noqa: E402
from kvbm_cxl.vllm_integration.tier_stats import TIER_COUNTERS, TIER_GAUGES, TIER_PREFIX  # noqa: E402
from subject_tier import Subject  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics  # noqa: E402
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingCounterMetadata  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402

NAMES = [f"chunk {number}" for number in range(8)]
PAGE = ROOT / "docs" / "operating" / "metrics.md"


@pytest.fixture
def closing():
    made = []
    yield lambda subject: made.append(subject) or subject
    for subject in made:
        subject.close()


def test_what_is_counted_is_what_vllm_was_told_to_expect(pool, closing):
    subject = closing(Subject(pool))
    subject.store(NAMES[:4])
    assert subject.load(NAMES[:4] + ["none"]) == [True] * 4 + [False]
    subject.store(NAMES[:5])
    stats = subject.manager.get_stats()
    assert subject.counts("stored_chunks") == {"stored": 5, "exists": 4}
    assert subject.counts("loaded_chunks") == {"hit": 4} and subject.counts("looked_up_chunks")["hit"] == 4
    assert subject.counts("pool_is_open") == {"": 1}
    told = stats.reduce()
    by_vllm = {name: told[f"vllm:kv_offload_tiering_{name}:('1:cxl',)"] for name in ("write_bytes", "read_bytes", "chunk_hits")}
    assert by_vllm == {"write_bytes": 9 * subject.row_bytes, "read_bytes": 4 * subject.row_bytes, "chunk_hits": 4}
    definitions = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [{"type": "cxl"}]})
    for name in TIER_COUNTERS:
        assert isinstance(definitions[TIER_PREFIX + name], OffloadingCounterMetadata)
        assert definitions[TIER_PREFIX + name].labelnames == (TIER_COUNTERS[name][0],)
    assert {TIER_PREFIX + name for name in TIER_GAUGES} <= set(definitions)
    # Nothing is told twice.
    assert subject.tier.get_stats().reduce() == {TIER_PREFIX + "pool_is_open": 1}


def test_vllm_shows_the_counters_to_prometheus(pool, closing):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    subject = closing(Subject(pool))
    subject.begin_store(NAMES)
    subject.settle()
    registry = CollectorRegistry()

    def of(kind):
        return lambda **named: kind(registry=registry, **named)

    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "cxl"}]}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    metrics = OffloadPromMetrics.__new__(OffloadPromMetrics)
    metrics._counter_cls, metrics._gauge_cls, metrics._histogram_cls = of(Counter), of(Gauge), of(Histogram)
    OffloadPromMetrics.__init__(metrics, config, {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)}, ["engine"], {0: ["0"]})
    metrics.observe(subject.tier.get_stats().data)
    text = generate_latest(registry).decode()
    assert 'vllm:kvbm_cxl_tier_stored_chunks_total{engine="0",outcome="stored"} 8.0' in text
    assert 'vllm:kvbm_cxl_tier_pool_is_open{engine="0"} 1.0' in text


def test_the_page_has_every_metric():
    rows = [
        f"- `{TIER_PREFIX}{name}_total{{{label}}}` ({', '.join(values)}): {text}"
        for name, (label, values, text) in TIER_COUNTERS.items()
    ]
    rows += [f"- `{TIER_PREFIX}{name}`: {text}" for name, text in TIER_GAUGES.items()]
    section = PAGE.read_text().replace("\n  ", " ").partition("## What the tier counts")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("- `")] == rows, "it has to hold\n" + "\n".join(rows)


def test_events_tell_of_what_was_stored_here_and_of_its_evictions(make_pool, closing):
    pool = make_pool(size="16M", cells="32K:50%")
    options = {"enable_kv_events": True, "locality": "REMOTE"}
    subject = closing(Subject(pool, events=True, options=options))
    other = closing(Subject(pool))
    other.store(["of another engine"])
    names = [f"many {number}" for number in range(600)]
    subject.store(["of another engine"])
    subject.store(names)
    stored, removed = [], []

    def take():
        for event in subject.tier.take_events():
            assert (event.medium, event.locality, event.ownership) == (Medium.STORAGE, Locality.REMOTE, "cxl")
            (removed if event.removed else stored).extend(event.keys)

    def is_told():
        take()
        there = {subject.key(name) for name, is_there in zip(names, subject.found(names)) if is_there}
        return set(stored) - set(removed) == there

    until(is_told, "the evictions to be told")
    assert stored == [subject.key(name) for name in names] and len(removed) == len(set(removed)) > 0
    # Only where vLLM publishes events at all, and only where it is asked to.
    assert not list(other.tier.take_events())
    silent = closing(Subject(pool, options=options))
    silent.store(["x"])
    assert not list(silent.tier.take_events())


class Workers:
    """An executor whose workers have the weights that a test says."""

    def __init__(self):
        self.weights, self.calls = [b"of the start"] * 2, []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)
        if method is tier_engine._fingerprint:
            return list(self.weights)
        if method is tier_engine._backends:
            return ["backend"] * 2


class Resets:
    def reset_prefix_cache(self):
        return True


@pytest.fixture
def engine(monkeypatch):
    core = SimpleNamespace(model_executor=Workers(), scheduler=SimpleNamespace(kv_cache_manager=Resets()))
    config = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(revision=None))
    made = tier_engine.Engine(config, None, core)
    monkeypatch.setattr(tier_engine.Engine, "fields", lambda self: {"of the engine": 1})
    monkeypatch.setattr(tier_engine, "engine_of_this_call", lambda: made)
    return made


def test_weights_that_are_replaced_make_it_rest_until_all_is_reset(pool, engine, closing):
    workers = engine.core.model_executor
    subject = closing(Subject(pool))
    assert subject.store(NAMES[:4]) == {"stored": 4}
    start = subject.tier._namespace

    def reset():
        """As vLLM resets: its prefix cache first, then the tiers."""
        assert engine.core.scheduler.kv_cache_manager.reset_prefix_cache()
        subject.forget()

    workers.collective_rpc("wake_up")
    assert subject.found(NAMES[:4]) == [True] * 4, "a call that changed nothing"
    assert workers.calls.count(tier_engine._fingerprint) == 2
    workers.weights = [b"of the start", b"others"]
    workers.collective_rpc("reload_weights")
    assert subject.found(NAMES[:4]) == [False] * 4 and subject.store(["a"]) == {"weights": 1}
    # The primary tier alone: the prefix cache has blocks of the earlier weights, on which new ones are built.
    subject.forget()
    assert subject.store(["b"]) == {"weights": 1}
    reset()
    assert subject.tier._namespace != start and subject.store(["a", "b"]) == {"stored": 2}
    assert subject.found(NAMES[:4]) == [False] * 4 and subject.load(["a", "b"]) == [True] * 2
    # Back to those of the start: its chunks are there.
    workers.weights = [b"of the start"] * 2
    workers.collective_rpc("update_weights")
    reset()
    assert subject.tier._namespace == start and subject.load(NAMES[:4]) == [True] * 4 and subject.found(["a"]) == [False]
    # Weights that cannot be looked at, once anything may have changed them.
    workers.weights = [b"of the start", b""]
    workers.collective_rpc(lambda worker: None)
    reset()
    assert subject.found(NAMES[:4]) == [False] * 4 and subject.store(["c"]) == {"weights": 1}


def test_harmless_calls_ask_the_workers_nothing(pool, engine, closing):
    subject = closing(Subject(pool))
    asked = list(engine.core.model_executor.calls)
    engine.core.model_executor.collective_rpc("execute_model")
    subject.store(NAMES)
    assert engine.core.model_executor.calls == [*asked, "execute_model"]


def test_engines_with_adapters_say_that_names_stand_for_contents(pool, engine, closing):
    engine.vllm_config.lora_config = SimpleNamespace()
    with pytest.raises(ConfigError, match="adapters_by_name"):
        Subject(pool)
    closing(Subject(pool, options={"adapters_by_name": True}))


def test_what_the_engine_says_is_in_the_namespace(pool, engine, closing, monkeypatch):
    first = closing(Subject(pool))
    monkeypatch.setattr(tier_engine.Engine, "fields", lambda self: {"of the engine": 2})
    second = closing(Subject(pool))
    assert first.store(NAMES) == {"stored": 8} and second.found(NAMES) == [False] * 8


def test_the_package_makes_the_tier_known_to_vllm():
    """By the entry point that vLLM asks; a second time changes nothing."""
    import tomllib

    from kvbm_cxl.vllm_integration import register
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    declared = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert declared == {"kvbm_cxl": "kvbm_cxl.vllm_integration:register"}
    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "cxl"}) is tier_module.CxlTier
    assert Path(tier_module.__file__).is_relative_to(ROOT) or "site-packages" in tier_module.__file__
