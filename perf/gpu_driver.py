# SPDX-License-Identifier: Apache-2.0
"""One GPU by calls of the CUDA driver, with nothing installed: memory, pinned and registered memory of the host, copies on a stream."""

import ctypes
import os
import time

PORTABLE_AND_MAPPED = 3
NOT_READY = 600


class NoGpu(Exception):
    """Why there is none to try."""


class Gpu:
    """The GPU of a number, with its primary context current on this thread."""

    def __init__(self, number=0):
        name = os.environ.get("CXL_CUDA_LIBRARY") or "libcuda.so.1"
        try:
            self.library = ctypes.CDLL(name)
        except OSError as reason:
            raise NoGpu(f"no CUDA driver ({reason})") from None
        count, device, context, self.stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        if self.library.cuInit(0) or self.library.cuDeviceGetCount(ctypes.byref(count)) or count.value <= number:
            raise NoGpu(f"the CUDA driver {name} has {count.value} GPUs")
        self("cuDeviceGet", ctypes.byref(device), number)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxPushCurrent_v2", context)
        self("cuStreamCreate", ctypes.byref(self.stream), 1)

    def describe(self):
        """Its name, and the version of CUDA that the driver is of."""
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self("cuDeviceGetName", name, len(name), 0)
        self("cuDriverGetVersion", ctypes.byref(version))
        return f"{name.value.decode()}, CUDA {version.value // 1000}.{version.value % 1000 // 10}"

    def __call__(self, name, *arguments):
        status = self.library[name](*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def allocate(self, len_bytes):
        """Memory of the GPU; it goes with the process."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len_bytes))
        return address.value

    def free(self, address):
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address, data):
        source = data if isinstance(data, bytes) else (ctypes.c_char * len(data)).from_buffer(data)
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(len(data)))

    def read(self, address, len_bytes):
        data = bytearray(len_bytes)
        into = (ctypes.c_char * len_bytes).from_buffer(data)
        self("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(len_bytes))
        return data

    def pinned(self, len_bytes):
        """Pinned memory of the host: its address."""
        address = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(len_bytes), 1)
        return address.value

    def free_pinned(self, address):
        self("cuMemFreeHost", ctypes.c_void_p(address))

    def register(self, address, len_bytes):
        """Registers memory of the host; the driver's answer."""
        return self.library.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(len_bytes), PORTABLE_AND_MAPPED)

    def unregister(self, address):
        self("cuMemHostUnregister", ctypes.c_void_p(address))

    def queue(self, moves):
        """Gives the stream copies (destination, source, length), and does not wait."""
        for to, source, len_bytes in moves:
            self("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(len_bytes), self.stream)

    def wait(self):
        """Waits for the end of what the stream was given."""
        while (status := self.library.cuStreamQuery(self.stream)) == NOT_READY:
            time.sleep(0)
        if status:
            raise RuntimeError(f"cuStreamQuery: CUDA error {status}")

    def copy(self, moves):
        """Copies (destination, source, length) one after the other, and waits for their end."""
        self.queue(moves)
        self.wait()
