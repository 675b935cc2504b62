# SPDX-License-Identifier: Apache-2.0
"""The pool as vLLM's KV connector `CxlConnector`: a prefix cache that a whole rack shares, and the hand-over from prefill to decode.

A prefill worker publishes the blocks of a prompt in the pool before its answer leaves; a decode worker, or any later request with the same
prefix, pulls them by key (TraCT sections 4.2 and 4.3). Nothing connects the two workers but the pool.

| module | what it does |
|---|---|
| `connector` | the class that vLLM makes in its scheduler and in each worker |
| `scheduler` | the scheduler's side, over `lookups` (pins cached blocks), `saving` (orders publishes) and `corrupt_blocks` |
| `block_names` | the namespaces and keys of a request's blocks |
| `worker` | the worker's side, over `attachment` (where blocks lie), `loader` and `saver` |
| `movers` | how blocks get into the pool and back |
| `keys` | what blocks are called: vLLM's hashes, and our own for the last, partly filled block |
| `identity` | the namespace: what else shapes the bytes of a block |
| `settings`, `harmless_settings` | the engine's configuration in it, and what of it shapes no block |
| `model_files`, `file_digests` | the model's files in it: by all their bytes, read once on a machine |
| `worker_start` | what begins before a worker loads the model |
| `held_tensors` | every tensor that a model holds in memory |
| `weights`, `engine_watch` | weights that are replaced while the engine runs: noticed, and told apart by a fingerprint |
| `adapters` | LoRA adapters by content |
| `request_state` | what the scheduler's side remembers of a request |
| `diagnosis` | why nothing is found |
| `geometry` | where the bytes of a block lie in vLLM's tensors |
| `failures` | errors of background threads: logged, counted, the last one kept |
| `pool_access` | one pool per process, opened once, opened again after it was lost |
| `stats` | counters for vLLM and Prometheus |
| `events`, `announcer`, `descriptions`, `publisher` | KV events for routers: of all of the pool's blocks, also while the engine is idle |
| `dynamo_protocol` | Dynamo's side of the hand-over |
| `tier`, `tier_names`, `tier_engine`, `tier_stats`, `tier_events` | no part of the connector: the pool as a tier of vLLM's own offloading |

Options of `kv_connector_extra_config`: `config.ConnectorConfig`. What shapes a block and how keys cover it: docs/reference/vllm.md.
"""

import sys

CONNECTOR_NAME = "CxlConnector"
TIER_TYPE = "cxl"
_MODULE = "kvbm_cxl.vllm_integration.connector"


def register() -> None:
    """Makes `CxlConnector` and the tier `cxl` known to vLLM, and the connector to Dynamo where this process runs it.

    The entry point of `vllm.general_plugins`: vLLM calls it in each of its processes. Calling it again changes nothing. The connector's
    modules, and with them the pool, are loaded only when an engine is configured to use it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, _MODULE, CONNECTOR_NAME)
    except ValueError:  # Already registered. A connector of another package under this name fails when vLLM makes it.
        pass
    _register_tier()
    from .worker_start import watch_workers

    watch_workers()
    # Only `python -m dynamo.vllm` asks Dynamo's table, and there the package is loaded before vLLM's plugins are; the engine's other
    # processes have no use for it.
    if "dynamo.vllm" in sys.modules:
        from .dynamo_protocol import register as register_with_dynamo

        register_with_dynamo()


def _register_tier() -> None:
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # vLLM before its tiers.
        return
    try:
        SecondaryTierFactory.register_tier(TIER_TYPE, "kvbm_cxl.vllm_integration.tier", "CxlTier")
    except ValueError:  # Already registered, as above.
        pass
