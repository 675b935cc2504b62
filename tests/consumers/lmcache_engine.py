# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine whose KV cache is LMCache's: `lmcache_engine.py MODEL WAY` answers three prompts: tokens, and how many were cached.

WAY is the port of LMCache's server, a file with the configuration of LMCache within the engine, or `none`.
"""

import os
import sys

# Before vLLM, for which it sets the environment.
from small_engine import answer, small_engine  # isort: skip
import lines
import lmcache_cpu


def connector(way: str) -> dict:
    """The options of an engine that uses LMCache this way."""
    if way == "none":
        return {}
    if way.isdecimal():
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(way)}
        config = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    else:
        os.environ["LMCACHE_CONFIG_FILE"] = way
        config = {"kv_connector": "LMCacheConnectorV1"}
    return {"kv_transfer_config": {**config, "kv_role": "kv_both"}}


class Engine:
    """Its calls."""

    def __init__(self, model: str, way: str) -> None:
        lmcache_cpu.make_it_run()
        self.llm = small_engine(model, **connector(way))

    def answers(self) -> list:
        return [answer(self.llm, seed) for seed in range(3)]


if __name__ == "__main__":  # The performance program has such engines, too. What it stored is on its way until it is killed.
    lines.serve(lambda: Engine(*sys.argv[1:]))
