# SPDX-License-Identifier: Apache-2.0
"""A GPU of a driver that is faked (kvbm_cxl/pool/tests/cuda/fake.c), for tests in Python."""

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "kvbm_cxl" / "pool" / "tests" / "cuda" / "fake.c"


def compiled(folder):
    """The driver, for CXL_CUDA_LIBRARY. It has no kernels."""
    path = folder / "libcuda.so.1"
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-shared", "-fPIC", "-pthread", "-o", path, SOURCE], check=True, timeout=60)
    return path


class Gpu:
    """A GPU of the fake driver, by calls of its own."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.fake_misuse.restype = ctypes.c_char_p
        self.library.fake_get.restype = ctypes.c_long
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxPushCurrent_v2", context)
        self.memory = []

    def __call__(self, name, *arguments):
        assert self.library[name](*arguments) == 0, name

    def set(self, name, value):
        self.library.fake_set(name.encode(), value)

    def get(self, name):
        return self.library.fake_get(name.encode())

    def allocate(self, data):
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        self("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        self.memory.append(address)
        return address.value

    def read(self, address, len_bytes):
        data = ctypes.create_string_buffer(len_bytes)
        self("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(len_bytes))
        return data.raw

    def stream(self):
        """As torch has one."""
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return SimpleNamespace(cuda_stream=stream.value)

    def event(self, stream):
        """As torch has one, recorded."""
        event = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(event), 2)
        self("cuEventRecord", event, ctypes.c_void_p(stream.cuda_stream))
        return SimpleNamespace(cuda_event=event.value)

    def kernel(self, stream, address, data):
        self.library.fake_kernel(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def close(self):
        for address in self.memory:
            self("cuMemFree_v2", address)
        self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self("cuDevicePrimaryCtxRelease_v2", 0)
        assert self.library.fake_misuse() == b""
