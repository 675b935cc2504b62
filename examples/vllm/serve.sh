#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# serve.sh MODEL [ARGUMENTS...]: one vLLM server that publishes KV blocks in the pool and reuses those of every other server on it.
# Start it on as many hosts as map the pool. CXL_POOL names the devices; `cxlctl format` was run once for them.
set -eu
: "${CXL_POOL:?name the devices of the pool, like /dev/dax0.0}"
exec vllm serve "$@" \
    --kv-transfer-config '{"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
