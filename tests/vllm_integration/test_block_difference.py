# SPDX-License-Identifier: Apache-2.0
"""How far a block of the pool is from the same block as it was computed, and how far is too far."""

import pytest
import torch
from kvbm_cxl.vllm_integration.block_difference import Difference, LayerRows, difference, limit_of, numbers_of, states_of
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.token_places import PageWriter, rows_of_page
from pages import cpu_writer, empty, plain_writer

SHAPE = (1, 2, 16, 64)


def _page(seed: int, shape=SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _difference(here: torch.Tensor, there: torch.Tensor, is_first: bool = True) -> Difference:
    return difference([LayerRows.of_tokens(here, None, 32, is_first)], [here], [there])


def test_equal_blocks_do_not_differ():
    page = _page(1)
    page[0, 0, 3, 5], page[0, 1, 4, 6] = float("nan"), float("inf")
    assert _difference(page, page.clone()) == Difference(0, 0, 0)
    assert _difference(torch.zeros(SHAPE), torch.zeros(SHAPE)) == Difference(0, 0, 0)


def test_unrelated_blocks_are_far_from_each_other():
    found = _difference(_page(1), _page(2))
    assert found.typical == found.first_layer and 1.2 < found.typical < 1.6 < found.farthest + 0.2


def test_neither_block_is_the_measure():
    page = _page(1)
    assert _difference(page, 3 * page).typical == _difference(3 * page, page).typical == pytest.approx(2 / 5**0.5)


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
    assert (found := difference(layers, here, there)).typical == found.first_layer > 1


def test_next_to_nothing_is_not_far_from_nothing():
    page = _page(1)
    page[:, :, 4] = 0
    other = page.clone()
    other[:, :, 4] = 1e-6
    assert _difference(page, other).farthest < 0.001


def test_a_token_that_is_short_counts_as_one_of_a_tenth_of_the_length():
    page = _page(1)
    page[:, :, 4] *= 0.2
    other = page.clone()
    other[:, :, 4] *= -1
    assert _difference(page, other).farthest == pytest.approx(2, rel=0.01)


def test_a_number_that_is_not_finite_in_one_of_them_is_far():
    page, other = _page(1), _page(1)
    other[0, 0, 7, 1] = float("nan")
    assert _difference(page, other).farthest == _difference(other, page).farthest == 2


def test_infinite_numbers_in_both_of_them_hide_no_other_token():
    page, other = _page(1), _page(2)
    page[0, 0, 7, 1] = other[0, 0, 7, 1] = float("inf")
    other[..., 32:] = page[..., 32:]
    assert _difference(page, other).typical > 1, "by the keys alone"


def test_a_state_is_one_vector():
    states = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(1))
    rows = LayerRows.of_state(states, True)
    assert rows.distances(states, states).tolist() == [[0.0]]
    assert rows.distances(states, -states).item() == pytest.approx(2)
    two = torch.cat((states, states))
    assert rows.distances(two, torch.cat((states, -states))).item() == pytest.approx(2**0.5), "over all pages of the block"
    assert [difference([LayerRows.of_state(states, each)], [states], [-states]).farthest > 1 for each in (True, False)] == [True, False]


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
        (torch.uint8, "fp8_e4m3", torch.float8_e4m3fn),
        (torch.uint8, "fp8_e5m2", torch.float8_e5m2),
        (torch.int8, "fp8", torch.float8_e4m3fn),
        (torch.float8_e4m3fn, "fp8", torch.float8_e4m3fn),
        (torch.uint8, "fp8_ds_mla", None),
        (torch.uint8, "nvfp4", None),
        (torch.int8, "int8_per_token_head", None),
        (torch.int32, "auto", None),
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
        ((5, 1, 1, 10), torch.int8, ((2,),), (torch.float32,)),
    ),
)
def test_states_that_lie_otherwise_are_not_compared(size, dtype, shapes, dtypes):
    assert states_of(torch.zeros(size, dtype=dtype), shapes, dtypes) is None


def test_the_coarsest_format_decides_what_is_far():
    half, eighth = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float8_e4m3fn)
    single = limit_of([torch.zeros(1)], torch.float32)
    assert single.typical < limit_of([half], torch.bfloat16).typical < limit_of([eighth], torch.bfloat16).typical < 0.5
    assert limit_of([torch.zeros(1)], torch.bfloat16) == limit_of([half], torch.float32) == limit_of([half], torch.bfloat16)
    exact, depends = limit_of([half], torch.bfloat16), limit_of([half], torch.bfloat16, is_exact=False)
    assert exact.first_layer < depends.first_layer == depends.typical


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
def test_every_format_that_can_be_read_has_limits(dtype):
    limit = limit_of([torch.zeros(1, dtype=dtype)], dtype)
    assert 0 < limit.first_layer < limit.typical < limit.farthest < 1


def test_any_figure_beyond_its_limit_counts():
    limit = Difference(0.1, 0.01, 0.2)
    assert not Difference(0.1, 0.01, 0.2).exceeds(limit)
    for beyond in (Difference(0.11, 0, 0), Difference(0, 0.011, 0), Difference(0, 0, 0.21)):
        assert beyond.exceeds(limit)
