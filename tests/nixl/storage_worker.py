# SPDX-License-Identifier: Apache-2.0
"""A worker that also moves buffers to and from objects and files: `storage_worker.py FD`."""

import numpy
from worker import Worker, serve


class StorageWorker(Worker):
    """What tests of storage ask for beside the rest."""

    def __init__(self):
        super().__init__()
        self.storage = {}

    def register_storage(self, key, memory, rows):
        """Registers objects or files: rows of (offset, length, device, text)."""
        self.storage[key] = self.now.register_memory(rows, memory, backends=[self.backend])

    def deregister_storage(self, key):
        self.now.deregister_memory(self.storage.pop(key), backends=[self.backend])

    def move(self, operation, memory, local, remote, times=1):
        """The state in which a transfer with storage of this agent ends, or the name of the error. Rows of (address or offset, length,
        device)."""
        near = self.now.get_xfer_descs(numpy.asarray(local, numpy.uint64), "DRAM")
        far = self.now.get_xfer_descs(numpy.asarray(remote, numpy.uint64), memory)
        try:
            handle = self.now.initialize_xfer(operation, near, far, self.name, b"", [self.backend])
        except Exception as error:
            return type(error).__name__
        self.last += 1
        self.handles[self.last] = handle
        try:
            for _ in range(times):
                state = self.post(self.last)
                if state == "PROC":
                    state = self.wait(self.last)
                if state != "DONE":
                    break
            return state
        except Exception as error:
            return type(error).__name__
        finally:
            self.release(self.last)


if __name__ == "__main__":
    serve(StorageWorker())
