# SPDX-License-Identifier: Apache-2.0
"""A worker without an engine and a router of Dynamo's, in one process: what the router makes of events of blocks in a medium.

    media_probe.py FOLDER MODEL MEDIUM...

For each medium it prints a line of JSON with the worker's blocks of a chain of four: once stored; stored again and the last removed once;
removed a second time.
"""

import asyncio
import json
import os
import sys
import time

import msgspec
import zmq
from dynamo.llm import KvEventPublisher, KvRouter, KvRouterConfig, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime
from kvbm_cxl.vllm_integration.descriptions import Description
from kvbm_cxl.vllm_integration.events import removed_event, stored_event
from vllm.distributed.kv_events import KVEventBatch

BLOCK_TOKENS, BLOCKS = 16, 4
# Longer than an event takes on a busy machine. Media that are dropped have to wait for all of it.
PATIENCE_S = 5


async def _serve(_):
    yield {}


class Probe:
    """The worker's events, and what the router knows."""

    def __init__(self, router, socket):
        self.router, self.socket, self.sent = router, socket, 0

    def send(self, *events):
        """As vLLM's publisher does."""
        batch = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=list(events)))
        self.socket.send_multipart((b"", self.sent.to_bytes(8, "big"), batch))
        self.sent += 1

    async def known(self, chain, expected):
        """[device, host, disk] blocks of the chain that only that tier has, once they are as expected or time is up."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            [row] = (await self.router.get_overlap_scores(sum((block.token_ids for block in chain), [])))["workers"]
            found = [row["device_blocks"], row["host_pinned_extension_blocks"], row["disk_extension_blocks"]]
            if sum(found) == expected or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.05)

    async def probe(self, medium, number):
        """See the module."""
        hashes = [bytes([number, at]) * 16 for at in range(BLOCKS)]
        tokens = [[number * 1000 + at * BLOCK_TOKENS + place for place in range(BLOCK_TOKENS)] for at in range(BLOCKS)]
        chain = [Description(at, hashes[at], hashes[at - 1] if at else None, tokens[at]) for at in range(BLOCKS)]
        stored, removed = [stored_event(block, medium) for block in chain], removed_event(hashes[-1:], medium)
        self.send(*stored)
        found = [await self.known(chain, BLOCKS)]
        self.send(*stored)
        self.send(removed)
        # Nothing is to change; what comes after it in order shows that it was seen.
        await asyncio.sleep(0.5)
        found.append(await self.known(chain, BLOCKS))
        self.send(removed)
        return [*found, await self.known(chain, BLOCKS - 1)]


async def main(folder, model, media):
    """Ends the process: the runtime has nothing that waits for it."""
    told = os.environ
    runtime = DistributedRuntime(asyncio.get_running_loop(), told["DYN_DISCOVERY_BACKEND"], told["DYN_REQUEST_PLANE"])
    endpoint = runtime.endpoint("probe.backend.generate")
    serving = endpoint.serve_endpoint(_serve)
    config = ModelRuntimeConfig()
    config.kv_event_publishing_enabled = config.enable_local_indexer = True
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        model,
        "probe",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_TOKENS,
        runtime_config=config,
    )
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(f"ipc://{folder}/events")
    publisher = KvEventPublisher(
        endpoint=endpoint, kv_block_size=BLOCK_TOKENS, zmq_endpoint=f"ipc://{folder}/events", zmq_topic="", enable_local_indexer=True
    )
    probe = Probe(KvRouter(endpoint, BLOCK_TOKENS, KvRouterConfig()), socket)
    # A publisher without a listener drops what it is given: until the first block is known, it is told again.
    deadline = time.monotonic() + 30
    first = Description(0, b"first" * 4, None, list(range(50000, 50000 + BLOCK_TOKENS)))
    while time.monotonic() < deadline:
        probe.send(stored_event(first, "GPU"))
        await asyncio.sleep(0.2)
        if (rows := (await probe.router.get_overlap_scores(first.token_ids))["workers"]) and rows[0]["device_blocks"]:
            break
    for number, medium in enumerate(media, 1):
        print(json.dumps(await probe.probe(medium, number)), flush=True)
    del serving, publisher
    os._exit(0)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
