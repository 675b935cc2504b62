# SPDX-License-Identifier: Apache-2.0
"""Workers of engines with different tensor parallelism and block sizes on one pool: what one publishes is in the other's memory, every byte
of it, as the other's own attention backend would have written it. Real memory of every rank, vLLM's kernel for CPUs, real namespaces."""

import itertools
import threading
import time
from dataclasses import replace

import kvbm_cxl
import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import attachment, identity, pool_access, worker
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Group, Kind, Shape
from kvbm_cxl.vllm_integration.metadata import Blocks, StepMetadata
from kvbm_cxl.vllm_integration.saver import SaveJob
from pages import HEAD_SIZE, cpu_writer, empty, keys_and_values, plain_writer, written
from test_identity import _vllm_config, accept_made_up_configurations
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

LAYERS, TOKENS, BLOCKS = 2, 256, 16
HNC, NHC = (1, 2, 3), (2, 1, 3)
DTYPE = torch.float32


class Rank:
    """A worker's side with a KV cache of its own."""

    def __init__(self, engine: "Engine", rank: int, monkeypatch) -> None:
        self.engine = engine
        shape = engine.block_count, engine.heads, engine.block_tokens
        self.memory = [empty(*shape, DTYPE, engine.order, engine.content) for _ in range(LAYERS)]
        self.first_head = rank // engine.replicas * engine.heads
        self.access = pool_access.acquire(engine.config)
        vllm_config = _vllm_config(dtype=DTYPE, tensor_parallel_size=engine.tp_size)
        cache_config = KVCacheConfig(engine.block_count, [], [KVCacheGroupSpec(engine.names, engine.spec)], kv_cache_layout="LBHNC")
        cache_config.kv_tp_replicas = engine.replicas if engine.is_mla else 1
        self.side = worker.WorkerSide(vllm_config, cache_config, engine.config, self.access)
        monkeypatch.setattr(attachment.Attacher, "_ranks", lambda _: (engine.tp_size, rank))
        monkeypatch.setattr(attachment, "shape_of", lambda *_: engine.shape)
        monkeypatch.setattr(attachment, "writer_of", lambda *_: engine.writer)
        monkeypatch.setattr(attachment, "replicas_of", lambda *_: engine.replicas)
        monkeypatch.setattr(identity, "attention_backend", lambda *_: engine.writer.name)
        accept_made_up_configurations(monkeypatch)
        try:
            self.side.attach(dict(zip(engine.names, self.memory)))
        except ConfigError:
            self.access.release()
            raise

    def write(self, cache: list[torch.Tensor], sequence: int, tokens: int = TOKENS) -> None:
        """What the forward pass leaves of a sequence in these heads' pages."""
        for layer, each in enumerate(cache):
            keys, values = keys_and_values(TOKENS, self.engine.total_heads, DTYPE, seed=100 * sequence + layer)
            part = slice(self.first_head, self.first_head + self.engine.heads)
            written(self.engine.writer, each, keys[:tokens, part], values[:tokens, part], self.engine.slots(sequence)[:tokens])

    def run(self, step: int, **orders):
        made = StepMetadata(step, **orders)
        self.side.before_overwrite(made)
        self.side.start_loads(made)
        self.side.save(made)
        loaded = self.side.take_finished(set())[1]
        return loaded, self.side.loader.take_failed_blocks()


