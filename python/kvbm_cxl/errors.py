# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each says what failed, where, and what to do; `kind` is one word for programs.

None of them ever means that data may be wrong: doubt about a block is a miss.
"""


class CxlError(Exception):
    """Base of all; `kind` tells them apart more finely than the class."""

    kind: str = "error"


class InvalidError(CxlError, ValueError):
    """An argument that can never work (kinds: invalid, out_of_range)."""

    kind = "invalid"


class NotFoundError(CxlError, LookupError):
    """No object of that name."""

    kind = "not_found"


class ExistsError(CxlError):
    """The name is taken, or the cache of the pool is open already."""

    kind = "exists"


class FullError(CxlError):
    """Nothing is left of something bounded: cells (no_cell), hints (no_hint), a namespace's quota (over_quota), pins and others (full)."""

    kind = "full"


class TimeoutError_(CxlError, TimeoutError):
    """A deadline passed."""

    kind = "timeout"


class FencedError(CxlError):
    """This host was taken for dead: the outcome of the call is unknown. The host joins again by itself; look, then try again."""

    kind = "fenced"


class ClosedError(CxlError):
    """The handle was closed."""

    kind = "closed"


class ForkedError(ClosedError):
    """The handle was opened by the parent of this process, and only that process may act under its identity."""

    kind = "forked"


class DeviceError(CxlError):
    """The memory failed (kinds: device_lost, poisoned, no_address)."""

    kind = "device_lost"


class DamagedError(CxlError):
    """Metadata of the pool does not verify: run `cxlctl fsck`."""

    kind = "bad_line"


class NotAPoolError(CxlError):
    """The devices cannot be opened as a pool, or hold something already."""

    kind = "not_a_pool"


class ReplacedError(CxlError):
    """The pool was formatted again under this handle: close it and open it again."""

    kind = "replaced"


class SlotInUseError(CxlError):
    """The host slot asked for belongs to another machine."""

    kind = "slot_in_use"


class SystemError_(CxlError, OSError):
    """The operating system refused."""

    kind = "os"


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, CxlError)]
