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


class LockInfo(ctypes.Structure):
    """cxl_lock_info_t"""

    _fields_ = [("struct_size", ctypes.c_size_t), ("recovered", ctypes.c_uint32), ("grant", ctypes.c_uint32)]


class PoolError(RuntimeError):
    """A call of the library failed; `status` says how."""

    def __init__(self, text, status=0):
        super().__init__(text)
        self.status = status


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
        "cxl_shm_allocate_lock_ex": (ctypes.c_int, [pointer, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32)]),
        "cxl_shm_acquire_lock_ex": (ctypes.c_int, [pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(LockInfo)]),
        "cxl_shm_release_lock_ex": (ctypes.c_int, [pointer, ctypes.c_uint32]),
        "cxl_shm_lock_repaired": (ctypes.c_int, [pointer, ctypes.c_uint32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class PoolHandle:
    """An open pool."""

    def __init__(self, spec, flags=0, **options):
        """`options`: fields of Options."""
        self.library = _load()
        options = Options(struct_size=ctypes.sizeof(Options), flags=flags, **options)
        self.handle = ctypes.c_void_p()
        self._done(self.library.cxl_shm_open(spec.encode(), options, ctypes.byref(self.handle)), f"open {spec}")

    def _done(self, status, what):
        if status:
            raise PoolError(f"{what}: {status} {self.library.cxl_shm_last_error().decode()}", status)

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

    def write(self, address, data):
        """Writes bytes past the caches."""
        self._done(self.library.cxl_shm_copy_in(address, data, len(data)), "copy in")

    def read(self, address, len_bytes):
        """The bytes that are in the memory now."""
        data = ctypes.create_string_buffer(len_bytes)
        self._done(self.library.cxl_shm_copy_out(data, address, len_bytes), "copy out")
        return data.raw

    def new_lock(self, timeout_ms):
        """The number of a lock that no host has yet."""
        lock = ctypes.c_uint32()
        self._done(self.library.cxl_shm_allocate_lock_ex(self.handle, timeout_ms, ctypes.byref(lock)), "allocate a lock")
        return lock.value

    def acquire(self, lock, timeout_ms):
        """Acquires a lock; true where what it protects must be repaired first."""
        info = LockInfo(struct_size=ctypes.sizeof(LockInfo))
        self._done(self.library.cxl_shm_acquire_lock_ex(self.handle, lock, timeout_ms, ctypes.byref(info)), f"acquire lock {lock}")
        return bool(info.recovered)

    def release(self, lock):
        """Releases a lock that this thread holds."""
        self._done(self.library.cxl_shm_release_lock_ex(self.handle, lock), f"release lock {lock}")

    def repaired(self, lock):
        """What the lock protects is whole again."""
        self._done(self.library.cxl_shm_lock_repaired(self.handle, lock), f"repair under lock {lock}")

    def close(self):
        self._done(self.library.cxl_shm_close(self.handle), "close")


def format_pool(spec, flags=0, **options):
    """Formats a pool; `spec` may carry `,size=`."""
    library = _load()
    how = FormatOptions(struct_size=ctypes.sizeof(FormatOptions), flags=flags | FORMAT_FORCE, **options)
    status = library.cxl_shm_format(os.fsencode(spec), how)
    if status:
        raise PoolError(f"format {spec}: {status} {library.cxl_shm_last_error().decode()}")
