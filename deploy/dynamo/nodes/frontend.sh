#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One in the rack, or several: what clients talk to. It needs neither a GPU nor the pool.
set -eu
. "$(dirname "$0")/rack.env"
# With a pool that every worker reads, any worker can have a prefix: the one with the fewest requests is the best, and needs no events.
# ROUTER=round-robin takes turns; ROUTER=kv sends requests where their prefix is: with it a block of the pool counts 0.95 of one in a worker's
# memory, so that load decides between workers that can all have it.
ROUTER=${ROUTER:-least-loaded}
if [ "$ROUTER" = kv ] && [ "${CONNECTOR:-cxl}" = cxl ]; then
    set -- --router-disk-cache-hit-weight 0.95 "$@"
fi
exec python3 -m dynamo.frontend --http-port "${PORT:-8000}" --router-mode "$ROUTER" --migration-limit 3 "$@"
