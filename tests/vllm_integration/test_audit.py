# SPDX-License-Identifier: Apache-2.0
"""Blocks of the pool are compared with what was computed: which blocks, and what follows. How far is far: test_block_difference."""

import threading
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import kvbm_cxl
import pytest
import test_stored_blocks
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import audit
from kvbm_cxl.vllm_integration.block_difference import Difference, limit_of
from kvbm_cxl.vllm_integration.groups import Group, Kind
from kvbm_cxl.vllm_integration.metadata import Blocks, WorkerReport
from kvbm_cxl.vllm_integration.stats import Tally
from pages import cpu_writer, keys_and_values, plain_writer, written
from test_stored_blocks import DTYPE, HNC, NHC, STORED, Engine
from test_stored_blocks import TOKENS as SEQUENCE
from test_worker_side import BLOCKS, CONTENT, HEADS, KEYS, TOKENS, Bench
from vllm.v1.kv_cache_interface import FullAttentionSpec

def _vllm_config(cache_dtype: str) -> SimpleNamespace:
    model = SimpleNamespace(dtype=torch.float32, quantization=None, is_multimodal_model=False)
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype), model_config=model)


class Audited(Bench):
    """A worker's side that compares. Its page is `[heads, tokens, content]`, in an order of its own in memory."""

    cache_dtype = "auto"

    def __init__(self, pool, monkeypatch, **options) -> None:
        def unknown(*_):
            raise ConfigError("no such backend")

        monkeypatch.setattr(audit, "writer_of", unknown)
        super().__init__(pool, monkeypatch, audit=True, **options)

    @property
    def vllm_config(self):
        return _vllm_config(self.cache_dtype)

    def _memory(self, shape, random) -> torch.Tensor:
        layers, blocks, heads, tokens, content = shape
        return torch.randn((layers, blocks, tokens, heads, content), generator=random).transpose(2, 3)

    def publish(self, keys, block_ids, name="a", audited=(), **more) -> WorkerReport:
        blocks = Blocks(name, list(keys), list(block_ids), **more)
        return self.run(saves=[blocks], complete={name}, audited=set(audited))[3]


@pytest.fixture
def path(make_pool) -> str:
    return make_pool(size="64M", cells="64K:60%")


@pytest.fixture
def bench(path, monkeypatch):
    benches = []

    def make(**options) -> Audited:
        benches.append(Audited(path, monkeypatch, **options))
        return benches[-1]

    yield make
    for each in benches:
        each.close()


def _audited(bench: Bench) -> dict[str, int]:
    return {name.partition("/")[2]: count for name, count in bench.counts().items() if name.startswith("audited_blocks")}


def test_what_both_engines_compute_is_the_same(bench, caplog):
    here, there = bench(seed=1), bench(seed=1)
    here.publish(KEYS[:4], range(4))
    assert not _audited(here), "what it stored itself is no proof"
    assert not there.publish(KEYS[:4], range(4)).has_differed
    assert _audited(there) == {"same": 4} and not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_block_that_differs_is_found_and_logged_once(bench, caplog):
    here, there = bench(seed=1), bench(seed=1)
    there.memory[1, 2] *= -1
    here.publish(KEYS[:6], range(6))
    assert there.publish(KEYS[:6], range(6)).has_differed and there.run()[3].has_differed
    assert _audited(there) == {"same": 2, "different": 1}
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    slot = here.access.pool.slot
    for said in (KEYS[2].hex(), f"host of slot {slot}", f"slot {there.access.pool.slot}, incarnation", "layout l", "troubleshooting.md"):
        assert said in record.getMessage()
    there.publish(KEYS[:6], range(6))
    assert not _audited(there), "nothing more is compared"


def test_numerics_are_no_difference(bench):
    here, there = bench(seed=1), bench(seed=1)
    there.memory += 1e-4 * torch.randn(there.memory.shape)
    there.memory[1, :, :, 3] = torch.randn(there.memory[1, :, :, 3].shape)
    here.publish(KEYS[:2], range(2))
    there.publish(KEYS[:2], range(2))
    assert _audited(there) == {"same": 2}


