# SPDX-License-Identifier: Apache-2.0
"""The order in which objects of the second level are trimmed, whatever happens while its store is listed."""

import time

import pytest
from kvbm_cxl.l2.index import Index
from kvbm_cxl.l2.objects import HEADER_BYTES
from kvbm_cxl.l2.stores import Stored
from pools import chain
from second_level import name_of

LEN_BYTES = HEADER_BYTES + 10
NAMES = [name_of(key) for key in chain(5)]


def listed(*names, written_s=lambda place: float(place), between=()):
    """A listing of objects, written in this order. `between`: pairs of a place and what happens before the listing comes there."""
    doing = dict(between)
    for place, name in enumerate(names):
        if work := doing.pop(place, None):
            work()
        yield Stored(name.path, LEN_BYTES, written_s(place))
    for work in doing.values():
        work()


def order(index: Index) -> list:
    """Names, those first that are trimmed first."""
    found = []
    while name := index.take_oldest_beyond(0):
        found.append(name)
    assert index.total_bytes == 0 and len(index) == 0
    return found


@pytest.fixture
def index() -> Index:
    made = Index()
    made.look_through(listed(*NAMES[:4]))
    assert len(made) == 4 and made.total_bytes == 4 * LEN_BYTES
    return made


@pytest.mark.parametrize("place", (0, 1, 2, 4))
def test_a_promotion_during_a_listing_counts(index, place):
    index.look_through(listed(*NAMES[:4], between=[(place, lambda: index.note_use(NAMES[1]))]))
    assert order(index) == [NAMES[0], NAMES[2], NAMES[3], NAMES[1]]


def test_promotions_during_a_listing_keep_their_order(index):
    def promoted():
        for place in (0, 2, 1, 2, 0):
            index.note_use(NAMES[place])

    index.look_through(listed(*NAMES[:4], between=[(3, promoted)]))
    assert order(index) == [NAMES[3], NAMES[1], NAMES[2], NAMES[0]]


def test_a_promotion_counts_where_the_store_does_not_note_it(index):
    index.note_use(NAMES[0])
    for _ in range(2):
        index.look_through(listed(*NAMES[:4]))
    assert order(index) == [NAMES[1], NAMES[2], NAMES[3], NAMES[0]]
    index.look_through(listed(*NAMES[:4]))
    assert order(index) == NAMES[:4], "an object of the same name that comes later is another one"


def test_what_is_written_after_a_promotion_is_younger(index):
    index.note_use(NAMES[0])
    index.look_through(listed(*NAMES[:4], written_s=lambda place: time.time() + 60 if place == 2 else 0.0))
    assert order(index)[-2:] == [NAMES[0], NAMES[2]]


def test_what_came_and_went_during_a_listing_stays_so(index):
    def changed():
        index.add(NAMES[4], LEN_BYTES)
        index.remove(NAMES[2])
        assert index.take_oldest_beyond(3 * LEN_BYTES) == NAMES[0]

    index.look_through(listed(*NAMES[:4], between=[(1, changed)]))
    assert NAMES[0] not in index and NAMES[2] not in index and index.total_bytes == 3 * LEN_BYTES
    assert order(index) == [NAMES[1], NAMES[3], NAMES[4]]


def test_objects_of_the_same_time_keep_their_order(index):
    index.note_use(NAMES[0])
    later_s = time.time() + 60
    for _ in range(2):
        index.look_through(listed(*reversed(NAMES[:4]), written_s=lambda _: later_s))
    assert order(index) == [NAMES[1], NAMES[2], NAMES[3], NAMES[0]]


def test_nothing_goes_while_the_bound_holds(index):
    assert index.take_oldest_beyond(4 * LEN_BYTES) is None and len(index) == 4
    assert index.take_oldest_beyond(4 * LEN_BYTES - 1) == NAMES[0] and index.take_oldest_beyond(3 * LEN_BYTES) is None


def test_a_listing_that_fails_changes_nothing(index):
    def fails():
        index.note_use(NAMES[1])
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="the store is gone"):
        index.look_through(listed(*NAMES[2:], between=[(1, fails)]))
    assert order(index) == [NAMES[0], NAMES[2], NAMES[3], NAMES[1]]


def test_the_use_of_an_object_that_is_gone_is_forgotten(index):
    for name in NAMES[:2]:
        index.note_use(name)
    index.remove(NAMES[0])
    index.look_through(listed(*NAMES[:1], *NAMES[2:4]))
    assert order(index) == [NAMES[0], NAMES[2], NAMES[3]] and not index._used_s


def test_what_is_unused_or_no_block_is_not_remembered(index):
    index.note_use(NAMES[4])
    index.look_through([Stored("not/ours", LEN_BYTES, 1.0), Stored(NAMES[4].path, HEADER_BYTES - 1, 1.0)])
    assert len(index) == 0 and not index._used_s and index.leading([NAMES[0].namespace], [NAMES[0].key]) == 0
