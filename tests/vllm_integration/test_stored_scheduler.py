# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of engines whose blocks are several in the pool: keys, what is found, where it is loaded and saved from."""

import random
from dataclasses import replace
from types import SimpleNamespace

import kvbm_cxl
import pytest
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import handover, pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Shape, shape_of
from kvbm_cxl.vllm_integration.keys import Rehashed, group_keys, hasher_of, tail_key
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake
from kvbm_cxl.vllm_integration.scheduler import SchedulerSide
from requests_of_vllm import BLOCK_TOKENS, Scheduled, allocation, hasher, request, tokens
from test_groups import configuration, engine, full, state, window

RANKS, SHARDS = 2, 2


def namespace(shard: int) -> kvbm_cxl.Namespace:
    fields = {"dtype": "d", "layer_count": 1, "kv_head_count": 1, "head_size": 8, "block_tokens": BLOCK_TOKENS, "layout": "l"}
    return kvbm_cxl.Namespace(model="m", tp_rank=shard, tp_size=RANKS * SHARDS, **fields)


class Bench:
    """Two ranks with two cells each, and vLLM's blocks of `block_tokens` tokens."""

    def __init__(self, pool: str, block_tokens: int, *, producer: bool = True, consumer: bool = True, **options) -> None:
        self.config = ConnectorConfig.read({"pool": pool, "stored_block_tokens": BLOCK_TOKENS, **options})
        self.access, self.block_tokens = pool_access.acquire(self.config), block_tokens
        specs = [full(block_tokens)]
        shape = shape_of(engine(specs), configuration(specs), BLOCK_TOKENS)
        mine = None if block_tokens == BLOCK_TOKENS else hasher(BLOCK_TOKENS)
        self.side = SchedulerSide(self.config, self.access, shape, producer, consumer, hasher=mine)
        self.namespaces = [namespace(shard) for shard in range(RANKS * SHARDS)]
        cells = [bytes(each) for each in self.namespaces]
        self.side.handshake({(0, rank): WorkerHandshake(((*cells[2 * rank : 2 * rank + 2],),), 4096) for rank in range(RANKS)})

    def request(self, name: str, token_ids: list[int], **more):
        return request(name, token_ids, block_hasher=hasher(self.block_tokens), **more)

    def publish(self, keys: list[bytes]) -> None:
        for each in self.namespaces:
            for key in keys:
                self.access.call(lambda cache: cache.publish(each, key, key * 16))

    def evict(self, shard: int, key: bytes) -> None:
        assert self.access.call(lambda cache: cache.evict(self.namespaces[shard], key))

    def compute(self, asked, begin: int, end: int, block_ids: list[int]):
        """A step that computes the tokens `begin` to `end`; what the workers are to publish."""
        asked.num_computed_tokens = begin
        self.side.match(asked, 0)
        name = asked.request_id
        return self.side.step(Scheduled({name: end - begin}, {name: block_ids})).saves

    def admit(self, asked):
        external, _ = self.side.match(asked, 0)
        self.side.note_allocation(asked, allocation([7, 3, 9, 1, 5, 2, 8, 4, 6, 10]), external)
        loads = self.side.step(Scheduled()).loads
        self.side.report(SimpleNamespace(kv_connector_worker_meta=None, finished_recving={asked.request_id}, finished_sending=None))
        return external, loads


@pytest.fixture
def bench(make_pool):
    made, pool = [], make_pool(size="64M", cells="64K:75%")

    def make(block_tokens: int, **options) -> Bench:
        made.append(Bench(pool, block_tokens, **options))
        return made[-1]

    yield make
    for each in made:
        each.side.close()
        assert each.side.lookups.pinned == 0
        each.access.release()


def keys_of_a_small_engine(token_ids: list[int], **more) -> list[bytes]:
    """As vLLM itself names blocks of 16 tokens, and we the tail behind them."""
    asked = request("small", token_ids, **more)
    tail = tail_key(asked, BLOCK_TOKENS)
    return [*group_keys(asked, 0, 99), *([tail] if tail else [])]


