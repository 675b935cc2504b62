# SPDX-License-Identifier: Apache-2.0
"""One process publishes a KV block in the pool and ends; another process, as on another host, pulls the same bytes."""

import os
import subprocess
import sys
import tempfile

import kvbm_cxl

# How the bytes were made. Blocks of another model, type or layout are never found.
MODEL = kvbm_cxl.Namespace(
    model="tiny", dtype="bfloat16", layer_count=4, kv_head_count=2, head_size=64, block_tokens=16, layout="LBHNC"
)
KEY = kvbm_cxl.chain_key(None, range(16))  # a hash over the tokens of the block and of all blocks before it
BLOCK = bytes(range(256)) * 256


def publish() -> None:
    with kvbm_cxl.Pool() as pool, pool.cache() as cache:  # the pool that CXL_POOL names
        cache.publish(MODEL, KEY, BLOCK)  # every host can pull the block when this returns
        print("published", len(BLOCK), "bytes")


def pull() -> None:
    into = bytearray(len(BLOCK))
    with kvbm_cxl.Pool() as pool, pool.cache() as cache:
        result = cache.pull(MODEL, KEY, into)  # verified after the copy, or a miss with its reason
        assert result.hit, result
        assert into == BLOCK
        print("pulled", len(into), "bytes")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if "CXL_POOL" not in os.environ:
            environment |= {"CXL_POOL": f"{folder}/pool", "CXL_STATE_DIR": f"{folder}/state"}
            os.environ["CXL_STATE_DIR"] = environment["CXL_STATE_DIR"]
            kvbm_cxl.format_pool(f"{folder}/pool,size=64M", cells="64K:75%")  # once in the life of a pool
        for role in ("publish", "pull"):
            subprocess.run([sys.executable, __file__, role], env=environment, check=True)


if __name__ == "__main__":
    {"publish": publish, "pull": pull}.get(" ".join(sys.argv[1:]), main)()