class Engine:
    """The workers of an engine."""

    def __init__(self, pool: str, monkeypatch, tp_size=1, block_tokens=32, total_heads=4, order=HNC, is_mla=False, **options) -> None:
        self.tp_size, self.block_tokens, self.total_heads, self.order, self.is_mla = tp_size, block_tokens, total_heads, order, is_mla
        self.replicas, self.heads = max(tp_size // total_heads, 1), max(total_heads // tp_size, 1)
        self.block_count, self.content = BLOCKS * 32 // block_tokens * 2, 2 * HEAD_SIZE
        self.config = ConnectorConfig.read({"pool": pool, "model_id": "m", "audit": False, **options})
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        kind = MLAAttentionSpec if is_mla else FullAttentionSpec
        size = self.content if is_mla else HEAD_SIZE
        self.spec = kind(block_size=block_tokens, num_kv_heads=self.heads, head_size=size, dtype=DTYPE)
        self.writer = (cpu_writer if order == HNC else plain_writer)(DTYPE)
        stored = self.config.stored_block_tokens or block_tokens
        self.group = Group(0, tuple(self.names), stored, Kind.FULL, slices=block_tokens // stored)
        self.shape = Shape((self.group,), stored, block_tokens)
        self.step, self.ranks = 0, []
        try:
            for rank in range(tp_size):
                self.ranks.append(Rank(self, rank, monkeypatch))
        except ConfigError:
            self.close()
            raise

    def block_ids(self, sequence: int) -> list[int]:
        """vLLM's blocks of a sequence, in no order and with others between them."""
        count = TOKENS // self.block_tokens
        ids = [2 * at + 1 for at in range(self.block_count // 2)]
        return [ids[(sequence * count + 3 * at) % len(ids)] for at in range(count)] if count % 3 else ids[:count]

    def slots(self, sequence: int) -> list[int]:
        ids = self.block_ids(sequence)
        return [ids[token // self.block_tokens] * self.block_tokens + token % self.block_tokens for token in range(TOKENS)]

    def blocks(self, sequence: int, tokens: int, begin: int = 0) -> Blocks:
        """All blocks of a sequence that hold its tokens `begin` to `tokens`; a last one that is filled in part is a tail."""
        size = self.group.block_tokens
        wanted = range(begin // size, -(-tokens // size))
        keys = [kvbm_cxl.chain_key(None, [sequence, size, block]) for block in wanted]
        return Blocks(f"r{sequence}", keys, self.group.places(self.block_ids(sequence), wanted), tail_tokens=tokens % size)

    def publish(self, sequence: int, tokens: int = TOKENS) -> None:
        self.step += 1
        blocks = self.blocks(sequence, tokens)
        for rank in self.ranks:
            rank.write(rank.memory, sequence)
            rank.run(self.step, saves=[blocks], complete={blocks.request_id})
        for rank in self.ranks:
            rank.side.saver.saves.wait([blocks.request_id])  # With `publish_behind` the steps end before them.

    def load(self, sequence: int, tokens: int = TOKENS, begin: int = 0) -> list[set[int]]:
        """The blocks of vLLM's that each rank could not fill."""
        failed = []
        blocks = self.blocks(sequence, tokens, begin)
        for rank in self.ranks:
            self.step += 1
            loaded, missed = rank.run(self.step, loads=[blocks])
            deadline = time.monotonic() + 180
            while blocks.request_id not in loaded:
                assert time.monotonic() < deadline
                self.step += 1
                loaded, missed = rank.run(self.step, idle=True)
            failed.append(missed)
        return failed

    def assert_loaded(self, sequence: int, tokens: int = TOKENS) -> None:
        """Every byte of every rank's memory is what the backend writes of this sequence, and zero elsewhere."""
        for rank in self.ranks:
            wanted = [torch.zeros_like(each) for each in rank.memory]
            rank.write(wanted, sequence, tokens)
            for mine, right in zip(rank.memory, wanted):
                assert torch.equal(mine, right)

    def counts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for rank in self.ranks:
            stats = rank.side.take_stats()
            for name, value in (stats.data["counters"] if stats else {}).items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        for rank in self.ranks:
            rank.side.close()
            rank.access.release()


@pytest.fixture
def engine(make_pool, monkeypatch):
    pool, made = make_pool(size="96M", cells="128K:60%"), []

    def make(**options) -> Engine:
        made.append(Engine(pool, monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


STORED = {"stored_tp": 4, "stored_block_tokens": 32}
KINDS = list(itertools.product((1, 2, 4), (32, 64, 128)))


@pytest.mark.parametrize(("tp_size", "block_tokens"), KINDS)
def test_every_engine_reads_what_every_other_one_published(engine, tp_size, block_tokens):
    writer = engine(tp_size=tp_size, block_tokens=block_tokens, **STORED)
    writer.publish(1)
    block_bytes = LAYERS * 4 * TOKENS * 2 * HEAD_SIZE * 4
    # A block in the pool counts once for each rank.
    assert writer.counts() == {"published_blocks/stored": tp_size * TOKENS // 32, "bytes/published": block_bytes}
    for other, tokens in KINDS:
        reader = engine(tp_size=other, block_tokens=tokens, **STORED)
        failed = reader.load(1)
        assert failed == [set()] * other, reader.counts()
        reader.assert_loaded(1)
        assert reader.counts()["bytes/pulled"] == block_bytes
    namespaces = [namespace for rank in writer.ranks for namespace in rank.side.handshake().namespaces[0]]
    assert len(set(namespaces)) == len(namespaces) == 4
    keys, access = writer.blocks(1, TOKENS).keys, writer.ranks[0].access
    there = [access.call(lambda cache: cache.has(kvbm_cxl.Namespace.from_bytes(each), keys)) for each in namespaces]
    assert sum(map(sum, there)) == access.call(lambda cache: cache.usage().ready) == 4 * TOKENS // 32, "each cell once"


def test_an_engine_with_such_blocks_needs_no_option(engine):
    plain = engine(tp_size=4, block_tokens=32)
    plain.publish(1)
    large = engine(tp_size=1, block_tokens=128, **STORED)
    assert large.load(1) == [set()]
    large.assert_loaded(1)
    large.publish(2)
    assert plain.load(1) == [set()] * 4
    again = engine(tp_size=4, block_tokens=32)
    assert again.load(2) == [set()] * 4
    again.assert_loaded(2)
    other = engine(tp_size=2, block_tokens=32)
    assert other.load(1) == [set(other.block_ids(1))] * 2, "and without an option another engine finds none"
    assert other.counts()["pulled_blocks/absent"] == 2 * TOKENS // 32


@pytest.mark.parametrize("tp_size", (1, 2, 4))
def test_heads_that_ranks_share_are_stored_once(engine, tp_size):
    """Two KV heads: with four ranks each is on two of them."""
    writer = engine(tp_size=tp_size, total_heads=2, block_tokens=32, stored_tp=4)
    writer.publish(1)
    counted = writer.counts()
    assert counted["bytes/published"] == LAYERS * 2 * TOKENS * 2 * HEAD_SIZE * 4
    assert counted["published_blocks/stored"] == min(tp_size, 2) * TOKENS // 32 and "published_blocks/exists" not in counted
    for other in (1, 2, 4):
        reader = engine(tp_size=other, total_heads=2, block_tokens=32, stored_tp=4)
        assert reader.load(1) == [set()] * other
        reader.assert_loaded(1)
    bare = engine(tp_size=4, total_heads=2, block_tokens=32)
    assert bare.load(1) == [set()] * 4, "four ranks without an option have two shards as well"
    bare.assert_loaded(1)


def test_a_cache_without_heads_is_stored_once_for_all_ranks(engine):
    for tp_size, sequence in ((1, 1), (4, 2)):
        writer = engine(tp_size=tp_size, total_heads=1, is_mla=True, stored_tp=4)
        writer.publish(sequence)
        assert writer.counts()["published_blocks/stored"] == TOKENS // 32
    for tp_size, sequence in ((4, 1), (2, 1), (1, 2), (2, 2)):
        reader = engine(tp_size=tp_size, total_heads=1, is_mla=True, **({"stored_tp": 4} if tp_size > 1 else {}))
        assert reader.load(sequence) == [set()] * tp_size
        reader.assert_loaded(sequence)


def test_other_orders_of_heads_and_tokens(engine):
    """As on GPUs: heads of a token lie together."""
    writer = engine(tp_size=2, block_tokens=64, order=NHC, **STORED)
    writer.publish(1)
    for tp_size, block_tokens in ((1, 128), (4, 32)):
        reader = engine(tp_size=tp_size, block_tokens=block_tokens, order=NHC, **STORED)
        assert reader.load(1) == [set()] * tp_size
        reader.assert_loaded(1)


@pytest.mark.parametrize("behind", (False, True))
def test_a_tail_of_a_slice(engine, behind):
    """70 tokens: of blocks of 64 the second one has 6, of blocks of 32 the third. Behind them nothing is written."""
    for writer_tokens, reader_tokens in ((32, 128), (128, 32), (64, 64)):
        writer = engine(tp_size=1, block_tokens=writer_tokens, publish_behind=behind, **STORED)
        sequence = writer_tokens
        writer.publish(sequence, tokens=70)
        assert writer.counts()["published_blocks/stored"] == 3
        reader = engine(tp_size=2, block_tokens=reader_tokens, **STORED)
        assert reader.load(sequence, tokens=70) == [set(), set()]
        # The whole slice, and none behind it: what lies behind the tail is what the writer had there.
        reader.assert_loaded(sequence, tokens=96)


@pytest.mark.parametrize("number", range(4))
def test_a_block_with_a_cell_that_is_gone_is_a_miss_of_all_of_it(engine, number):
    writer = engine(tp_size=1, block_tokens=128, **STORED)
    writer.publish(1)
    namespace = kvbm_cxl.Namespace.from_bytes(writer.ranks[0].side.handshake().namespaces[0][number])
    gone = writer.blocks(1, TOKENS).keys[5]
    writer.ranks[0].access.call(lambda cache: cache.evict(namespace, gone))
    reader = engine(tp_size=2, block_tokens=64, **STORED)
    failed = reader.load(1)
    assert failed == [{reader.block_ids(1)[2]} if rank == number // 2 else set() for rank in range(2)]
    counted = reader.counts()
    assert counted["pulled_blocks/absent"] == 1 and counted["pulled_blocks/hit"] == 2 * 8 - 1


def test_what_cannot_be_divided_is_refused_at_start(engine):
    with pytest.raises(ConfigError, match="stored_tp is 2.*largest --tensor-parallel-size"):
        engine(tp_size=4, stored_tp=2)
    with pytest.raises(ConfigError, match="stored_tp is 3"):
        engine(tp_size=1, stored_tp=3)
    recurrent = engine(tp_size=1, stored_tp=0)
    side, states = recurrent.ranks[0].side, Shape((recurrent.group, Group(0, ("states",), 32, Kind.STATE)), 32, 32)
    attacher = attachment.Attacher(side.vllm_config, side.kv_cache_config, side.config, side.access, side.worker)
    assert attacher._shards(states).count == 1
    attacher.config = replace(side.config, stored_tp=2)
    with pytest.raises(ConfigError, match="states of recurrent layers cannot be divided"):
        attacher._shards(states)


def test_no_cell_for_one_of_a_block_is_no_block():
    """Outcomes of a block are those of its cells: it is there when all of them are."""
    from kvbm_cxl.vllm_integration.movers import _of_cells

    assert _of_cells(("stored", "exists")) == "stored" and _of_cells(("exists", "exists")) == "exists"
    assert _of_cells(("stored", "no_cell")) == "no_cell" and _of_cells(("over_quota", "stored")) == "over_quota"


def test_slices_of_a_block_are_waited_for_by_the_block_of_vllm(engine, monkeypatch):
    """vLLM gives away its own blocks, of 128 tokens here, each of which is 4 in the pool."""
    writer, go_on, run = engine(block_tokens=128, stored_block_tokens=32), threading.Event(), SaveJob.run
    monkeypatch.setattr(SaveJob, "run", lambda job: go_on.wait(180) and run(job))
    side, blocks = writer.ranks[0].side, writer.blocks(1, TOKENS)
    assert len(blocks.block_ids) == 4 * len(writer.block_ids(1))
    writer.ranks[0].run(1, saves=[blocks])
    free = set(range(writer.block_count)) - set(writer.block_ids(1))
    side.before_overwrite(StepMetadata(2, taken=sorted(free)))
    waiting = threading.Thread(target=lambda: side.before_overwrite(StepMetadata(3, taken=writer.block_ids(1)[-1:])))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(180)
    assert not waiting.is_alive()