def test_one_token_of_the_first_layer_is_a_difference(bench):
    here, there = bench(seed=1), bench(seed=1)
    there.memory[0, 1, :, 3] *= -1
    here.publish(KEYS[:2], range(2))
    there.publish(KEYS[:2], range(2))
    assert _audited(there) == {"same": 1, "different": 1}


def test_loads_bring_nothing_until_keys_are_others(bench):
    here, there = bench(seed=1), bench(seed=2)
    here.publish(KEYS[:2], range(2))
    assert there.publish(KEYS[:1], [0]).has_differed
    before = there.memory.clone()
    failed, _ = there.load("b", KEYS[:2], [5, 6])
    assert failed == {5, 6} and torch.equal(there.memory, before) and there.counts()["pulled_blocks/isolated"] == 2
    here.publish([KEYS[7]], [3], "c")
    _, loaded, failed, report = there.run(loads=[Blocks("d", [KEYS[7]], [5])], is_isolated=True)
    failed, _ = there.settle("d", loaded, failed, report)
    assert not failed and torch.equal(there.memory[:, 5], here.memory[:, 3])


def test_loads_under_way_fail_with_the_difference(bench, monkeypatch):
    here, there = bench(seed=1), bench(seed=2)
    here.publish(KEYS[:2], range(2))
    pull, may_end = there.side.loader.pull, threading.Event()
    monkeypatch.setattr(there.side.loader, "pull", lambda *asked: may_end.wait(180) and pull(*asked))
    there.run(loads=[Blocks("b", KEYS[:2], [5, 6])])
    assert there.publish(KEYS[:1], [0]).has_differed
    may_end.set()
    failed, _ = there.settle("b")
    assert failed == {5, 6}


def test_only_what_the_request_computed_in_full_is_compared(bench):
    here, there = bench(seed=1), bench(seed=2)
    here.publish(KEYS[:4], range(4), tail_tokens=3)
    there.publish(KEYS[:3], range(3), found=3)
    there.publish(KEYS[:4], range(4), found=3, tail_tokens=3)
    assert not _audited(there)
    there.memory.copy_(here.memory)
    there.publish(KEYS[:3], range(3), found=2)
    assert _audited(there) == {"same": 1}


def test_a_share_is_compared_and_of_wanted_requests_all_batches(bench, monkeypatch):
    monkeypatch.setattr(audit, "_FIRST", 3)
    monkeypatch.setattr(audit, "_EVERY", 5)
    monkeypatch.setattr(audit, "_MOST_OF_BATCH", 4)
    here, there = bench(seed=1), bench(seed=1)
    here.publish(KEYS, range(BLOCKS))
    there.publish(KEYS, range(BLOCKS))
    assert _audited(there) == {"same": 5}, "0, 1, 2, 5 and 10"
    there.publish(KEYS, range(BLOCKS), "b", audited={"b"})
    assert _audited(there) == {"same": 4}
    there.publish(KEYS[:3], range(3), "c", audited={"c"})
    assert _audited(there) == {"same": 3}
    there.publish(KEYS[:4], range(4), "d", audited={"c"})
    assert _audited(there) == {"same": 1}, "the 30th"
    there.memory[:, 9] *= -1
    there.publish(KEYS, range(BLOCKS), "e", audited={"e"})
    assert _audited(there) == {"same": 3, "different": 1}, "blocks over the whole batch"


def test_of_many_blocks_the_first_ones_and_a_share_are_compared():
    made = audit.Audit(None, Tally(), {}, lambda: None)
    assert made._choose(list(range(1000)), False) == [*range(64), 256, 512, 768]
    assert made._choose(list(range(50)), False) == [24], "the 1024th"
    assert made._choose(list(range(320)), True) == list(range(0, 320, 10)), "of a request that is computed for the audit"


@pytest.mark.parametrize("is_wanted", (False, True))
def test_where_no_block_was_there_nothing_is_counted(is_wanted):
    tally = Tally()
    made = audit.Audit(None, tally, {}, lambda: None)
    made.look(None, frozenset(KEYS[:2]), is_wanted, SimpleNamespace(keys=KEYS[:2]), ["stored"] * 2)
    assert tally.take() is None


