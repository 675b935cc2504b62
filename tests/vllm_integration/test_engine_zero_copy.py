# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose KV cache lies in the pool: blocks are lent instead of copied, and taken back before the engine writes to them."""

import time

import kvbm_cxl
import pytest
import torch
from engine_process import EngineProcess
from engines import BLOCK_BYTES, BLOCK_TOKENS, engine, prompt
from kvbm_cxl.vllm_integration.config import ConfigError
from vllm import SamplingParams

LENGTHS = (128, 129, 256, 1000)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
FULL_BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)
TAILS = sum(length % BLOCK_TOKENS > 0 for length in LENGTHS)
TOKENS = sum(LENGTHS)
ZERO_COPY = {"zero_copy": True}


@pytest.fixture(scope="module")
def texts(model):
    """Answers of an engine without a connector."""
    with engine(model, None) as plain:
        return plain.texts(PROMPTS)


@pytest.fixture
def pool(make_pool, request) -> str:
    """Room for KV caches, small cells for references, and some large ones for tails. Its metadata may lie on another device."""
    return make_pool(size="256M", cells="256:1%,512K:10%", metadata=getattr(request, "param", ""))


@pytest.mark.parametrize(
    "extra, pool",
    (({}, ""), (ZERO_COPY, ""), (ZERO_COPY, "64M")),
    ids=("into-memory", "into-the-pool", "metadata-elsewhere"),
    indirect=["pool"],
)
def test_decode_pulls_every_token_from_where_prefill_computed_it(model, pool, texts, extra):
    with EngineProcess(model, "kv_producer", pool, max_num_batched_tokens=384, extra=ZERO_COPY) as prefill:
        prefill("texts", PROMPTS, max_tokens=1)
        counted = prefill("counted")
        assert counted["published_blocks/lent"] == FULL_BLOCKS and counted["published_blocks/stored"] == TAILS
        assert counted["bytes/published"] == TAILS * BLOCK_BYTES
        with engine(model, "kv_consumer", pool, extra=extra) as decode:
            assert decode.texts(PROMPTS) == texts
            counted = decode.counted()
            assert counted["prompt_tokens/pulled"] == counted["external_hits"] == TOKENS
            assert counted["pulled_blocks/hit"] == FULL_BLOCKS + TAILS


class Audit:
    """Looks at every byte of an engine's KV cache before and after every step: what changed has to be what its worker was told to take
    back, or the target of a load."""

    def __init__(self, running) -> None:
        runner = running.core.model_executor.driver_worker.worker.model_runner
        self.layers = [layer.view(torch.int32).flatten(1) for layer in runner.kv_caches]
        self.before = [layer.clone() for layer in self.layers]
        self.told: set[int] = set()
        self.loading: dict[str, set[int]] = {}
        self.written, self.loads, self.wrong = 0, 0, []
        side = running.worker_side
        before_overwrite, ended = side.before_overwrite, side.ended

        def begins(orders) -> None:
            self.look()
            self.told = set(orders.writes)
            self.loading.update({load.request_id: set(load.block_ids) for load in orders.loads})
            self.loads += len(orders.loads)
            before_overwrite(orders)

        def ends(finished):
            saved, loaded = ended(finished)
            self.look()
            for request_id in loaded:
                self.loading.pop(request_id)
            return saved, loaded

        side.before_overwrite, side.ended = begins, ends

    def look(self) -> None:
        changed: set[int] = set()
        for number, layer in enumerate(self.layers):
            now = layer.clone()
            changed.update((now != self.before[number]).any(dim=1).nonzero().flatten().tolist())
            self.before[number] = now
        self.written += len(changed)
        if surplus := changed - self.told.union(*self.loading.values()):
            self.wrong.append(sorted(surplus))


