#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# After an installation or an upgrade: the user and the group, the rule for the device nodes, and a keeper of the new version if one runs.
set -e
systemd-sysusers kvbm-cxl.conf || echo 'kvbm-cxl-tools: no systemd-sysusers: make the group cxl (1100) and the user kvbm-cxl in it' >&2
if [ -d /run/systemd/system ]; then
    udevadm control --reload && udevadm trigger --subsystem-match=dax || true
    systemctl daemon-reload
    systemctl try-restart kvbm-cxl-host.service
fi