def test_blocks_that_are_only_compared_are_not_published(bench):
    here, there = bench(seed=1), bench(seed=1)
    here.publish(KEYS[:2], range(2))
    there.publish(KEYS[:4], range(4), only_audited=True)
    counted = there.counts()
    assert counted == {"audited_blocks/same": 2, "audited_blocks/absent": 2}
    assert here.access.call(lambda cache: cache.has(here.side.attachment.own[0].namespaces[0], KEYS[:4])) == [True, True, False, False]


def test_packed_formats_are_counted_and_not_compared(path, monkeypatch, caplog):
    class Packed(Audited):
        cache_dtype = "nvfp4"

        def _memory(self, shape, random) -> torch.Tensor:
            return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

    monkeypatch.setattr(audit, "_FIRST", 2)
    benches = [Packed(path, monkeypatch, seed=seed) for seed in (1, 2)]
    for each in benches:
        assert not each.side.handshake().audits
        each.publish(KEYS[:3], range(3))
    assert _audited(benches[1]) == {"not_comparable": 2}, "of three"
    assert "nvfp4 is packed" in caplog.text
    for each in benches:
        each.close()


def test_workers_say_whether_they_compare(bench, path, monkeypatch):
    assert bench().side.handshake().audits
    without = Bench(path, monkeypatch)
    assert not without.side.handshake().audits and without.side.attachment.own[0].audit is None
    without.close()


def test_an_error_of_the_pool_is_reported(bench, monkeypatch):
    here, there = bench(seed=1), bench(seed=2)
    here.publish(KEYS[:1], [0])

    def fail(*_):
        raise kvbm_cxl.TimeoutError_("late")

    monkeypatch.setattr(there.side.attachment.own[0].audit, "_mover", SimpleNamespace(pull=fail))
    there.publish(KEYS[:1], [0])
    assert "audit" in there.access.failures.last_error.doing and not _audited(there)


def test_no_block_is_compared_before_it_was_computed():
    waited = []
    batch, after = SimpleNamespace(keys=KEYS[:2]), SimpleNamespace(synchronize=lambda: waited.append(True))
    assert audit.FoundBlocks().publish(batch, None, after) == ["exists"] * 2 and waited == [True]
    assert audit.FoundBlocks().publish(batch, None) == ["exists"] * 2


def test_the_time_that_it_takes_is_measured(bench):
    here, there = bench(seed=1), bench(seed=1)
    here.publish(KEYS[:3], range(3))
    there.publish(KEYS[:3], range(3))
    times = there.side.take_stats().data["times"]["audit_seconds"]
    assert len(times) == 3 and all(0 < each < 600 for each in times)


@pytest.mark.parametrize(
    ("owner", "pool", "says"),
    (
        (SimpleNamespace(owner=3), SimpleNamespace(slot=5, incarnation=7), ("the host of slot 3 ", "is slot 5, incarnation 7, layout l")),
        (None, None, ("by a host that has left;", "this engine is layout l.")),
        (kvbm_cxl.TimeoutError_("late"), None, ("by a host that is unknown (late);", "this engine is layout l.")),
    ),
)
def test_what_can_be_known_of_both_engines_is_logged_once(caplog, owner, pool, says):
    """Also where two threads find a difference at once, and where the pool is lost by then."""

    def call(_):
        if isinstance(owner, Exception):
            raise owner
        return owner

    ended = []
    access = SimpleNamespace(pool=pool, spec="/the/pool", call=call)
    made = audit.Audit(access, Tally(), {"layout": "l"}, lambda: ended.append(True))
    found, limit = Difference(1.0, 0.5, 1.5), Difference(0.1, 0.1, 0.1)
    for _ in range(2):
        made._differs(SimpleNamespace(namespace="the namespace", limit=limit), KEYS[0], found)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    for said in (*says, KEYS[0].hex(), "the namespace", "/the/pool", str(found), str(limit)):
        assert said in record.getMessage()
    assert ended == [True] and made.has_differed


