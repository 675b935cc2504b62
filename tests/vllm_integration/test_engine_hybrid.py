# SPDX-License-Identifier: Apache-2.0
"""Whole engines of models with several KV cache groups when things go wrong: preemption, aborts, full pools and lost ones. One model
has sliding windows, the other recurrent states. Never wrong text.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path

import kvbm_cxl
import pytest
import tiny_models
from engines import engine, prompt
from kvbm_cxl.vllm_integration.saver import SaveJob
from vllm import SamplingParams

FAMILIES = ("gpt-oss", "granite4")
PROMPT = prompt(500, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, dict]:
    """Folder of a model, and what its engines take."""
    return tiny_models.make(request.param, tmp_path_factory.mktemp("models")), tiny_models.options(request.param)


@pytest.fixture(scope="module")
def text(family):
    """The answer of an engine without a connector."""
    model, options = family
    with engine(model, None, **_alone(options)) as plain:
        return plain.texts([PROMPT])[0]


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
    size = {"num_gpu_blocks_override": 24 if rounds else 40, "max_model_len": 1024 if rounds else 512}
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
        assert fresh.counted()["external_hits"] > 0


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

        side.loader.pull, side.start_loads = slow, lambda orders: start_loads(replace(orders, idle=False))
        free = _free_blocks(running)
        llm.add_request("aborted", PROMPT, SamplingParams(max_tokens=4, temperature=0))
        for _ in range(100):
            llm.step()
            if begun.wait(0.1):
                break
        assert begun.wait(60)
        llm.abort_request(["aborted"])
        for _ in range(3):
            llm.step()
        assert _free_blocks(running) < free, "blocks that are still written to are not given away"
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
        worker, waits = running.worker_side, threading.Thread(target=lambda: (begun.wait(60), time.sleep(0.2), go_on.set()))
        waits.start()
        ended = False
        while not ended:
            ended = any(output.finished for output in llm.step())
        assert _free_blocks(running) < free or worker.saver.saves._by_request.total() == 0
        _until(running, lambda: _free_blocks(running) == free)
        waits.join()
        assert worker.saver.saves._by_request.total() == 0
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts([PROMPT]) == [text]
        assert running.counted()["external_hits"] == running.scheduler_side.shape.reach(500, with_tail=False)


def test_a_full_pool_loses_nothing_but_hits(family, make_pool, text):
    """Room for some blocks only, of every group. Blocks are evicted in favour of new ones, and what is not there is computed."""
    model, options = family
    pool = make_pool(size="24M", cells="512K:75%")
    with engine(model, "kv_both", pool, **options) as running:
        asked = [prompt(500, 50 + each) for each in range(12)]
        expected = running.texts(asked)
        running.settle()
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts(asked) == expected
        counted = running.counted()
        assert 0 < counted["prompt_tokens/computed"], "some are there still, some are not"
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
                cache.publish(foreign, key, bytes((512 << 10) - 1))
            except kvbm_cxl.FullError:
                break
            taken.append(cache.pin_chain(foreign, [key]))
        with engine(model, "kv_both", pool, **options) as running:
            assert running.texts([PROMPT]) == [text]
            running.settle()
            counted = running.counted()
            assert counted["published_blocks/no_cell"] > 0 and "published_blocks/stored" not in counted
        for pins in taken:
            pins.release()


@pytest.mark.parametrize("how", ("truncated", "removed", "formatted"))
def test_a_pool_that_vanishes_under_the_engine(family, pool, text, how):
    model, options = family
    with engine(model, "kv_both", pool, **options) as running:
        assert running.texts([PROMPT]) == [text]
        running.settle()
        running.llm.reset_prefix_cache()
        if how == "truncated":
            with open(pool, "r+b") as file:
                file.truncate(0)
        elif how == "removed":
            Path(pool).unlink()
        else:
            kvbm_cxl.format_pool(pool, cells="512K:80%", evict_hosts=True)
        assert [running.texts([PROMPT])[0] for _ in range(2)] == [text, text]


def _until(running, done) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        running.llm.llm_engine.step()
