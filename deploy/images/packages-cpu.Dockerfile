# SPDX-License-Identifier: Apache-2.0
# What scripts/requirements/serve.lock pins, as `make setup-serve` has installed and verified it: what worker-cpu is made of.
ARG BASE=kvbm-cxl/base:bookworm
FROM ${BASE}
COPY rootfs/ /