def test_scratch_memory_is_that_of_one_block():
    memory = torch.zeros((BLOCKS, TOKENS, HEADS, CONTENT)).transpose(1, 2)
    ((name, scratch),) = audit.scratch_of([("layers.0", memory)], BLOCKS)
    assert (name, scratch.shape, scratch.stride()[1:]) == ("layers.0", (1, HEADS, TOKENS, CONTENT), memory.stride()[1:])
    assert scratch.untyped_storage().nbytes() == 4 * TOKENS * HEADS * CONTENT
    ((_, scratch),) = audit.scratch_of([("layers.0", torch.zeros((3 * BLOCKS, TOKENS, CONTENT)))], BLOCKS)
    assert scratch.shape == (3, TOKENS, CONTENT), "a block of several pages"


def test_all_pages_of_a_block_are_compared_with_those_of_the_pool(monkeypatch):
    """One block at a time, since all are read to the same place."""
    monkeypatch.setattr(audit, "writer_of", lambda *_: SimpleNamespace(name="FLASH_ATTN/"))
    spec = FullAttentionSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
    memory = torch.randn((2 * BLOCKS, HEADS, TOKENS, CONTENT), generator=torch.Generator().manual_seed(1))
    group = Group(0, ("layers.0",), 2 * TOKENS, Kind.FULL)
    made = audit.group_audit(_vllm_config("auto"), spec, group, [("layers.0", memory)], BLOCKS)

    def pull(keys, parts):
        assert made._lock.locked() and (keys, parts) == ([KEYS[0]], [0])
        made.scratch[0][1].copy_(memory[10:12])
        return [None]

    made.read_by(SimpleNamespace(pull=pull), None)
    assert made.difference(KEYS[0], 5) == Difference(0, 0, 0) and made.difference(KEYS[0], 4).typical > 1
    memory[11] *= -1
    made.read_by(SimpleNamespace(pull=lambda *_: [None]), None)
    assert made.difference(KEYS[0], 5).farthest > 1, "the second page"


@pytest.mark.parametrize(
    ("changes", "is_exact"),
    (({}, True), ({"dtype": torch.bfloat16}, True), ({"quantization": "fp8"}, False), ({"is_multimodal_model": True}, False)),
)
def test_the_first_layer_is_exact_unless_the_batch_shapes_it(monkeypatch, changes, is_exact):
    monkeypatch.setattr(audit, "writer_of", lambda *_: SimpleNamespace(name="FLASH_ATTN/"))
    config, tensor = _vllm_config("auto"), torch.zeros((BLOCKS, HEADS, TOKENS, CONTENT))
    vars(config.model_config).update(changes)
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
    made = audit.group_audit(config, spec, Group(0, ("layers.0",), TOKENS, Kind.FULL), [("layers.0", tensor)], BLOCKS)
    assert made.limit == limit_of([tensor], config.model_config.dtype, is_exact)


