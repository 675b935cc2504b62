# SPDX-License-Identifier: Apache-2.0
"""KVCR with the NIXL plugin as its backend: one engine's host memory, and KVCR's own beside it, the way vLLM's tier `kvcr` sets it up."""

import ctypes
import hashlib
import mmap
import threading
import time

import kvbm_cxl
from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions, RemoteFWDramOptions
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import BlockKey, MemoryRef, PinRequestId, RegionDescriptor
from peers import payload
from waiting import free_port

BLOCK_BYTES, BLOCKS = 65536, 64


class _Keys:
    """What hints call a block."""

    def encode(self, framework_key):
        return BlockKey(framework_key)

    def decode(self, key):
        return int.from_bytes(key[:8], "big")


class Subject:
    def __init__(self, pool, memory="ordinary", timeout_ms=60_000):
        self._pool, self._kept = kvbm_cxl.Pool(pool) if memory == "pool" else None, []
        self._engine, engine_at = self._memory(BLOCKS * BLOCK_BYTES)
        _, own_at = self._memory(BLOCKS * BLOCK_BYTES)
        self._name, self._offered, self._pins = f"kvcr-{free_port()}", {}, []
        self._requests, self._ended = 0, {}
        control = ZmqPeerControlChannel("127.0.0.1", free_port(), "127.0.0.1")
        self._endpoint = control.endpoint
        self._kvcr = KVCR(
            KVCRConfig(
                nixl_agent_name=self._name,
                pool_layouts=[("", BLOCK_BYTES)],
                nixl_listen_port=free_port(),
                operation_timeout_ms=timeout_ms,
                abandon_timeout_ms=5 * timeout_ms // 2,
            ),
            KVCRBindings(
                request_pin=self._request_pin,
                poll_pin_results=self._take_pins,
                release_pin=lambda handle: True,
                framework_control=control,
                key_adapter=_Keys(),
            ),
            KVCRBackendConfigs(
                framework_regions=[RegionDescriptor(addr=engine_at, size=BLOCK_BYTES, count=BLOCKS)],
                local_dram=LocalDramOptions(pools=[("", own_at, BLOCKS * BLOCK_BYTES)], backend="CXL"),
                remote_fw_dram=RemoteFWDramOptions(backend="CXL"),
            ),
        )

        # KVCR does its part of a peer's transfer in the calls of its framework, as vLLM makes them in each step.
        threading.Thread(target=self._steps, daemon=True).start()

    def _steps(self):
        while True:
            self._ended.update(self._kvcr.poll_completed())
            time.sleep(0.002)

    def _memory(self, len_bytes):
        """Memory of this process, or of the pool: as bytes, and where it lies."""
        owner = self._pool.allocate(len_bytes) if self._pool else mmap.mmap(-1, len_bytes)
        view = memoryview(owner).cast("B")
        self._kept += [owner, view]
        return view, ctypes.addressof((ctypes.c_char * len_bytes).from_buffer(view))

    def _request_pin(self, keys):
        self._requests += 1
        request = PinRequestId(self._requests)
        self._pins.append((request, (f"pin {request}", {key: self._offered.get(key) for key in keys})))
        return request

    def _take_pins(self):
        pins, self._pins = self._pins, []
        return pins

    def _at(self, place):
        return [MemoryRef(end_point_name=self._name, element_index=place)]

    def _wait(self, operation):
        end = time.monotonic() + 120
        while operation not in self._ended:
            if time.monotonic() > end:
                raise TimeoutError("KVCR did not end an operation")
            time.sleep(0.002)
        return self._ended.pop(operation)

    def offer(self, names):
        """Puts blocks in the engine's memory, for peers to get; tells where peers ask for them."""
        for place, name in enumerate(names):
            self._engine[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES] = payload(name, BLOCK_BYTES)
            self._offered[_key(name)] = self._at(place)
        return self._endpoint

    def deposit(self, names):
        """Copies offered blocks to KVCR's own memory."""
        results = self._wait(self._kvcr.deposit({_key(name): self._offered[_key(name)] for name in names}))
        return [results[_key(name)].success for name in names]

    def tiers(self, names):
        return [str(tier and tier.name) for _, tier in self._kvcr.query([_key(name) for name in names])]

    def deliver(self, names, endpoint=None):
        """Gets blocks to the engine's memory, from KVCR's own or from a peer. Every byte of those that came is compared."""
        request = None
        if endpoint:
            self._requests += 1
            request = f"request {self._requests}"
            payload_of_hint = {"source_control_endpoint": endpoint, "block_hashes": [_Keys().decode(_key(name)) for name in names]}
            action = {"action_type": "kv.fetch", "action_version": "1.0", "payload": payload_of_hint}
            self._kvcr.submit_hint({"protocol_version": "0.1", "actions": [action]}, request)
        first = BLOCKS - len(names)
        self._engine[first * BLOCK_BYTES :] = bytes(len(names) * BLOCK_BYTES)
        blocks = {_key(name): self._at(first + place) for place, name in enumerate(names)}
        results = self._wait(self._kvcr.deliver(blocks, request))
        came = [results[_key(name)].success for name in names]
        for place, name in enumerate(names, first):
            found = bytes(self._engine[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            assert not came[place - first] or found == payload(name, BLOCK_BYTES), f"wrong bytes for {name}"
        return came

    def close(self):
        self._kvcr.close()


def _key(name):
    return BlockKey(hashlib.sha256(name.encode()).digest())