def test_an_engine_writes_to_no_block_that_it_has_not_taken_back(model, pool):
    """Chunked prefill, decode, loads, preemption, aborts, requests that share a prefix and some that the connector leaves alone, in a KV
    cache that is too small for them."""
    shared = prompt(256, 40)["prompt_token_ids"]
    asked = [prompt(length, 20 + length) for length in (500, 70, 300, 129, 385, 640)]
    asked += [{"prompt_token_ids": shared + prompt(90, 41 + each)["prompt_token_ids"]} for each in range(3)]
    with engine(model, "kv_both", pool) as plain:
        expected = plain.texts(asked, max_tokens=150)
        plain.settle()
    options = {"blocks": 16, "max_num_batched_tokens": 256, "max_num_seqs": 6, "policy": "recompute", "extra": ZERO_COPY}
    with engine(model, "kv_both", pool, max_model_len=1024, **options) as running:
        audit = Audit(running)
        # First with the other engine's blocks to load, then without, then again with those that it lends itself.
        for namespace in (None, *running.scheduler_side.namespaces, None):
            if namespace is not None:
                running.scheduler_side.access.call(lambda cache: cache.clear(namespace))
            running.llm.reset_prefix_cache()
            assert running.texts(asked, max_tokens=150) == expected
        llm = running.llm.llm_engine
        for name, length in (("short", 600), ("long", 900), ("logprobs", 300)):
            sampling = {"prompt_logprobs": 1} if name == "logprobs" else {}
            llm.add_request(name, prompt(length, length), SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, **sampling))
        for step in range(300):
            if step == 3:
                llm.abort_request(["long"])
            llm.step()
            if not llm.has_unfinished_requests():
                break
        audit.look()
        counted = running.counted()
    assert audit.wrong == []
    assert audit.written > 300 and audit.loads > 5 and counted["taken_back_blocks/written"] > 20 and counted["preemptions"] > 0
    assert counted["published_blocks/lent"] > 50


def test_what_is_lent_may_go_at_any_time_and_texts_stay_right(model, pool):
    """Prefill reuses its blocks all the while, without checksums that would notice it."""
    asked = [prompt(300 + 40 * each, 60 + each) for each in range(8)]
    with engine(model, None) as plain:
        expected = plain.texts(asked)
    bare = {"checksums": False}
    with EngineProcess(model, "kv_producer", pool, blocks=20, max_model_len=2048, extra={**ZERO_COPY, **bare}) as prefill:
        with engine(model, "kv_consumer", pool, extra=bare) as decode:
            hits = lost = rounds = 0
            while rounds < 6 or not hits or not lost:
                assert rounds < 60, (hits, lost)
                first = rounds % len(asked)
                order = asked[first:] + asked[:first]
                prefill.start("texts", order, max_tokens=1)
                assert decode.texts(asked) == expected
                prefill.answer()
                assert decode.texts(asked) == expected
                decode.settle()
                counted = decode.counted()
                hits, rounds = hits + counted.get("pulled_blocks/hit", 0), rounds + 1
                decode.llm.reset_prefix_cache()
                lost += prefill("counted").get("taken_back_blocks/written", 0)
            assert decode.scheduler_side.access.call(lambda cache: cache.pinned()) == 0


def test_what_a_killed_engine_lent_is_right_until_the_next_one_has_its_memory(model, make_pool, texts):
    """The pool has room for one KV cache, so that the second engine needs the memory of the first."""
    pool = make_pool(size="96M", cells="256:1%,512K:30%")
    with EngineProcess(model, "kv_producer", pool, blocks=64, extra=ZERO_COPY) as prefill:
        prefill("texts", PROMPTS, max_tokens=1)
        prefill.kill()
    with engine(model, "kv_consumer", pool) as decode:
        assert decode.texts(PROMPTS) == texts
        assert decode.counted()["external_hits"] == TOKENS
    with engine(model, "kv_both", pool, extra=ZERO_COPY) as second:
        # What is left of the first engine's blocks are references to nothing: each fails one load, and then is evicted.
        failed, deadline = 1, time.monotonic() + 240
        while failed:
            assert time.monotonic() < deadline
            second.llm.reset_prefix_cache()
            assert second.texts(PROMPTS) == texts
            second.settle()
            counted = second.counted()
            failed = counted.get("pulled_blocks/taken_back", 0)
        assert second.worker_side._placement.regions[0].lent() >= FULL_BLOCKS


def test_an_engine_ends_with_the_pool_that_has_its_kv_cache(model, pool):
    """A format gives the memory of a pool to others. Then this engine has no KV cache any more, and no answer but that."""
    with engine(model, "kv_both", pool, extra=ZERO_COPY) as running:
        running.texts([PROMPTS[0]])
        kvbm_cxl.format_pool(pool, cells="256:1%,512K:10%", evict_hosts=True)
        with pytest.raises(kvbm_cxl.CxlError, match="is lost, and with it the KV cache"):
            for seed in range(100, 120):
                running.texts([prompt(300, seed)])


def test_requests_that_lose_a_block_are_computed_not_failed(model, pool):
    with pytest.raises((ConfigError, RuntimeError), match="kv_load_failure_policy.*recompute"):
        with engine(model, "kv_both", pool, policy="fail", extra=ZERO_COPY):
            pass
