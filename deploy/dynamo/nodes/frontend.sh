#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One in the rack, or several: what clients talk to. It needs neither a GPU nor the pool.
set -eu
. "$(dirname "$0")/rack.env"
# ROUTER=kv sends requests where their prefix is; with a pool that every worker reads, round-robin is close to it and needs no events. With kv
# a block of the pool counts 0.95 of one in a worker's memory, so that load decides between workers that can all have it.
ROUTER=${ROUTER:-round-robin}
if [ "$ROUTER" = kv ]; then
    set -- --router-disk-cache-hit-weight 0.95 "$@"
fi
exec python3 -m dynamo.frontend --http-port "${PORT:-8000}" --router-mode "$ROUTER" --migration-limit 3 "$@"
