# SPDX-License-Identifier: Apache-2.0
"""Stands in for torch where NIXL imports it without needing it (wheel 1.3.2, and NIXL's own Python tests): arrays that are in no GPU."""

import numpy

from . import cuda, version

__all__ = ["Tensor", "arange", "cuda", "transpose", "version"]


class Tensor:
    """What NIXL asks `isinstance` about, and whether it is contiguous."""

    def __init__(self, array):
        self._array = array

    def __getitem__(self, index):
        return Tensor(self._array[index])

    def reshape(self, *shape):
        """The same elements in another shape."""
        return Tensor(self._array.reshape(shape))

    def is_contiguous(self):
        """Whether the elements follow one another in memory."""
        return self._array.flags.c_contiguous


def arange(count):
    """The numbers below `count`."""
    return Tensor(numpy.arange(count))


def transpose(tensor, first, second):
    """The same elements with two axes swapped, without a copy."""
    return Tensor(tensor._array.swapaxes(first, second))