def test_each_layer_of_a_group_is_read_as_its_own_specification_says(monkeypatch):
    """Some have tokens; latents, which have no heads, and layers without keys are one vector."""
    monkeypatch.setattr(audit, "writer_of", lambda *_: SimpleNamespace(name="FLASH_ATTN/"))
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 4, dtype=torch.float32)
    plain, latents = torch.zeros((BLOCKS, HEADS, TOKENS, CONTENT)), torch.zeros((BLOCKS, TOKENS, CONTENT))
    tensors = {"layers.0": plain, "layers.1": latents, "layers.2": plain}
    specs = SimpleNamespace(kv_cache_specs={"layers.0": spec, "layers.1": spec, "layers.2": SimpleNamespace()})
    made = audit.group_audit(_vllm_config("auto"), specs, Group(0, tuple(tensors), TOKENS, Kind.FULL), list(tensors.items()), BLOCKS)
    assert [each.page_tokens for each in made.layers] == [TOKENS, 0, 0]
    assert made.layers[0].rows[0, 0].tolist() == [0] * (CONTENT // 4) + [1] * (CONTENT - CONTENT // 4)


@pytest.mark.parametrize(("name", "is_first"), (("model.layers.0.attn", True), ("model.layers.1.attn", False)))
def test_the_first_layer_is_known_by_its_name(monkeypatch, name, is_first):
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
    monkeypatch.setattr(audit, "writer_of", lambda *_: SimpleNamespace(name="FLASH_ATTN/"))
    plain, latents = torch.zeros((BLOCKS, HEADS, TOKENS, CONTENT)), torch.zeros((BLOCKS, TOKENS, CONTENT))
    for is_draft, tensor in product((False, True), (plain, latents)):
        group = Group(0, (name,), TOKENS, Kind.FULL, is_draft=is_draft)
        made = audit.group_audit(_vllm_config("auto"), spec, group, [(name, tensor)], BLOCKS)
        assert made.layers[0].is_first == (is_first and not is_draft)


def test_states_are_read_as_their_specification_says():
    """And not compared where they lie in memory such that they cannot be read: in the engine's or in that which the pool's is read into."""
    spec = SimpleNamespace(shapes=((2, 2), (3,)), dtypes=(torch.float32, torch.bfloat16))
    group, config = Group(0, ("layers.0",), TOKENS, Kind.STATE), _vllm_config("auto")
    pages = torch.zeros((BLOCKS, 1, 1, 24), dtype=torch.int8)
    made = audit.group_audit(config, spec, group, [("layers.0", pages)], BLOCKS)
    assert [each.dtype for each in made.tensors] == [each.dtype for each in made.numbers] == [torch.float32, torch.bfloat16]
    assert [each.page_tokens for each in made.layers] == [0, 0]
    for size, stride in ((24, 26), (26, 28)):
        pages = torch.zeros(BLOCKS * stride, dtype=torch.int8).as_strided((BLOCKS, 1, 1, size), (stride, stride, stride, 1))
        assert audit.group_audit(config, spec, group, [("layers.0", pages)], BLOCKS) is None


def test_the_backend_is_asked_where_tokens_lie_on_cpus_alone(monkeypatch):
    monkeypatch.setattr(audit, "writer_of", lambda *_: pytest.fail("asked"))
    spec, tensor = SimpleNamespace(head_size=CONTENT // 2), torch.zeros((1, HEADS, TOKENS, CONTENT), device="meta")
    assert audit.layer_rows(None, "layers.0", tensor, spec, True).page_tokens == TOKENS


# Blocks that lie in several cells of the pool


@pytest.mark.parametrize(("tp_size", "block_tokens", "order"), ((1, 128, HNC), (2, 64, NHC), (4, 32, HNC)))
def test_blocks_in_several_cells_are_compared_whole(make_pool, monkeypatch, tp_size, block_tokens, order):
    """Some of the heads each, and some of the tokens."""
    pool = make_pool(size="96M", cells="128K:60%")
    config_of = test_stored_blocks._vllm_config

    def config(**options):
        made = config_of(**options)
        made.model_config.is_multimodal_model = False
        return made

    monkeypatch.setattr(test_stored_blocks, "_vllm_config", config)
    monkeypatch.setattr(audit, "writer_of", lambda *_: cpu_writer(DTYPE) if order == HNC else plain_writer(DTYPE))
    made = [
        Engine(pool, monkeypatch, tp_size=ranks, block_tokens=tokens, order=order, audit=audits, **STORED)
        for ranks, tokens, audits in ((4, 32, False), (tp_size, block_tokens, True))
    ]
    publisher, other = made
    publisher.publish(1)
    other.publish(1)
    blocks = tp_size * SEQUENCE // 32
    assert other.counts()["audited_blocks/same"] == blocks
    # One token of each part of the third block of the pool.
    for rank in other.ranks:
        keys, values = keys_and_values(32, rank.engine.heads, DTYPE, seed=5)
        slots = other.slots(1)[2 * 32 : 3 * 32]
        written(other.writer, rank.memory[0], keys, values, slots)
        rank.run(9, saves=[replace(other.blocks(1, SEQUENCE), request_id="again")], audited={"again"})
        rank.side.saver.saves.wait(["again"])
    assert other.counts() | {"published_blocks/exists": 0} == {"published_blocks/exists": 0, **_one_differs(tp_size)}
    for each in made:
        each.close()


def _one_differs(ranks: int) -> dict[str, int]:
    """The first two blocks, and then it is over."""
    return {"audited_blocks/same": 2 * ranks, "audited_blocks/different": ranks}
