# SPDX-License-Identifier: Apache-2.0
"""Whole engines when things go wrong: preemption, aborts, full pools and lost ones. One model has one KV cache group, one sliding windows
beside it, one recurrent states. Never wrong text."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import kvbm_cxl
import pytest
import tiny_models
from engines import BLOCK_BYTES, engine, prompt
from kvbm_cxl.vllm_integration.saver import SaveJob
from vllm import SamplingParams

FAMILIES = ("plain", "gpt-oss", "granite4")
PROMPT, OTHER = prompt(500, 1), prompt(400, 77)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, model, tmp_path_factory) -> tuple[str, dict]:
    """Folder of a model, and what its engines take: nothing for the plain one."""
    if request.param == "plain":
        return model, {}
    return tiny_models.make(request.param, tmp_path_factory.mktemp("models")), tiny_models.options(request.param)


@pytest.fixture(scope="module")
def texts(family):
    """The answers of an engine without a connector to PROMPT and OTHER."""
    model, options = family
    with engine(model, None, **_alone(options)) as alone:
        return [alone.texts([asked])[0] for asked in (PROMPT, OTHER)]


@pytest.fixture
def text(texts):
    return texts[0]


@pytest.fixture
def pool(make_pool) -> str:
    return make_pool(size="96M", cells="512K:80%")


def _alone(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "extra"}


def _nothing_left(running) -> None:
    running.settle()
    assert running.scheduler_side.access.call(lambda cache: cache.pinned()) == running.scheduler_side.lookups.pinned == 0
    assert not running.scheduler_side._tracked


def _free_blocks(running) -> int:
    return running.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_preempted_requests_keep_their_text(family, pool):
    """Too few blocks for all requests to grow: some are preempted, with saves under way, and come back by way of the pool.

    In bfloat16 vLLM by itself says something else once it computes as a prompt what it has generated, as it does after a preemption, with
    and without a pool. There the text up to the preemption is compared.
    """
    model, options = family
    rounds = options.get("dtype") == "bfloat16"
    # Blocks of a model with states have hundreds of tokens.
    length, answer = 800 if rounds else 250, 140
    asked = [prompt(length, 200 + each) for each in range(4)]
    with engine(model, None, **_alone(options)) as roomy:
        expected = roomy.texts(asked, max_tokens=answer)
        if rounds:
            half = [{"prompt_token_ids": [*one["prompt_token_ids"], *text[:70]]} for one, text in zip(asked, expected)]
            assert roomy.texts(half, max_tokens=70) != [text[70:] for text in expected], "vLLM can do it now: compare the whole text"
    blocks, most = (24, 1024) if rounds else (40, 512) if options else (12, 1024)
    size = {"num_gpu_blocks_override": blocks, "max_model_len": most}
    with engine(model, "kv_both", pool, **size, **options) as tight:
        generated, step = [answer] * len(asked), tight.scheduler_side.step

        def watched(output):
            for request_id in output.preempted_req_ids or ():
                number = int(request_id.partition("-")[0])
                generated[number] = min(generated[number], tight.scheduler_side._tracked[request_id].request.num_output_tokens)
            return step(output)

        tight.scheduler_side.step = watched
        texts = tight.texts(asked, max_tokens=answer)
        assert min(generated) < answer, "the test is about preemption"
        for text, right, until in zip(texts, expected, generated if rounds else [answer] * len(asked), strict=True):
            assert len(text) == answer and text[:until] == right[:until]
        assert tight.counted().get("preemptions", 0) > 0
        _nothing_left(tight)
    with engine(model, "kv_both", pool, **options) as fresh:
        texts = fresh.texts(asked, max_tokens=answer)
        assert rounds or texts == expected
        hits = fresh.counted()["external_hits"]
        assert hits > 0 if options else hits == 4 * 128


def test_a_request_aborted_while_it_is_loaded(family, pool, text):
    model, options = family
    with engine(model, "kv_both", pool, **options) as running:
        running.texts([PROMPT])
        running.settle()
        running.llm.reset_prefix_cache()
        side, llm = running.worker_side, running.llm.llm_engine
        begun, go_on = threading.Event(), threading.Event()
        pull, start_loads = side.loader.pull, side.start_loads

        def slow(*arguments):
            begun.set()
            assert go_on.wait(60)
            return pull(*arguments)

        # A step that computes nothing loads on the engine's own thread: nothing could be aborted meanwhile.
        side.loader.pull, side.start_loads = slow, lambda orders: start_loads(replace(orders, idle=False))
        free = _free_blocks(running)
        llm.add_request("aborted", PROMPT, SamplingParams(max_tokens=4, temperature=0))
        for _ in range(100):  # After a reset, a step passes until it is known which weights there are.
            llm.step()
            if begun.wait(0.1):
                break
        assert begun.wait(60)
        llm.abort_request(["aborted"])
        for _ in range(3):
            llm.step()
        held = free - _free_blocks(running)
        assert held > 0 if options else held == 3, "blocks that are still written to are not given away"
        go_on.set()
        side.loader.pull = pull
        _until(running, lambda: _free_blocks(running) == free)
        _nothing_left(running)
        assert running.texts([PROMPT]) == [text]


def test_a_request_that_ends_while_it_is_saved(family, pool, text, monkeypatch):
    """Its blocks are kept until the copy is over, although vLLM is done with them."""
    model, options = family
    with engine(model, "kv_both", pool, **options) as running:
        llm = running.llm.llm_engine
        begun, go_on, run = threading.Event(), threading.Event(), SaveJob.run

        def slow(job):
            begun.set()
            assert go_on.wait(60)
            run(job)

        monkeypatch.setattr(SaveJob, "run", slow)
        free = _free_blocks(running)
        llm.add_request("short", PROMPT, SamplingParams(max_tokens=2, temperature=0))
        saves, waits = running.worker_side.saver.saves, threading.Thread(target=lambda: (begun.wait(60), time.sleep(0.2), go_on.set()))
        if options:  # A step of a prompt waits for the states of the step before it.
            waits.start()
        while not any(output.finished for output in llm.step()):
            pass
        if options:
            assert _free_blocks(running) < free or saves._by_request.total() == 0
        else:
            assert begun.wait(60) and free - _free_blocks(running) == 4
            waits.start()
        _until(running, lambda: _free_blocks(running) == free)
        waits.join()
        assert saves._by_request.total() == 0
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts([PROMPT]) == [text]
        assert running.counted()["external_hits"] == running.scheduler_side.shape.reach(500, with_tail=False)


def test_a_full_pool_loses_nothing_but_hits(family, make_pool, text):
    """Room for some blocks only, of every group. Blocks are evicted in favour of new ones, and what is not there is computed."""
    model, options = family
    pool = make_pool(size="24M", cells="512K:75%")
    with engine(model, "kv_both", pool, **options) as running:
        asked = [prompt(500, 50 + each) for each in range(16)]
        expected = running.texts(asked)
        running.settle()
        counted = running.counted()
        assert sum(value for name, value in counted.items() if name.startswith("published_blocks/")) >= 48
        running.llm.reset_prefix_cache()
        assert running.texts(asked) == expected
        computed = running.counted()["prompt_tokens/computed"]
        assert computed > 0 if options else 16 * 116 < computed < 16 * 500, "some are there still, some are not"
        assert running.texts([PROMPT]) == [text]
        _nothing_left(running)


def test_a_pool_without_room_for_one_more_block(family, make_pool, text):
    """Every cell is pinned: publishing is refused and counted, serving goes on."""
    model, options = family
    pool = make_pool(size="24M", cells="512K:75%")
    with kvbm_cxl.Pool(pool) as other, other.cache() as cache:
        foreign = kvbm_cxl.Namespace(
            model="other", dtype="u8", layer_count=1, kv_head_count=1, head_size=1, block_tokens=1, layout="none"
        )
        taken = []
        while True:
            key = kvbm_cxl.chain_key(None, [len(taken)])
            try:
                cache.publish(foreign, key, bytes(BLOCK_BYTES - 1))
            except kvbm_cxl.FullError:
                break
            taken.append(cache.pin_chain(foreign, [key]))
        assert len(taken) > 8
        with engine(model, "kv_both", pool, **options) as running:
            assert running.texts([PROMPT]) == [text]
            running.settle()
            counted = running.counted()
            refused = counted["published_blocks/no_cell"]
            assert (refused > 0 if options else refused == 3) and "published_blocks/stored" not in counted
        for pins in taken:
            pins.release()


@pytest.mark.parametrize("how", ("truncated", "removed", "formatted"))
def test_a_pool_that_vanishes_under_the_engine(family, pool, texts, how):
    model, options = family
    with engine(model, "kv_both", pool, **options) as running:
        assert running.texts([PROMPT]) == texts[:1]
        running.settle()
        running.llm.reset_prefix_cache()
        if how == "truncated":
            with open(pool, "r+b") as file:
                file.truncate(0)
        elif how == "removed":
            Path(pool).unlink()
        else:
            kvbm_cxl.format_pool(pool, cells="512K:80%", evict_hosts=True)
        running.counted()
        assert [running.texts([asked])[0] for asked in (PROMPT, PROMPT, OTHER)] == [texts[0], *texts]
        running.settle()
        counted = running.counted()
        if how == "truncated":
            assert counted["lookups/error"] >= 1 and any(name.startswith("published_blocks/") for name in counted)


def _until(running, done) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        running.llm.llm_engine.step()
