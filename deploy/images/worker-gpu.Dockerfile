# SPDX-License-Identifier: Apache-2.0
# A worker for GPUs: Dynamo's image of vLLM with the wheel of kvbm-cxl. scripts/images fills the context: the wheel and image.lock.
# DYNAMO_VERSION is what the chart's runtimeVersion has to say.
ARG DYNAMO_VERSION=1.6.1
FROM nvcr.io/nvidia/ai-dynamo/vllm-runtime:${DYNAMO_VERSION}
USER root
COPY *.whl image.lock /tmp/kvbm-cxl/
# The wheel is of this checkout, what it needs is pinned by hash; the image has uv or pip. One layer: only installed files remain.
RUN set -eu; \
    install() { if command -v uv >/dev/null; then uv pip install --no-cache --no-deps "$@"; else python3 -m pip install --no-cache-dir --no-deps "$@"; fi; }; \
    install --require-hashes -r /tmp/kvbm-cxl/image.lock; \
    install --no-index /tmp/kvbm-cxl/*.whl; \
    rm -r /tmp/kvbm-cxl; \
    install_folder() { mkdir -p "$1" && chown 1000:1000 "$1" && chmod 0700 "$1"; }; \
    install_folder /run/kvbm-cxl; \
    mkdir -p /opt/kvbm-cxl; \
    ln -s "$(kvbm-cxl nixl-plugin-dir --into /opt/kvbm-cxl/nixl)" /opt/kvbm-cxl/nixl-plugins
USER 1000:1000
