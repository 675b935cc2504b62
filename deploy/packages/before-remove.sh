#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Before a removal, which dpkg calls "remove" and rpm 0, and not before an upgrade: the keeper leaves the pool in good order.
set -e
case ${1:-} in
remove | 0) [ ! -d /run/systemd/system ] || systemctl --no-reload disable --now kvbm-cxl-host.service ;;
esac