@pytest.mark.parametrize("block_tokens", (32, 64))
@pytest.mark.parametrize("more", ({}, {"cache_salt": "s"}), ids=("plain", "salted"))
def test_keys_are_those_of_an_engine_with_smaller_blocks(bench, block_tokens, more):
    here = bench(block_tokens)
    for length in (5, 16, 40, 64, 100, 128, 150):
        asked = here.request("a", tokens(length), **more)
        tracked = here.side._track(asked)
        tail = [here.side.names.tail(tracked)] if length % BLOCK_TOKENS else []
        assert here.side.names.keys(tracked, 0, 99) + tail == keys_of_a_small_engine(tokens(length), **more)
        # Tokens that are generated later are hashed then.
        asked.append_output_token_ids(tokens(50, seed=3))
        grown = keys_of_a_small_engine([*tokens(length), *tokens(50, seed=3)], **more)
        assert here.side.names.keys(tracked, 0, 99) == grown[: (length + 50) // BLOCK_TOKENS]


def test_an_engine_whose_hashes_fit_hashes_nothing_again():
    specs = [full(64)]
    config = engine(specs)
    config.cache_config.prefix_caching_hash_algo = "sha256"
    assert hasher_of(config, configuration(specs), 64) is None
    again = Rehashed(request("a", tokens(100), block_hasher=hasher(64)), hasher_of(config, configuration(specs), 16))
    again.update()
    assert again.block_hashes == request("b", tokens(100)).block_hashes and again.num_prompt_tokens == 100


def test_what_is_published_is_found_by_engines_with_other_blocks(bench):
    small, large = bench(16, consumer=False), bench(64, producer=False)
    prompt = tokens(150)
    asked = small.request("a", prompt)
    saves = small.compute(asked, 0, 150, list(range(100, 110)))
    assert [each.block_ids for each in saves] == [list(range(100, 109)), [109]]
    small.publish([key for each in saves for key in each.keys])
    external, loads = large.admit(large.request("b", prompt))
    assert external == 150
    (load,) = loads
    # Blocks 7, 3 and 9 of vLLM's; of the last one a full slice and the tail.
    assert load.block_ids == [28, 29, 30, 31, 12, 13, 14, 15, 36, 37] and load.tail_tokens == 6
    assert load.keys == [key for each in saves for key in each.keys]
    # A longer prompt has whole blocks of 64 alone.
    external, (load,) = large.admit(large.request("c", [*prompt[:140], *tokens(30, seed=4)]))
    assert external == 128 and load.block_ids == [28, 29, 30, 31, 12, 13, 14, 15] and load.tail_tokens == 0


def test_a_prompt_that_ends_with_a_slice_is_found_whole(bench):
    """It has no tail in the pool, and ends within one of vLLM's blocks."""
    small, large, prompt = bench(16), bench(64), tokens(80)
    small.publish(keys_of_a_small_engine(prompt))
    assert large.side.names.shape.reach(80, True) == 80 and large.side.names.shape.reach(80, False) == 64
    external, (load,) = large.admit(large.request("b", prompt))
    assert external == 80 and load.block_ids == [28, 29, 30, 31, 12] and load.tail_tokens == 0
    assert bench(64).admit(large.request("c", prompt))[0] == 80, "all of it is there, handed over or not"
    small.evict(0, keys_of_a_small_engine(prompt)[4])
    assert large.admit(large.request("d", prompt))[0] == 64


def test_a_hand_over_to_larger_blocks_waits_for_no_more_than_they_can_find(bench, waits):
    """With a draft the reader has the last block of a match computed again, and prefill said more."""
    waits(handover_ms=60_000)
    small, large, prompt = bench(16), bench(64), tokens(150)
    large.side.names.shape = replace(large.side.names.shape, drops_last=True)
    asked = small.request("a", prompt, params=handover.prefill_params())
    saves = small.compute(asked, 0, 150, list(range(100, 110)))
    small.publish([key for each in saves for key in each.keys])
    _, params = small.side.finish(asked)
    assert handover.expected_of(params).tokens == 150
    assert large.admit(large.request("b", prompt, params=params))[0] == 64
    assert large.side.take_stats().data["counters"]["handovers/complete"] == 1


def test_what_large_blocks_publish_is_found_in_small_ones(bench):
    large, small = bench(64, consumer=False), bench(16, producer=False)
    prompt = tokens(150)
    asked = large.request("a", prompt)
    saves = large.compute(asked, 0, 90, [50, 60, 70])
    assert [each.block_ids for each in saves] == [[200, 201, 202, 203, 240]], "and of a block that is not full what is"
    more = large.compute(asked, 90, 150, [50, 60, 70])
    assert [(each.block_ids, each.tail_tokens) for each in more] == [([241, 242, 243, 280], 0), ([281], 6)]
    assert more[0].parent == saves[0].keys[-1]
    large.publish([key for each in saves + more for key in each.keys])
    assert small.admit(small.request("b", prompt))[0] == 150
    assert small.admit(small.request("c", [*prompt[:100], *tokens(9, seed=2)]))[0] == 96


@pytest.mark.parametrize("shard", range(RANKS * SHARDS))
@pytest.mark.parametrize(("gone", "found"), ((0, 0), (3, 0), (4, 64), (8, 128), (9, 128)))
def test_a_block_counts_when_all_its_cells_are_there(bench, shard, gone, found):
    here, prompt = bench(64), tokens(150)
    assert here.side.workers == RANKS and len(here.side.namespaces) == RANKS * SHARDS
    keys = keys_of_a_small_engine(prompt)
    here.publish(keys)
    here.evict(shard, keys[gone])
    external, loads = here.admit(here.request("b", prompt))
    assert external == found and [len(load.keys) for load in loads] == ([found // BLOCK_TOKENS] if found else [])


def test_what_vllm_has_is_not_loaded_again(bench):
    here, prompt = bench(32, producer=False), tokens(150)
    here.publish(keys_of_a_small_engine(prompt))
    asked = here.request("b", prompt)
    external, _ = here.side.match(asked, 64)
    here.side.note_allocation(asked, allocation([7, 3, 9, 1, 5]), external)
    (load,) = here.side.step(Scheduled()).loads
    assert external == 86 and load.block_ids == [18, 19, 2, 3, 10, 11] and load.keys == keys_of_a_small_engine(prompt)[4:]


def test_block_sizes_that_do_not_divide_are_refused():
    for specs, stored in (([full(64)], 48), ([full(32)], 64), ([full(64), window(40, 32)], 64)):
        with pytest.raises(ConfigError, match=f"stored_block_tokens is {stored}.*no multiple"):
            shape_of(engine(specs), configuration(specs), stored)
    with pytest.raises(ConfigError, match="recurrent layers"):
        shape_of(engine([full(), state()]), configuration([full(), state()]), 16)


def published(shape: Shape, prompt_tokens: int, chunk: int, every: int) -> list[list[bool]]:
    """Which blocks of each group an engine publishes of a prompt, in chunks of a step each, before which vLLM lets go of blocks that no
    token to come needs."""
    there = [[False] * (prompt_tokens // group.block_tokens) for group in shape.groups]
    for begin in range(0, prompt_tokens, chunk):
        for group, blocks in zip(shape.groups, there):
            kept = group.skipped_tokens(begin) // (group.block_tokens * group.slices) * group.slices
            for block in shape.worth_storing(group, begin, min(begin + chunk, prompt_tokens), prompt_tokens, every):
                blocks[block] |= block >= kept
    return there


@pytest.mark.parametrize("reach", (17, 40, 100, 500))
def test_windows_are_found_across_block_sizes(reach):
    """Whatever the size of the writer's blocks, the reader finds the longest prefix that ends with one of its own."""
    choose = random.Random(reach)
    shapes = {}
    for size in (16, 32, 64, 128):
        specs = [full(size), window(reach, size)]
        shapes[size] = shape_of(engine(specs), configuration(specs), 16)
    for writer, reader in ((16, 128), (128, 16), (32, 64), (64, 32), (16, 16), (128, 128)):
        for _ in range(20):
            length = choose.randrange(1, 3000)
            there = published(shapes[writer], length, choose.choice((128, 256, 700, 5000)), 1024)
            # Another prompt goes on behind this one.
            hit = shapes[reader].longest(there, length + 1000)
            # At the writer's own end of the prompt, rounded to blocks of the reader's.
            assert (hit.tokens if hit else 0) == length // writer * writer // reader * reader, (writer, reader, length)


def test_a_window_is_loaded_in_whole_blocks_of_vllm():
    """vLLM serves the block to other requests, whose windows may reach farther back into it."""
    specs = [full(64), window(40, 64)]
    shape = shape_of(engine(specs), configuration(specs), 16)
    for end in range(1, 700):
        needed = shape.groups[1].needed_blocks(end)
        assert needed.start % 4 == 0 and needed.start * 16 <= max(end - 39, 0) < (needed.start + 4) * 16
        assert needed.stop == -(-end // 16)


def test_a_streaming_session_shares_nothing_where_it_is_hashed_again(bench):
    """vLLM replaces tokens of it, and only its own hashes tell."""
    here, whole = bench(64), bench(16)
    prompt = tokens(150)
    here.publish(keys_of_a_small_engine(prompt))
    assert here.side.match(here.request("a", prompt, resumable=True), 0) == (0, False)
    assert not here.compute(here.request("b", prompt, resumable=True), 0, 150, [1, 2, 3])
    assert whole.side.match(whole.request("c", prompt, resumable=True), 0)[0] > 0
