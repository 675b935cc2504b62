# SPDX-License-Identifier: Apache-2.0
"""A folder whose bytes go through NIXL's storage backend POSIX, as those of KVBM and Dynamo do.

NIXL's backends read and write; they neither list nor delete nor rename. So names are the file system's, as for a folder without NIXL, and
files of either are read by both. For the same reason there is no store of backend OBJ: an object store needs a client of its own
for everything else, which fsspec has.
"""

import ctypes
import errno
import itertools
import os
import threading
import time
from collections.abc import Sequence
from io import FileIO
from typing import Any

from .stores import LocalStore

BACKEND = "POSIX"
# Between two looks at a transfer that is under way.
_LOOK_S = 0.00005
_names = itertools.count()


class NixlStore(LocalStore):
    """A folder, as `LocalStore`. Each thread has an agent of its own: one agent serves one call at a time."""

    def __init__(self, folder: str) -> None:
        """Raises ValueError where NIXL or its backend is missing, and what the folder raises."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            remedy = "pip install nixl, or name the folder alone"
            raise ValueError(f"nixl+posix://{folder}: NIXL is not installed ({error}): {remedy}") from error
        self._make = lambda name: nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        self._local = threading.local()
        try:
            self._agent()
        except Exception as error:  # Whatever NIXL raises.
            raise ValueError(f"nixl+posix://{folder}: NIXL has no backend {BACKEND} here: {type(error).__name__}: {error}") from error
        super().__init__(folder)

    def _agent(self) -> tuple[str, Any]:
        if not hasattr(self._local, "agent"):
            name = f"kvbm-cxl-l2-{os.getpid()}-{next(_names)}"
            self._local.agent = name, self._make(name)
        return self._local.agent

    def _transfer(self, operation: str, buffer: bytearray, file: FileIO) -> None:
        """Moves all of a buffer to or from the start of a file. Raises OSError."""
        name, agent = self._agent()
        held = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        near, far = (ctypes.addressof(held), len(buffer), 0), (0, len(buffer), file.fileno())
        registered, handle = [], None
        try:
            for memory, place in (("DRAM", near), ("FILE", far)):
                registered.append(agent.register_memory([(*place, "")], memory, backends=[BACKEND]))
            descriptors = agent.get_xfer_descs([near], "DRAM"), agent.get_xfer_descs([far], "FILE")
            handle = agent.initialize_xfer(operation, *descriptors, name, b"", [BACKEND])
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(_LOOK_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(errno.EIO, f"NIXL's {operation} of {len(buffer)} bytes ended as {state}", file.name)
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
            for each in reversed(registered):
                agent.deregister_memory(each)

    def read(self, path: str) -> bytes:
        with open(self._root / path, "rb", buffering=0) as file:
            buffer = bytearray(os.fstat(file.fileno()).st_size)
            if buffer:
                self._transfer("READ", buffer, file)
        return bytes(buffer)

    def _fill(self, file: FileIO, parts: Sequence[Any]) -> None:
        buffer = bytearray(b"".join(parts))
        self._transfer("WRITE", buffer, file)
        # NIXL tells no length.
        if (found := os.fstat(file.fileno()).st_size) != len(buffer):
            raise OSError(errno.EIO, f"NIXL wrote {found} of {len(buffer)} bytes", file.name)
