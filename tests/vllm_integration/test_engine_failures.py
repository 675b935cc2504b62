# SPDX-License-Identifier: Apache-2.0
"""Whole engines when things go wrong: damaged blocks, a full pool, a pool that vanishes, requests that end early. Never wrong text."""

import threading
from dataclasses import replace
from pathlib import Path

import kvbm_cxl
import pytest
from engines import BLOCK_BYTES, engine, flip_bytes, prompt
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.saver import SaveJob
from vllm import SamplingParams

PROMPT = prompt(500, 1)


@pytest.fixture(scope="module")
def text(model):
    """The answer of an engine without a connector."""
    with engine(model, None) as plain:
        return plain.texts([PROMPT])[0]


def _payload(running, key: bytes) -> bytes:
    side, into = running.scheduler_side, bytearray(BLOCK_BYTES)
    assert side.access.call(lambda cache: cache.pull(side.namespaces[0], key, into))
    return bytes(into)


@pytest.mark.parametrize("damaged", (0, 2, 3), ids=("first", "middle", "tail"))
@pytest.mark.parametrize("policy", ("recompute", "fail"))
def test_a_flipped_byte_is_never_served(model, pool, text, policy, damaged):
    with engine(model, "kv_both", pool, policy=policy) as running:
        (handed_over,) = running.handed_over([PROMPT])
        running.settle()
        running.llm.reset_prefix_cache()
        flip_bytes(pool, _payload(running, running.keys(PROMPT)[damaged]), [BLOCK_BYTES // 3])
        running.counted()
        (output,) = running.outputs([PROMPT], extra_args=handed_over)
        answer, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
        running.settle()
        counted = running.counted()
        assert counted["pulled_blocks/checksum"] == 1 and counted["pulled_blocks/hit"] == 3 and counted["loads/failed"] == 1
        if policy == "recompute":
            assert (answer, reason) == (text, "length")
            # The damaged block was evicted, and is published again, right this time. The tail is for the hand-over alone.
            assert counted.get("published_blocks/stored", 0) == (damaged < 3)
        else:
            assert (answer, reason) == ([], "error")
        assert running.scheduler_side.access.call(lambda cache: cache.pinned()) == 0
        # The next one to ask gets the right text under either policy: the damaged block is there no more, or was replaced.
        running.llm.reset_prefix_cache()
        assert running.texts([PROMPT], extra_args=handed_over) == [text]
        assert "pulled_blocks/checksum" not in running.counted()


def test_without_checksums_a_flipped_byte_is_not_noticed(model, pool, text):
    """What the checksums are for: shows that the tests above would see wrong text."""
    with engine(model, "kv_both", pool, extra={"checksums": False}) as running:
        running.texts([PROMPT])
        running.llm.reset_prefix_cache()
        # Of every number the sign and more.
        flip_bytes(pool, _payload(running, running.keys(PROMPT)[1]), range(3, BLOCK_BYTES, 4))
        (answer,) = running.texts([PROMPT])
        assert answer != text


def test_a_full_pool_loses_nothing_but_hits(model, make_pool, text):
    """Room for some blocks only. Blocks are evicted in favour of new ones, and what is not there is computed."""
    pool = make_pool(size="24M", cells="512K:75%")
    with engine(model, "kv_both", pool) as running:
        asked = [prompt(500, 50 + each) for each in range(16)]
        expected = running.texts(asked)
        running.settle()
        counted = running.counted()
        assert sum(value for name, value in counted.items() if name.startswith("published_blocks/")) >= 48
        running.llm.reset_prefix_cache()
        assert running.texts(asked) == expected
        counted = running.counted()
        assert 16 * 116 < counted["prompt_tokens/computed"] < 16 * 500, "some are there still, some are not"
        assert running.texts([PROMPT]) == [text]


def test_a_pool_without_room_for_one_more_block(model, make_pool, text):
    """Every cell is pinned: publishing is refused and counted, serving goes on."""
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
        with engine(model, "kv_both", pool) as running:
            assert running.texts([PROMPT]) == [text]
            running.settle()
            counted = running.counted()
            assert counted["published_blocks/no_cell"] == 3 and "published_blocks/stored" not in counted
        for pins in taken:
            pins.release()


@pytest.mark.parametrize("how", ("truncated", "removed", "formatted"))
def test_a_pool_that_vanishes_under_the_engine(model, pool, text, how):
    with engine(model, "kv_both", pool) as running:
        assert running.texts([PROMPT]) == [text]
        running.settle()
        running.llm.reset_prefix_cache()
        if how == "truncated":
            with open(pool, "r+b") as file:
                file.truncate(0)
        elif how == "removed":
            Path(pool).unlink()
        else:
            kvbm_cxl.format_pool(pool, cells="512K:75%", evict_hosts=True)
        running.counted()
        other = prompt(400, 77)
        with_loss = [running.texts([PROMPT])[0] for _ in range(2)]
        mine = running.texts([other])[0]
        running.settle()
        counted = running.counted()
        assert with_loss == [text, text]
        if how == "truncated":
            assert counted["lookups/error"] >= 1 and any(name.startswith("published_blocks/") for name in counted)
    with engine(model, None) as plain:
        assert plain.texts([other]) == [mine]


def test_start_without_a_usable_pool_says_what_to_do(model, make_pool, folder):
    missing = folder / "there-is-no-pool"
    for spec, extra, words in (
        (str(missing), {}, "cxlctl format"),
        (make_pool(cells="64K:75%"), {}, "512K:75%"),
        ("", {}, "CXL_POOL"),
        (str(missing), {"chekcsums": True}, "no option 'chekcsums'"),
    ):
        with pytest.raises((ConfigError, RuntimeError), match=words):
            with engine(model, "kv_both", spec, extra=extra):
                pass
    garbage = folder / "garbage"
    garbage.write_bytes(b"this is no pool" * (1 << 17))
    with pytest.raises((ConfigError, RuntimeError), match="cannot use pool"):
        with engine(model, "kv_both", str(garbage)):
            pass


def test_preempted_requests_keep_their_text(model, pool):
    """Too few blocks for all requests to grow: some are preempted, with saves under way, and come back by way of the pool."""
    asked = [prompt(250, 200 + each) for each in range(4)]
    with engine(model, None, blocks=64) as roomy:
        expected = roomy.texts(asked, max_tokens=140)
    with engine(model, "kv_both", pool, blocks=12, max_model_len=1024) as tight:
        preempted = []
        step = tight.scheduler_side.step

        def watched(output):
            preempted.extend(output.preempted_req_ids or ())
            return step(output)

        tight.scheduler_side.step = watched
        assert tight.texts(asked, max_tokens=140) == expected
        assert preempted, "the test is about preemption"
        tight.settle()
        assert tight.scheduler_side.access.call(lambda cache: cache.pinned()) == 0
        assert not tight.scheduler_side._tracked
    with engine(model, "kv_both", pool, blocks=64) as fresh:
        assert fresh.texts(asked, max_tokens=140) == expected
        assert fresh.counted()["external_hits"] == 4 * 128


def test_a_request_aborted_while_it_is_loaded(model, pool, text):
    with engine(model, "kv_both", pool) as running:
        running.texts([PROMPT])
        running.settle()
        running.llm.reset_prefix_cache()
        side, llm = running.worker_side, running.llm.llm_engine
        begun, go_on = threading.Event(), threading.Event()
        pull = side.loader.pull

        def slow(*arguments):
            begun.set()
            assert go_on.wait(60)
            return pull(*arguments)

        def beside_a_forward_pass(orders):
            """A step that computes nothing loads on the engine's own thread: nothing could be aborted meanwhile."""
            start_loads(replace(orders, idle=False))

        start_loads = side.start_loads
        side.loader.pull, side.start_loads = slow, beside_a_forward_pass
        free = running.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        llm.add_request("aborted", PROMPT, SamplingParams(max_tokens=4, temperature=0))
        for _ in range(100):  # After a reset, a step passes until it is known which weights there are.
            llm.step()
            if begun.wait(0.1):
                break
        assert begun.wait(60)
        llm.abort_request(["aborted"])
        for _ in range(3):
            llm.step()
        blocks = running.core.scheduler.kv_cache_manager.block_pool
        assert blocks.get_num_free_blocks() == free - 3, "blocks that are still written to are not given away"
        go_on.set()
        side.loader.pull = pull
        for _ in range(200):
            llm.step()
            if blocks.get_num_free_blocks() == free:
                break
        assert blocks.get_num_free_blocks() == free
        assert side.access.call(lambda cache: cache.pinned()) == 0 and not running.scheduler_side._tracked
        assert running.texts([PROMPT]) == [text]


def test_a_request_that_ends_while_it_is_saved(model, pool, text, monkeypatch):
    """Its blocks are kept until the copy is over, although vLLM is done with them."""
    with engine(model, "kv_both", pool) as running:
        llm = running.llm.llm_engine
        begun, go_on, run = threading.Event(), threading.Event(), SaveJob.run

        def slow(job):
            begun.set()
            assert go_on.wait(60)
            run(job)

        monkeypatch.setattr(SaveJob, "run", slow)
        blocks = running.core.scheduler.kv_cache_manager.block_pool
        free = blocks.get_num_free_blocks()
        llm.add_request("short", PROMPT, SamplingParams(max_tokens=1, temperature=0))
        ended = False
        for _ in range(20):
            ended = ended or any(output.finished for output in llm.step())
        assert ended and begun.wait(60)
        assert blocks.get_num_free_blocks() == free - 4
        go_on.set()
        monkeypatch.setattr(SaveJob, "run", run)
        for _ in range(200):
            llm.step()
            if blocks.get_num_free_blocks() == free:
                break
        assert blocks.get_num_free_blocks() == free
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts([PROMPT]) == [text]
        assert running.counted()["external_hits"] == 384


def test_two_models_on_one_pool_never_meet(model, pool, folder, text):
    """The same shape, other weights, the same prompts."""
    import shutil

    from safetensors.numpy import load_file, save_file

    other = folder / "another-model"
    if not other.exists():
        shutil.copytree(model, other)
        weights = load_file(other / "model.safetensors")
        save_file({name: array * 1.5 if "k_proj" in name else array for name, array in weights.items()}, other / "model.safetensors")
    with engine(str(other), None) as plain:
        expected = plain.texts([PROMPT])
    assert expected != [text], "the models differ in what they say"
    with engine(model, "kv_both", pool) as first:
        first.texts([PROMPT])
    with engine(str(other), "kv_both", pool) as second:
        assert second.texts([PROMPT]) == expected
        assert "external_hits" not in second.counted()
    copy = folder / "a-copy"
    if not copy.exists():
        shutil.copytree(model, copy)
    with engine(str(copy), "kv_both", pool) as third:
        assert third.texts([PROMPT]) == [text]
        assert third.counted()["external_hits"] == 384, "a copy elsewhere is the same model"
