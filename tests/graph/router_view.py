# SPDX-License-Identifier: Apache-2.0
"""A router of Dynamo's that routes nothing: for each line of tokens (JSON) on stdin it tells, in a line of JSON, what it knows of each worker.

    router_view.py ENDPOINT BLOCK_TOKENS DISK_WEIGHT
"""

import asyncio
import json
import os
import sys

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime


async def main(endpoint: str, block_tokens: int, disk_weight: float) -> None:
    """Until stdin ends."""
    told = os.environ
    runtime = DistributedRuntime(asyncio.get_running_loop(), told["DYN_DISCOVERY_BACKEND"], told["DYN_REQUEST_PLANE"])
    router = KvRouter(runtime.endpoint(endpoint), block_tokens, KvRouterConfig(disk_cache_hit_weight=disk_weight))
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await router.get_overlap_scores(json.loads(line))), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
