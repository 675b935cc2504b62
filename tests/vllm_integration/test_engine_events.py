# SPDX-License-Identifier: Apache-2.0
"""An engine announces the pool's blocks again after vLLM has told routers to forget everything, whatever made it do so."""

import time

import pytest
from engines import engine, prompt
from kvbm_cxl.vllm_integration import events
from test_engine_life import Weights
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

WAITS_S = 240
PROMPTS, BLOCKS = [prompt(700, 51), prompt(300, 52)], 5 + 2


class Publisher:
    """Takes vLLM's batches of events, in order."""

    def __init__(self) -> None:
        self.events: list = []

    def publish(self, batch) -> None:
        self.events.extend(batch.events)

    def shutdown(self) -> None:
        pass

    def announced(self) -> int:
        """Blocks of the pool that a router knows of now, which forgets all of them when it is told to."""
        known: set = set()
        for event in self.events:
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif event.medium == "EXTERNAL":
                known = known | set(event.block_hashes) if isinstance(event, BlockStored) else known - set(event.block_hashes)
        return len(known)


def _sleep(running) -> None:
    running.llm.sleep(level=0)
    running.llm.wake_up()
    running.forget()


def _weights_there_and_back(running) -> None:
    weights = Weights(running)
    weights.change()
    running.forget()
    running.texts([prompt(20, 9)])
    weights.restore()
    running.forget()


WAYS = {"reset": lambda running: running.forget(), "sleep": _sleep, "weights": _weights_there_and_back}


@pytest.fixture
def announcing(model, make_pool, monkeypatch):
    """An engine that has announced its blocks, and no longer repeats that as after a start."""
    monkeypatch.setattr(events, "_AGAIN_S", (0.5,))
    monkeypatch.setattr(events, "PERIOD_S", 0.05)
    announcing = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    pool = make_pool(size="128M", cells="512K:70%,2K:5%")
    with engine(model, "kv_both", pool, kv_events_config=announcing) as running:
        running.published = running.core.scheduler.kv_event_publisher = Publisher()
        running.texts(PROMPTS)
        running.settle()
        _until(running, lambda: running.published.announced() == BLOCKS)
        time.sleep(1)
        yield running


def _until(running, is_so) -> None:
    """Steps, with which events leave, until it is so."""
    deadline = time.monotonic() + WAITS_S
    while not is_so():
        assert time.monotonic() < deadline, running.published.announced()
        running.texts([prompt(20, 9)], max_tokens=1)
        time.sleep(0.05)


@pytest.mark.parametrize("way", WAYS)
def test_a_router_hears_of_the_blocks_again(announcing, way):
    published = announcing.published
    before = len(published.events)
    WAYS[way](announcing)
    _until(announcing, lambda: any(isinstance(event, AllBlocksCleared) for event in published.events[before:]))
    _until(announcing, lambda: published.announced() == BLOCKS)
    assert all(announcing.in_pool(asked) == len(asked["prompt_token_ids"]) // 128 for asked in PROMPTS)


def test_blocks_of_other_weights_are_not_announced(announcing):
    weights, published = Weights(announcing), announcing.published
    weights.change()
    announcing.forget()
    _until(announcing, lambda: any(isinstance(event, BlockRemoved) and event.medium == "EXTERNAL" for event in published.events))
    for _ in range(10):
        announcing.texts([prompt(20, 9)], max_tokens=1)
        time.sleep(0.1)
    assert published.announced() == 0
