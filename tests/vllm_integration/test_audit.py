# SPDX-License-Identifier: Apache-2.0
"""Blocks of the pool are compared with what was computed: how far is far, which blocks, and what follows."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import kvbm_cxl
import pytest
import test_stored_blocks
import torch
from kvbm_cxl.vllm_integration import audit
from kvbm_cxl.vllm_integration.block_difference import Difference, LayerRows, difference, limit_of, numbers_of, states_of
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.groups import Group, Kind
from kvbm_cxl.vllm_integration.metadata import Blocks, WorkerReport
from kvbm_cxl.vllm_integration.token_places import PageWriter, rows_of_page
from pages import cpu_writer, empty, keys_and_values, plain_writer, written
from test_stored_blocks import DTYPE, HNC, NHC, STORED, Engine
from test_stored_blocks import TOKENS as SEQUENCE
from test_worker_side import BLOCKS, CONTENT, HEADS, KEYS, TOKENS, Bench
from vllm.v1.kv_cache_interface import FullAttentionSpec

SHAPE = (1, 2, 16, 64)


def _page(seed: int, shape=SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _difference(here: torch.Tensor, there: torch.Tensor, is_first: bool = True) -> Difference:
    return difference([LayerRows.of_tokens(here, None, 32, is_first)], [here], [there])


# How far two blocks are from each other


def test_equal_blocks_do_not_differ():
    page = _page(1)
    page[0, 0, 3, 5], page[0, 1, 4, 6] = float("nan"), float("inf")
    assert _difference(page, page.clone()) == Difference(0, 0, 0)


def test_unrelated_blocks_are_far_from_each_other():
    found = _difference(_page(1), _page(2))
    assert found.typical == found.first_layer and 1.2 < found.typical < 1.6 < found.farthest + 0.2


def test_some_tokens_with_another_expert_are_not_typical():
    page, other = _page(1), _page(1)
    other[:, :, :5] = _page(2)[:, :, :5]
    found = _difference(page, other)
    assert found.typical == 0 and found.farthest > 1, "in the first layer, where no expert comes before, they are"
    assert _difference(page, other, is_first=False) == Difference(0, 0, 0)


def test_some_channels_of_all_tokens_are_typical():
    """As where rows of a projection differ; of the keys alone, too."""
    page, other = _page(1), _page(1)
    other[:, :, :, 30:32] *= -1
    assert _difference(page, other, is_first=False).typical > 0.2


@pytest.mark.parametrize("values", (slice(0, 32), slice(32, 64)))
def test_keys_and_values_do_not_hide_each_other(values):
    page, other = _page(1), _page(1)
    page[..., values] *= 0.01
    other[..., values] = page[..., values] * -1
    other[..., [at for at in range(64) if not values.start <= at < values.stop]] = page[
        ..., [at for at in range(64) if not values.start <= at < values.stop]
    ]
    assert _difference(page, other, is_first=False).typical > 1


def test_the_layer_that_differs_most_counts():
    layers = [LayerRows.of_tokens(_page(1), None, 32, at == 1) for at in range(3)]
    here = [_page(at) for at in range(3)]
    there = [page.clone() for page in here]
    there[2] = _page(9)
    assert (found := difference(layers, here, there)).typical > 1 and found.first_layer == found.farthest == 0
    there[1], there[2] = there[2], here[2]
    assert difference(layers, here, there).first_layer > 1


def test_next_to_nothing_is_not_far_from_nothing():
    page = _page(1)
    page[:, :, 4] = 0
    other = page.clone()
    other[:, :, 4] = 1e-6
    assert _difference(page, other).farthest < 0.001


def test_a_number_that_is_not_finite_in_one_of_them_is_far():
    page, other = _page(1), _page(1)
    other[0, 0, 7, 1] = float("nan")
    assert _difference(page, other).farthest == 2


def test_a_state_is_one_vector():
    states = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(1))
    rows = LayerRows.of_state(states, True)
    assert rows.distances(states, states).tolist() == [[0.0]]
    assert rows.distances(states, -states).item() == pytest.approx(2)


def test_one_part_of_a_block_is_compared():
    """Where a block of vLLM's is several in the pool, tokens of the others are not those of this one."""
    here = [_page(1, (2, 2, 16, 64))]
    there = [here[0].clone()]
    there[0][1, :, 8:] = _page(2, (2, 2, 16, 64))[1, :, 8:]
    rows = [LayerRows.of_tokens(here[0], None, 32, True)]
    assert [difference(rows, here, there, part, 4).farthest > 1 for part in range(4)] == [False, False, False, True]
    assert [difference(rows, here, there, part, 2).typical > 1 for part in range(2)] == [False, False], "half of its tokens"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_backend_says_where_a_token_lies(dtype):
    """On CPUs keys lie packed over all tokens of a page."""
    writer, page = cpu_writer(dtype), torch.zeros((1, 2, 32, 64), dtype=dtype)
    rows = rows_of_page(page, writer)
    keys, values = torch.zeros(32, 2, 32, dtype=dtype), torch.zeros(32, 2, 32, dtype=dtype)
    keys[11] = 1
    values[17] = 2
    writer.write(keys, values, page, torch.arange(32))
    assert rows[page[0] == 1].unique().tolist() == [22] and rows[page[0] == 2].unique().tolist() == [35]
    assert int((rows == 22).sum()) == int((rows == 35).sum()) == 64


