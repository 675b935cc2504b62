# SPDX-License-Identifier: Apache-2.0
"""Two NIXL agents in two processes: decode READs blocks of prefill's ordinary memory over the pool, by backend CXL."""

import multiprocessing
import os
import tempfile
import time

import numpy

BLOCK_COUNT, BLOCK_BYTES = 128, 20480
TIMEOUT_S = 60


def agent(name: str):
    """An agent whose only backend is ours. The import is here because each process makes its own."""
    import kvbm_cxl.nixl
    from nixl._api import nixl_agent, nixl_agent_config

    kvbm_cxl.nixl.enable()  # beside UCX and POSIX, without environment variables
    made = nixl_agent(name, nixl_agent_config(backends=[]))
    made.create_backend("CXL", {"pool": os.environ["CXL_POOL"]})
    return made


def registered(owner, blocks) -> None:
    owner.register_memory([(blocks.ctypes.data, blocks.nbytes, 0, "")], "DRAM", backends=["CXL"])


def rows(owner, address: int):
    return owner.get_xfer_descs([(address + i * BLOCK_BYTES, BLOCK_BYTES, 0) for i in range(BLOCK_COUNT)], "DRAM")


def content():
    """Bytes that differ from block to block, so that a wrong offset shows."""
    return numpy.random.default_rng(1).integers(0, 256, BLOCK_COUNT * BLOCK_BYTES, numpy.uint8)


def prefill(pipe) -> None:
    blocks = content()
    owner = agent("prefill")
    registered(owner, blocks)
    pipe.send((owner.get_agent_metadata(), blocks.ctypes.data))
    pipe.recv()  # the memory stays registered until decode has read it


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    pipe, other = processes.Pipe()
    peer = processes.Process(target=prefill, args=(other,))
    peer.start()
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("prefill did not start")
    metadata, address = pipe.recv()

    blocks = numpy.zeros(BLOCK_COUNT * BLOCK_BYTES, numpy.uint8)
    decode = agent("decode")
    registered(decode, blocks)
    name = decode.add_remote_agent(metadata)
    transfer = decode.initialize_xfer(
        "READ", rows(decode, blocks.ctypes.data), rows(decode, address), name, backends=["CXL"]
    )
    state, end = decode.transfer(transfer), time.monotonic() + TIMEOUT_S
    while state == "PROC" and time.monotonic() < end:
        state = decode.check_xfer_state(transfer)
    assert state == "DONE", state
    assert (blocks == content()).all()
    print("read", blocks.nbytes, "bytes in", BLOCK_COUNT, "blocks")
    decode.release_xfer_handle(transfer)
    pipe.send("done")
    peer.join(TIMEOUT_S)


if __name__ == "__main__":
    if "CXL_POOL" in os.environ:
        main()
    else:
        import kvbm_cxl

        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"CXL_POOL": f"{folder}/pool", "CXL_STATE_DIR": f"{folder}/state"}
            kvbm_cxl.format_pool(f"{folder}/pool,size=256M")
            main()
