#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One in the rack, or several: what clients talk to. It needs neither a GPU nor the pool.
set -eu
. "$(dirname "$0")/rack.env"
# ROUTER=kv sends requests where their prefix is; with a pool that every worker reads, round-robin is close to it and needs no events.
exec python3 -m dynamo.frontend --http-port "${PORT:-8000}" --router-mode "${ROUTER:-round-robin}" --migration-limit 3 "$@"
