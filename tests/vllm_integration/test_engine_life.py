# SPDX-License-Identifier: Apache-2.0
"""Whole engines of models with several KV cache groups that sleep, pause, and get other weights while they run: the text is
that of the weights in memory, and what is stale is found by no engine."""

from contextlib import contextmanager

import pytest
import tiny_models
from engines import engine, prompt
from vllm import SamplingParams

FAMILIES = ("gpt-oss", "granite4")
PROMPTS = [prompt(500, 41), prompt(300, 42)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, dict]:
    """Folder of a model, and what its engines take."""
    return tiny_models.make(request.param, tmp_path_factory.mktemp("models")), tiny_models.options(request.param)


@pytest.fixture
def pool(make_pool) -> str:
    return make_pool(size="128M", cells="512K:80%")


class Weights:
    """Those of an engine in this process, changed in place and brought back."""

    def __init__(self, running) -> None:
        self.running = running
        running.llm.apply_model(lambda model: setattr(self, "kept", {name: each.data.clone() for name, each in model.named_parameters()}))

    def change(self) -> None:
        self.running.llm.apply_model(lambda model: [each.data.mul_(1.25) for each in model.parameters() if each.dim() > 1] and None)

    def restore(self) -> None:
        self.running.llm.apply_model(lambda model: [each.data.copy_(self.kept[name]) for name, each in model.named_parameters()] and None)


@pytest.fixture(scope="module")
def texts(family) -> tuple[list, list]:
    """Of an engine without a connector, before and after its weights are changed."""
    model, options = family
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as plain:
        before = plain.texts(PROMPTS)
        Weights(plain).change()
        plain.llm.reset_prefix_cache()
        after = plain.texts(PROMPTS)
    assert all(one != other for one, other in zip(before, after))
    return before, after


@contextmanager
def _published(family, pool):
    """An engine that has published all prompts, and has none of their blocks itself."""
    model, options = family
    with engine(model, "kv_both", pool, **options) as running:
        first = running.texts(PROMPTS)
        running.settle()
        running.llm.reset_prefix_cache()
        running.counted()
        running.reach = sum(running.scheduler_side.shape.reach(len(each["prompt_token_ids"]), with_tail=False) for each in PROMPTS)
        yield running, first


def test_weights_replaced_in_place(family, pool, texts):
    with _published(family, pool) as (running, first):
        weights = Weights(running)
        assert first == texts[0]
        weights.change()
        assert running.texts(PROMPTS) == texts[1], "nothing of the earlier weights is pulled"
        assert "external_hits" not in running.counted()
        running.settle()
        running.llm.reset_prefix_cache()
        assert running.texts(PROMPTS) == texts[1] and running.counted()["external_hits"] == running.reach, "but what the new ones computed"
        running.llm.reset_prefix_cache()
        weights.restore()
        assert running.texts(PROMPTS) == texts[0] and running.counted()["external_hits"] == running.reach, "the first weights are back"
    model, options = family
    with engine(model, "kv_both", pool, **options) as other:
        assert other.texts(PROMPTS) == texts[0] and other.counted()["external_hits"] == running.reach


def test_without_a_reset_nothing_is_published_upon_old_blocks(family, pool, texts):
    longer = [{"prompt_token_ids": PROMPTS[0]["prompt_token_ids"] + prompt(200, 9)["prompt_token_ids"]}]
    with _published(family, pool) as (running, _):
        running.texts(PROMPTS)
        running.settle()
        running.counted()
        Weights(running).change()
        running.texts(longer)
        running.settle()
        assert not [name for name in running.counted() if name.startswith("published_blocks")]


def test_sleep_pause_and_resets_keep_text_and_blocks(family, pool, texts):
    def sleep(running) -> None:
        running.llm.sleep(level=1)
        running.llm.wake_up()

    def pause(running) -> None:
        running.core.pause_scheduler("abort")
        running.core.resume_scheduler()

    with _published(family, pool) as (running, _):
        for happens in (sleep, pause, lambda running: running.llm.reset_prefix_cache()):
            happens(running)
            assert running.texts(PROMPTS) == texts[0] and running.counted()["external_hits"] == running.reach
            running.llm.reset_prefix_cache()
        # Paused in the middle of a request, which goes on afterwards.
        llm = running.llm.llm_engine
        llm.add_request("paused", PROMPTS[0], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        outputs = []
        while not outputs or not outputs[-1].outputs[0].token_ids:
            outputs += llm.step()
        running.core.pause_scheduler("keep", clear_cache=False)
        assert llm.step() == []
        running.core.resume_scheduler()
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert list(outputs[-1].outputs[0].token_ids) == texts[0][0]


def test_a_request_that_runs_while_weights_change_publishes_nothing_more(family, pool, texts):
    asked, answer = prompt(200, 77), 120
    model, options = family
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as plain:
        turn = {"prompt_token_ids": asked["prompt_token_ids"] + plain.texts([asked], max_tokens=answer)[0]}
        expected = plain.texts([turn])
    with engine(model, "kv_both", pool, **options) as running:
        llm, outputs = running.llm.llm_engine, []
        llm.add_request("long", asked, SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True))
        while not outputs:
            outputs += llm.step()
        running.core.pause_scheduler("keep", clear_cache=False)
        Weights(running).change()
        running.core.resume_scheduler()
        while llm.has_unfinished_requests():
            outputs += llm.step()
        running.settle()
        assert running.counted()["weights/changed"] == 1
    with engine(model, "kv_both", pool, **options) as other:
        assert other.texts([turn]) == expected
        assert other.counted().get("external_hits", 0) <= 200
