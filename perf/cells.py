#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what it costs to store and load blocks of vLLM's KV cache as several cells of the pool (`stored_tp`, `stored_block_tokens`).

Blocks have the size and order of an engine on CPUs: 8 KV heads of 128, 128 tokens, bfloat16, 8 layers, 4 MiB a block, written by vLLM's own
kernel, which also says where tokens lie. The connector's own movers copy 16 of them into the pool and to another KV cache, on one thread,
as whole blocks, as 2, 4 and 8 shards of the heads, and as 2 and 4 slices of the tokens; these take turns, round after round. Every byte is
compared outside of the times. `store_2_shards_over_1` is the time of two shards by that of whole blocks; 1 means that they cost nothing.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "vllm_integration")]
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

import kvbm_cxl  # noqa: E402
import pages  # noqa: E402
import torch  # noqa: E402
from kvbm_cxl.vllm_integration import pool_access, token_places  # noqa: E402
from kvbm_cxl.vllm_integration.config import ConnectorConfig  # noqa: E402
from kvbm_cxl.vllm_integration.geometry import cell_parts  # noqa: E402
from kvbm_cxl.vllm_integration.movers import PublishBatch, mover_for  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 8, 16, 8, 128, 128
GRIDS = {"1": (1, 1), "2_shards": (2, 1), "4_shards": (4, 1), "8_shards": (8, 1), "2_slices": (1, 2), "4_slices": (1, 4)}
ROUNDS, WARM_UP = 9, 2


def mover_of(access, memory, writer, shards, slices):
    """Copies blocks of a KV cache as so many cells."""

    def cut(_name, tensor, within):
        return token_places.pieces_of_cells(tensor[:1], writer, shards, within)

    named = [(f"layers.{layer}", tensor) for layer, tensor in enumerate(memory)]
    cells = []
    for shard, by_slice in enumerate(cell_parts(named, BLOCKS, shards, slices, cut)):
        fields = {"model": "m", "dtype": "bfloat16", "layer_count": LAYERS, "kv_head_count": HEADS // shards, "head_size": HEAD_SIZE}
        namespace = kvbm_cxl.Namespace(**fields, block_tokens=TOKENS // slices, layout="l", tp_rank=shard, tp_size=shards)
        layouts = [
            kvbm_cxl.BlockLayout([(part.address, part.stride_bytes, part.len_bytes) for part in parts], BLOCKS, owner=memory)
            for parts in by_slice
        ]
        cells.append((namespace, tuple(layouts)))
    return mover_for(access, cells), [namespace for namespace, _ in cells]


def main():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-cxl-perf-") as folder:
        os.environ["CXL_STATE_DIR"] = folder
        kvbm_cxl.format_pool(f"{folder}/pool,size=768M", cells="512K:20%,1M:20%,2M:20%,4M:30%")
        config = ConnectorConfig.read({"pool": f"{folder}/pool"})
        access = pool_access.acquire(config)
        try:
            ratios = measure(access)
        finally:
            access.release()
    print("RATIOS " + json.dumps(ratios))


def measure(access):
    pages.HEAD_SIZE = HEAD_SIZE
    writer = pages.cpu_writer(torch.bfloat16)
    here, there = ([pages.empty(BLOCKS, HEADS, TOKENS, torch.bfloat16, (1, 2, 3), 2 * HEAD_SIZE) for _ in range(LAYERS)] for _ in "ab")
    for layer, tensor in enumerate(here):
        keys, values = pages.keys_and_values(BLOCKS * TOKENS, HEADS, torch.bfloat16, seed=layer)
        pages.written(writer, tensor, keys, values)
    grids = {name: [mover_of(access, memory, writer, *grid) for memory in (here, there)] for name, grid in GRIDS.items()}
    times = {name: [] for name in GRIDS}
    for number in range(WARM_UP + ROUNDS):
        for name in GRIDS if number % 2 else reversed(GRIDS):
            times[name].append(one_round(access, here, there, *grids[name], GRIDS[name][1], number))
    ratios = {}
    total = sum(tensor.nbytes for tensor in here)
    for what, at in (("store", 0), ("load", 1)):
        for name in GRIDS:
            took = [each[at] for each in times[name][WARM_UP:]]
            ratio = statistics.median(mine / whole for mine, whole in zip(took, (each[at] for each in times["1"][WARM_UP:])))
            print(f"{what:5} {name:9} {total / statistics.median(took) / 1e9:6.2f} GB/s   {ratio:.2f} of the time of whole blocks")
            if name != "1":
                ratios[f"{what}_{name}_over_1"] = round(ratio, 4)
    return ratios


def one_round(access, here, there, source, target, slices, number):
    """Seconds to store and to load all blocks."""
    (source, namespaces), (target, _) = source, target
    places = list(range(BLOCKS * slices))
    keys = [kvbm_cxl.chain_key(None, [number, place]) for place in places]
    batch = PublishBatch(keys, places, [None, *keys[:-1]])
    for tensor in there:
        tensor.zero_()
    begun_s = time.perf_counter()
    outcomes = source.publish(batch, source.announce(batch))
    stored_s = time.perf_counter()
    reasons = target.pull(keys, places)
    loaded_s = time.perf_counter()
    assert set(outcomes) == {"stored"} and set(reasons) == {None}, (outcomes, reasons)
    assert all(torch.equal(mine.view(torch.int16), right.view(torch.int16)) for mine, right in zip(there, here)), "other bytes"
    for namespace in namespaces:
        access.call(lambda cache: cache.clear(namespace))
    return stored_s - begun_s, loaded_s - stored_s


if __name__ == "__main__":
    main()
