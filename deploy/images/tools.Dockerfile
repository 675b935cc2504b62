# SPDX-License-Identifier: Apache-2.0
# cxlctl, cxl-plan and format-if-empty, for `cxlctl host`, the format and the exporter. scripts/images fills rootfs. BASE is any image with the
# C library of Debian 12 or later and a shell.
ARG BASE=kvbm-cxl/slim:bookworm
FROM ${BASE}
COPY rootfs/ /
# A volume at this place takes its owner from here.
RUN mkdir -p -m 0700 /run/kvbm-cxl && chown 1000:1000 /run/kvbm-cxl
USER 1000:1000
CMD ["cxlctl", "host"]
