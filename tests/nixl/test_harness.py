# SPDX-License-Identifier: Apache-2.0
"""What these tests rely on: a wrong byte is noticed wherever it is, and a worker that hangs or dies fails its test in time."""

import time

import numpy
import pytest
import wheels
from hosts import Host, Unresponsive, WorkerError
from pattern import differences, expected, expected_of_list, pattern


def test_no_word_is_like_another():
    words = numpy.concatenate([pattern(seed, 1 << 16).view(numpy.uint64) for seed in range(40)])
    assert len(numpy.unique(words)) == words.size


@pytest.mark.parametrize(("length", "first"), [(1, 0), (100, 3), (4096, 8), (17, 8191)])
def test_a_part_of_a_pattern_is_that_part(length, first):
    assert (pattern(7, length, first) == pattern(7, 10_000)[first : first + length]).all()


@pytest.mark.parametrize("place", [0, 99, 100, 299, 300, 999])
def test_one_wrong_byte_is_noticed(place):
    wanted = expected(1, 1000, [(100, 200, 2, 50)])
    found = wanted.copy()
    assert differences(found, wanted) == ""
    found[place] ^= 1
    assert f"1 of 1000 bytes differ, the first at {place}" in differences(found, wanted)


def test_bytes_of_another_place_or_time_are_noticed():
    wanted = expected(1, 1000, [(96, 200, 2, 48)])
    assert differences(expected(1, 1000, [(96, 200, 2, 56)]), wanted), "shifted by a word"
    assert differences(expected(1, 1000, [(104, 200, 2, 48)]), wanted), "put a word too late"
    assert differences(expected(1, 1000, [(96, 200, 3, 48)]), wanted), "of another buffer"
    assert differences(pattern(1, 1000), wanted), "not moved at all"


def test_a_list_is_the_pieces_it_is_made_of():
    at, start = numpy.array([0, 400, 200]), numpy.array([10, 90, 333])
    one_by_one = expected(1, 1000, [(int(to), 77, 2, int(source)) for to, source in zip(at, start, strict=True)])
    assert differences(expected_of_list(1, 1000, 2, at, start, 77), one_by_one) == ""


@pytest.fixture
def host(folder):
    made = Host(folder, wheels.DEFAULT)
    yield made
    made.discard()


def test_a_worker_that_hangs_is_given_up(host):
    start = time.monotonic()
    with pytest.raises(Unresponsive, match="no answer within 1 s"):
        host.call("cpu_s", 30, call_timeout_s=1)
    assert time.monotonic() - start < 10


def test_a_worker_that_dies_is_reported(host):
    host.begin("cpu_s", 30)
    host.kill()
    with pytest.raises(Unresponsive, match="gone"):
        host.end(10)


def test_what_fails_in_a_worker_fails_here(host):
    with pytest.raises(WorkerError, match="no-such-buffer") as failed:
        host.fill("no-such-buffer", 1)
    assert failed.value.kind == "KeyError"