@pytest.mark.parametrize("order", ((1, 2, 3), (2, 1, 3), (3, 1, 2)))
def test_rows_are_those_of_the_dimensions_whatever_lies_first_in_memory(order):
    page = empty(1, 3, 16, torch.float32, order)
    assert torch.equal(rows_of_page(page, plain_writer(torch.float32)), LayerRows.of_tokens(page, None, 32, True).rows)


def test_a_backend_that_changes_numbers_is_refused():
    def write(keys, values, cache, slots):
        cache.fill_(40)

    with pytest.raises(ConfigError, match="changes numbers"):
        rows_of_page(torch.zeros((1, 1, 4, 8)), PageWriter(write, 4, 4, torch.float32, "odd"))


@pytest.mark.parametrize(
    ("dtype", "name", "read"),
    (
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.uint8, "fp8", torch.float8_e4m3fn),
        (torch.uint8, "fp8_e5m2", torch.float8_e5m2),
        (torch.float8_e4m3fn, "fp8", torch.float8_e4m3fn),
        (torch.uint8, "fp8_ds_mla", None),
        (torch.uint8, "nvfp4", None),
        (torch.int8, "int8_per_token_head", None),
    ),
)
def test_formats_that_can_be_read(dtype, name, read):
    found = numbers_of(torch.zeros(SHAPE, dtype=dtype), name)
    assert (found.dtype if found is not None else None) == read


def test_states_lie_one_after_the_other_in_bytes():
    shapes, dtypes = ((2, 3), (4,)), (torch.bfloat16, torch.float32)
    pages = torch.zeros((5, 1, 1, 32), dtype=torch.int8)
    first, second = states_of(pages, shapes, dtypes)
    first[3], second[3] = 1.5, torch.tensor([1.0, 2, 3, 4])
    assert pages[3, 0, 0, :12].view(torch.bfloat16).tolist() == [1.5] * 6
    assert pages[3, 0, 0, 12:28].view(torch.float32).tolist() == [1, 2, 3, 4] and not pages[:3].any() and not pages[3, 0, 0, 28:].any()


@pytest.mark.parametrize(
    ("size", "dtype", "shapes", "dtypes"),
    (
        ((5, 1, 1, 8), torch.int8, ((3,),), (torch.float32,)),
        ((5, 2, 1, 8), torch.int8, ((2,),), (torch.float32,)),
        ((5, 1, 1, 8), torch.bfloat16, ((2,),), (torch.float32,)),
        ((5, 1, 1, 8), torch.int8, ((1,), (1,)), (torch.bfloat16, torch.float32)),
        ((5, 1, 1, 8), torch.int8, ((2,),), (torch.int32,)),
    ),
)
def test_states_that_lie_otherwise_are_not_compared(size, dtype, shapes, dtypes):
    assert states_of(torch.zeros(size, dtype=dtype), shapes, dtypes) is None


def test_the_coarsest_format_decides_what_is_far():
    half, eighth = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float8_e4m3fn)
    single = limit_of([torch.zeros(1)], torch.float32)
    assert single.typical < limit_of([half], torch.bfloat16).typical < limit_of([eighth], torch.bfloat16).typical < 0.5
    assert limit_of([torch.zeros(1)], torch.bfloat16) == limit_of([half], torch.float32)
    exact, depends = limit_of([half], torch.bfloat16), limit_of([half], torch.bfloat16, is_exact=False)
    assert exact.first_layer < depends.first_layer == depends.typical


def test_any_figure_beyond_its_limit_counts():
    limit = Difference(0.1, 0.01, 0.2)
    assert not Difference(0.1, 0.01, 0.2).exceeds(limit)
    for beyond in (Difference(0.11, 0, 0), Difference(0, 0.011, 0), Difference(0, 0, 0.21)):
        assert beyond.exceeds(limit)


# Which blocks


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
    assert _audited(there) == {"same": 4} and not caplog.records


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

    benches = [Packed(path, monkeypatch, seed=seed) for seed in (1, 2)]
    for each in benches:
        assert not each.side.handshake().audits
        each.publish(KEYS[:3], range(3))
    assert _audited(benches[1]) == {"not_comparable": 3}
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


def test_scratch_memory_is_that_of_one_block():
    memory = torch.zeros((BLOCKS, TOKENS, HEADS, CONTENT)).transpose(1, 2)
    ((name, scratch),) = audit.scratch_of([("layers.0", memory)], BLOCKS)
    assert (name, scratch.shape, scratch.stride()[1:]) == ("layers.0", (1, HEADS, TOKENS, CONTENT), memory.stride()[1:])
    assert scratch.untyped_storage().nbytes() == 4 * TOKENS * HEADS * CONTENT


@pytest.mark.parametrize(("name", "is_first"), (("model.layers.0.attn", True), ("model.layers.1.attn", False)))
def test_the_first_layer_is_known_by_its_name(monkeypatch, name, is_first):
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
    monkeypatch.setattr(audit, "writer_of", lambda *_: SimpleNamespace(name="FLASH_ATTN/"))
    tensors = [(name, torch.zeros((BLOCKS, HEADS, TOKENS, CONTENT)))]
    for is_draft in (False, True):
        group = Group(0, (name,), TOKENS, Kind.FULL, is_draft=is_draft)
        made = audit.group_audit(_vllm_config("auto"), spec, group, tensors, BLOCKS)
        assert made.layers[0].is_first == (is_first and not is_draft)


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
