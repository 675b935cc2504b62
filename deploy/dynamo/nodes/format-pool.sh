#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Once in the life of a pool, on any node that reaches its devices: makes the devices an empty pool. It refuses devices that hold something.
set -eu
. "$(dirname "$0")/rack.env"
cxlctl doctor
# Small cells are for block descriptions for routers (ROUTER=kv).
exec cxlctl format --cells "$CELL_BYTES:75%" --cells 2K:1% --seats 4 "$@"
