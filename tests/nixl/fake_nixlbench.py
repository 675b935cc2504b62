# SPDX-License-Identifier: Apache-2.0
"""Stands for nixlbench in test_upstream_bench.py: two processes that meet at a port, transfers of NIXL's Python API, its table.

FAKE_NIXLBENCH says how it misbehaves: wrong-bytes, idle (nothing is moved), crash, old (the table of earlier releases).
"""

import ctypes
import os
import pickle
import socket
import struct
import sys
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

HEADINGS = {
    "": ["Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)", "Avg Prep (us)", "P99 Prep (us)"],
    "old": ["Block Size (B)", "Batch Size", "Avg Lat. (us)", "B/W (MiB/Sec)", "B/W (GiB/Sec)", "B/W (GB/Sec)"],
}


class Peer:
    """The other process."""

    def __init__(self, address, port):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(1)
            self.rank, (self.stream, _) = 0, listener.accept()
        except OSError:
            self.rank, self.stream = 1, self.connected(address, port)
        listener.close()

    def connected(self, address, port):
        """A connection to the initiator; nixlbench does not wait for it either."""
        try:
            return socket.create_connection((address, port))
        except OSError as error:
            print(f"  what():  ASIO Connection failed: {error.strerror}", flush=True)
            os.abort()

    def exchange(self, mine):
        """Gives one thing, gets one."""
        data = pickle.dumps(mine)
        self.stream.sendall(struct.pack("<I", len(data)) + data)
        (length,) = struct.unpack("<I", self.receive(4))
        return pickle.loads(self.receive(length))

    def receive(self, length):
        data = b""
        while len(data) < length:
            part = self.stream.recv(length - len(data))
            if not part:
                sys.exit("the other process is gone")
            data += part
        return data


def move(agent, operation, backend, pairs, remote):
    """One transfer of some blocks."""
    near, far = ([(address, length, 0) for address, length in side] for side in zip(*pairs, strict=True))
    sides = agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "DRAM")
    transfer = agent.initialize_xfer(operation, *sides, remote, backends=[backend])
    state = agent.transfer(transfer)
    while state == "PROC":
        state = agent.check_xfer_state(transfer)
    assert state == "DONE", state
    agent.release_xfer_handle(transfer)


def aligned(len_bytes):
    """A buffer from posix_memalign(), as nixlbench's are."""
    address = ctypes.c_void_p()
    status = ctypes.CDLL(None).posix_memalign(ctypes.byref(address), ctypes.c_size_t(4096), ctypes.c_size_t(len_bytes))
    if status:
        sys.exit(f"posix_memalign: {os.strerror(status)}")
    return numpy.ctypeslib.as_array((ctypes.c_uint8 * len_bytes).from_address(address.value))


def main():
    """Does what nixlbench does, in small."""
    how = os.environ.get("FAKE_NIXLBENCH", "")
    said = dict(option.removeprefix("--").split("=", 1) for option in sys.argv[1:])
    if said["backend"] not in ("UCX", "Mooncake"):
        print(f"Unsupported NIXLBench backend: {said['backend']}")
        return 1
    is_ours = said["backend"] != "UCX"
    peer = Peer(said["asio_address"], int(said["asio_port"]))
    if how == "crash" and is_ours:
        os.abort()
    name, other = f"rank-{peer.rank}", f"rank-{1 - peer.rank}"
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend(said["backend"])
    buffer = aligned(int(said["total_buffer_size"]))
    ctypes.memset(buffer.ctypes.data, 0xAA + peer.rank, buffer.nbytes)
    agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM", backends=[said["backend"]])
    metadata, address = peer.exchange((agent.get_agent_metadata(), buffer.ctypes.data))
    agent.add_remote_agent(metadata)
    source = 0xAB if said["op_type"] == "READ" else 0xAA
    if peer.rank == 0:
        heading = HEADINGS["old" if how == "old" else ""]
        print("".join(f"{title:<{20 if at == 0 else 15}}" for at, title in enumerate(heading)) + "\n" + "-" * 80)
        block = int(said["start_block_size"])
        while block <= int(said["max_block_size"]):
            batch = 1
            while batch <= int(said["max_batch_size"]):
                pairs = [((buffer.ctypes.data + at * block, block), (address + at * block, block)) for at in range(batch)]
                begin = time.monotonic()
                if not (how == "idle" and is_ours):
                    move(agent, said["op_type"], said["backend"], pairs, other)
                rate = block * batch / (time.monotonic() - begin) / 1e9
                figures = {"B/W (GB/Sec)": f"{rate:.6f}", "Block Size (B)": block, "Batch Size": batch}
                print("".join(f"{figures.get(title, 1.5):<{20 if at == 0 else 15}}" for at, title in enumerate(heading)))
                batch *= 2
            block *= 2
    peer.exchange("done")
    if (peer.rank == 0) == (said["op_type"] == "READ") and how != "idle":
        if how == "wrong-bytes" and is_ours:
            buffer[1000] ^= 1
        if not (buffer[: int(said["max_block_size"])] == source).all():
            print("Consistency check failed")
    peer.exchange("verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
