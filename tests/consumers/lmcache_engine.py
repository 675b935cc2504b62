# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine whose KV cache is LMCache's: `lmcache_engine.py MODEL PORT` answers prompts, and prints tokens and how many were cached.

PORT 0: an engine without LMCache.
"""

import json
import sys

from small_engine import answer, small_engine
from vllm.triton_utils import dispatcher

_rebind = dispatcher._rebind_kernels


def _rebind_without_llvmlite(overrides):
    """vLLM 0.31 for CPUs looks at every module, and one of llvmlite, which LMCache loads, does not stand that."""
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.binding")}
    try:
        return _rebind(overrides)
    finally:
        sys.modules.update(held)


dispatcher._rebind_kernels = _rebind_without_llvmlite


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    options = {}
    if port:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        options["kv_transfer_config"] = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    llm = small_engine(model, **options)
    print("ANSWERS " + json.dumps([answer(llm, seed) for seed in range(3)]), flush=True)
    # Until it is killed: what it stored is on its way.
    sys.stdin.read()


main()
