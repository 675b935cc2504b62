#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The worker's side of CxlConnector over tensors of a GPU, as vLLM drives it, without vLLM. Used by gpu.py.

A step computes the pages of its blocks layer by layer with kernels of PyTorch, has them published, and ends. Another worker's side loads
them to other places, and every byte is compared. `worker_step_summed_over_whole` is the time from the start of a step until its blocks are
in the pool with checksums, by that without.
Where vLLM is not installed, the few classes that the package takes from it are made here.
"""

import importlib.util
import os
import statistics
import sys
import time
from contextlib import closing
from dataclasses import field, make_dataclass
from types import ModuleType, SimpleNamespace

import kvbm_cxl
from gpu_bench import ratio, say, wrong

# Pages of a layer of Llama 3.1 8B with blocks of 16 tokens: 64 KiB.
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 8, 64, 8, 16, 256
WAYS = {
    "summed": {"checksums": True},
    "whole": {"checksums": False},
}


def stand_in_for_vllm():
    """The modules of vLLM, and of prometheus_client, that the package imports by name."""
    classes = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": (
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorWorkerMetadata",
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
        "vllm.lora.request": ("LoRARequest",),
        "vllm.v1.kv_cache_interface": ("UniformTypeKVCacheSpecs",),
        "prometheus_client": ("Counter", "Gauge", "Histogram"),
    }
    for path, names in classes.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for name in names:
            setattr(sys.modules[path], name, type(name, (), {}))
    # A dataclass of the package takes its field from this one.
    stats = make_dataclass("KVConnectorStats", [("data", dict, field(default_factory=dict))])
    sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.metrics"].KVConnectorStats = stats


class Side:
    """A worker's side whose KV cache is tensors of `device`."""

    def __init__(self, spec, device, options):
        import torch
        from kvbm_cxl.vllm_integration import attachment, pool_access, saver, worker
        from kvbm_cxl.vllm_integration.config import ConnectorConfig
        from kvbm_cxl.vllm_integration.groups import Group, Kind, Shape

        fields = {"dtype": "d", "layer_count": LAYERS, "kv_head_count": HEADS, "head_size": CONTENT, "block_tokens": TOKENS, "layout": "l"}
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        group = SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(num_kv_heads=HEADS))
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS, kv_tp_replicas=1)
        attachment.namespace_fields = lambda *_: {0: [{"model": "worker", **fields}]}
        attachment.shape_of = lambda *_: Shape((Group(0, tuple(names), TOKENS, Kind.FULL),), TOKENS, TOKENS)
        attachment.Attacher._ranks = lambda _: (1, 0)
        # A loaded machine may take long for a lock, and every block has to be there.
        saver.LEAST_PATIENCE = 60.0
        config = ConnectorConfig.read({"pool": spec, "publish_behind": False, "audit": False, **options})
        self.access = pool_access.acquire(config)
        self.side = worker.WorkerSide(None, cache, config, self.access)
        self.memory = torch.zeros((LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), dtype=torch.bfloat16, device=device)
        self.side.attach(dict(zip(names, self.memory)))
        self.step = 0

    def orders(self, **orders):
        from kvbm_cxl.vllm_integration.metadata import StepMetadata

        self.step += 1
        return StepMetadata(self.step, **orders)

    def publish(self, keys, block_ids, values):
        """A step that computes blocks: layer by layer a product of matrices, and the pages. Returns when they are in the pool."""
        from kvbm_cxl.vllm_integration.metadata import Blocks

        step = self.orders(saves=[Blocks("a", keys, block_ids)], complete={"a"})
        self.side.before_overwrite(step)
        self.side.start_loads(step)
        for layer in range(LAYERS):
            for _ in range(4):
                values[0] @ values[0]
            self.memory[layer, block_ids] = values[1][layer]
        self.side.save(step)
        self.side.take_finished(set())

    def load(self, keys, block_ids):
        """Loads blocks; those that failed."""
        from kvbm_cxl.vllm_integration.metadata import Blocks

        step, loaded, deadline = self.orders(loads=[Blocks("b", keys, block_ids)]), set(), time.monotonic() + 60
        while "b" not in loaded:
            self.side.before_overwrite(step)
            self.side.start_loads(step)
            self.side.save(step)
            loaded = self.side.take_finished(set())[1]
            if time.monotonic() > deadline:
                raise SystemExit("a load did not end")
            step = self.orders(idle=True)
        return self.side.loader.take_failed_blocks()

    def evict(self, keys):
        """Makes room for the next round. What other processes of the pool still use stays."""
        namespace = self.side.attachment.own[0].namespaces[0]
        self.access.call(lambda cache: cache.evict_all(namespace, keys))

    def close(self):
        self.side.close()
        self.access.release()


def measure(bench):
    """Every byte is compared outside of the times."""
    device = bench.device()
    if importlib.util.find_spec("vllm") is None or os.environ.get("KVBM_CXL_WITHOUT_VLLM"):
        stand_in_for_vllm()
    import torch

    block_bytes, spec, count = LAYERS * HEADS * TOKENS * CONTENT * 2, bench.spec_of(512), BLOCKS // 2
    kvbm_cxl.format_pool(spec, cells=f"{block_bytes}:75%", force=True)
    random, times = torch.Generator(device=device).manual_seed(7), {}
    matrix = torch.ones((64, 64) if device == "cpu" else (4096, 4096), dtype=torch.bfloat16, device=device)
    for way, options in WAYS.items():
        with closing(Side(spec, device, options)) as here, closing(Side(spec, device, options)) as there:
            for turn in range(bench.rounds + 1):
                keys = bench.keys(count)
                pages = torch.randn((LAYERS, count, HEADS, TOKENS, CONTENT), generator=random, device=device).to(torch.bfloat16)
                places = torch.randperm(BLOCKS)[:count].tolist()
                if device != "cpu":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                here.publish(keys, list(range(count)), (matrix, pages))
                if turn:
                    times.setdefault(way, []).append(time.perf_counter() - start)
                if there.load(keys, places):
                    raise SystemExit(f"{way}: blocks that the worker published are not found")
                if not torch.equal(there.memory[:, places], pages):
                    wrong(f"of the worker's blocks, {way}")
                here.evict(keys)
    medians = {way: statistics.median(found) for way, found in times.items()}
    rates = (f"{way} {1e3 * median:.2f} ms" for way, median in medians.items())
    say(f"a step of the worker with {count} blocks of {block_bytes >> 10} KiB: {', '.join(rates)}")
    ratio("worker_step_summed_over_whole", medians["summed"] / medians["whole"])
