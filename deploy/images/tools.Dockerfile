# SPDX-License-Identifier: Apache-2.0
# cxlctl, cxl-plan and format-if-empty, and the Python package for programs of your own. For `cxlctl host`, the format, the exporter.
# scripts/images fills rootfs. BASE is any image with the C library of Debian 12 or later; Python 3.11 is needed for the package alone.
ARG BASE=kvbm-cxl/base:bookworm
FROM ${BASE}
COPY rootfs/ /
# A volume at this place takes its owner from here.
RUN install -d -o 1000 -g 1000 -m 0700 /run/kvbm-cxl
ENV PYTHONPATH=/opt/kvbm-cxl/python
USER 1000:1000
CMD ["cxlctl", "host"]
