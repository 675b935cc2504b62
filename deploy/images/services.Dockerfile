# SPDX-License-Identifier: Apache-2.0
# etcd and Prometheus where no registry is reached: the programs that `make setup-etcd` and `make setup-deploy` have unpacked.
ARG BASE=kvbm-cxl/base:bookworm
FROM ${BASE}
COPY rootfs/ /
USER 1000:1000
