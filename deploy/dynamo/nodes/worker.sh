#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# worker.sh prefill|decode: one worker on a node with GPUs. Start as many as there are, on as many nodes; two on one node need a DYN_SYSTEM_PORT each.
# The wheel of kvbm-cxl makes CxlConnector known to vLLM and Dynamo; prefill and decode have no connection but the pool.
set -eu
. "$(dirname "$0")/rack.env"
role=${1:?prefill or decode}
shift
case ${CONNECTOR:-cxl} in
cxl) transfer='{"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}' ;;
nixl-cxl)
    transfer='{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["CXL"]}}'
    NIXL_PLUGIN_DIR=$(kvbm-cxl nixl-plugin-dir)
    export NIXL_PLUGIN_DIR
    ;;
nixl-ucx)
    transfer='{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["UCX"]}}'
    ;;
*)
    echo "worker.sh: CONNECTOR is $CONNECTOR; it may be cxl, nixl-cxl or nixl-ucx" >&2
    exit 2
    ;;
esac
# ROUTER=kv: the frontend follows the KV events of the worker, and those of the pool, which CxlConnector adds.
if [ "${ROUTER:-least-loaded}" = kv ]; then
    set -- --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc:///tmp/kv-events-'"$DYN_SYSTEM_PORT"'"}' "$@"
fi
# Without the time-out vLLM kills its engine at once when it is asked to end, and the pool waits for proof that the engine has ended.
exec python3 -m dynamo.vllm --model "$MODEL" --disaggregation-mode "$role" --tensor-parallel-size "$TP" --block-size "$BLOCK_TOKENS" \
    --shutdown-timeout 30 \
    --kv-transfer-config "$transfer" "$@"
