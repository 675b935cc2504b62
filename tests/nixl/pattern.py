# SPDX-License-Identifier: Apache-2.0
"""Bytes of which every 8-byte word is different for every seed and place, so that a wrong, old or shifted byte shows."""

import numpy

MULTIPLIER = numpy.uint64(0x9E3779B97F4A7C15)
# Words that one seed has; seeds below 2^24 share none.
SEED_WORDS = 40


def pattern(seed, len_bytes, first_byte=0):
    """`len_bytes` bytes of the pattern of `seed`, beginning at its byte `first_byte`."""
    first, last = first_byte // 8, -(-(first_byte + len_bytes) // 8)
    numbers = numpy.arange(first + 1, last + 1, dtype=numpy.uint64) + numpy.uint64((seed + 1) << SEED_WORDS)
    with numpy.errstate(over="ignore"):
        return (numbers * MULTIPLIER).view(numpy.uint8)[first_byte - first * 8 :][:len_bytes]


def expected(seed, len_bytes, pieces):
    """The pattern of `seed` with pieces of others in it: rows (at, length, other seed, from), all in bytes."""
    content = pattern(seed, len_bytes).copy()
    for at, length, other, start in pieces:
        content[at : at + length] = pattern(other, length, start)
    return content


def expected_of_list(seed, len_bytes, other, at, start, length):
    """The same for many pieces of one length and one other seed: `at` and `start` are arrays of places."""
    content = pattern(seed, len_bytes).copy()
    source = pattern(other, int(start.max()) + length)
    within = numpy.arange(length)
    content[at[:, None] + within] = source[start[:, None] + within]
    return content


def differences(found, wanted):
    """"" if the bytes are equal, else how many differ and where the first is."""
    wrong = numpy.flatnonzero(found != wanted)
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return f"{wrong.size} of {wanted.size} bytes differ, the first at {first}: {found[first]} instead of {wanted[first]}"
