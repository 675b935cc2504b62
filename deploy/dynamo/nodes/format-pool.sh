#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Once in the life of a pool, on the node that is to manage it first: makes the devices an empty pool. It refuses devices that hold something.
set -eu
. "$(dirname "$0")/rack.env"
cxlctl doctor
# Small cells are for what routers are told of each block (ROUTER=kv).
exec cxlctl format --cells "$CELL_BYTES:75%" --cells 2K:1% --seats 4 "$@"
