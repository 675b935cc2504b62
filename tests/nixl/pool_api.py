# SPDX-License-Identifier: Apache-2.0
"""The calls of the pool's C interface that these tests need, through ctypes."""

import ctypes
import os

from wheels import ROOT

LIBRARY = ROOT / "target" / "release" / "libcxl_shm.so"
FORMAT_FORCE, FORMAT_COHERENT = 1, 2
OPEN_READ_ONLY, OPEN_NO_JOIN = 1, 2


class FormatOptions(ctypes.Structure):
    """cxl_shm_format_options_t"""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *[(name, ctypes.c_uint32) for name in ("flags", "slots", "seats", "locks", "objects", "reserved")],
        *[(name, ctypes.c_uint64) for name in ("chunk_bytes", "stripe_bytes", "cell_bytes")],
        *[(name, ctypes.c_uint32) for name in ("cells_percent", "reserved2")],
    ]


class Options(ctypes.Structure):
    """cxl_shm_options_t"""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        *[(name, ctypes.c_uint64) for name in ("timeout_ms", "join_timeout_ms", "heartbeat_ms", "suspect_ms")],
    ]


class PoolError(RuntimeError):
    """A call of the library failed."""


def _load():
    library = ctypes.CDLL(str(LIBRARY))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures = {
        "cxl_shm_last_error": (ctypes.c_char_p, []),
        "cxl_shm_format": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(FormatOptions)]),
        "cxl_shm_open": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(Options), ctypes.POINTER(pointer)]),
        "cxl_shm_close": (ctypes.c_int, [pointer]),
        "cxl_shm_alloc": (ctypes.c_int, [pointer, size, ctypes.c_uint32, ctypes.POINTER(pointer)]),
        "cxl_shm_free": (ctypes.c_int, [pointer]),
        "cxl_shm_get_offset": (ctypes.c_uint64, [pointer]),
        "cxl_shm_get_range": (ctypes.c_int, [pointer, ctypes.c_uint64, size, ctypes.POINTER(pointer)]),
        "cxl_shm_copy_in": (ctypes.c_int, [pointer, pointer, size]),
        "cxl_shm_copy_out": (ctypes.c_int, [pointer, pointer, size]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class PoolHandle:
    """An open pool."""

    def __init__(self, spec, flags=0):
        self.library = _load()
        options = Options(struct_size=ctypes.sizeof(Options), flags=flags)
        self.handle = ctypes.c_void_p()
        self._done(self.library.cxl_shm_open(spec.encode(), options, ctypes.byref(self.handle)), f"open {spec}")

    def _done(self, status, what):
        if status:
            raise PoolError(f"{what}: {status} {self.library.cxl_shm_last_error().decode()}")

    def alloc(self, len_bytes, flags=0):
        """The address of a new block in this process."""
        block = ctypes.c_void_p()
        self._done(self.library.cxl_shm_alloc(self.handle, len_bytes, flags, ctypes.byref(block)), f"alloc {len_bytes} bytes")
        return block.value

    def free(self, address):
        self._done(self.library.cxl_shm_free(address), "free")

    def address(self, offset, len_bytes):
        """The address in this process of a range of the pool."""
        found = ctypes.c_void_p()
        self._done(self.library.cxl_shm_get_range(self.handle, offset, len_bytes, ctypes.byref(found)), f"find offset {offset}")
        return found.value

    def offset(self, address):
        return self.library.cxl_shm_get_offset(address)

    def copy_in(self, address, data):
        """Writes a numpy array past the caches."""
        self._done(self.library.cxl_shm_copy_in(address, data.ctypes.data, data.nbytes), "copy in")

    def copy_out(self, data, address):
        """Reads what is in the memory now to a numpy array."""
        self._done(self.library.cxl_shm_copy_out(data.ctypes.data, address, data.nbytes), "copy out")

    def close(self):
        self._done(self.library.cxl_shm_close(self.handle), "close")


def format_pool(spec, flags=0, **options):
    """Formats a pool; `spec` may carry `,size=`."""
    library = _load()
    how = FormatOptions(struct_size=ctypes.sizeof(FormatOptions), flags=flags | FORMAT_FORCE, **options)
    status = library.cxl_shm_format(os.fsencode(spec), how)
    if status:
        raise PoolError(f"format {spec}: {status} {library.cxl_shm_last_error().decode()}")
