# SPDX-License-Identifier: Apache-2.0
# A worker without a GPU, for trials and tests: vLLM, Dynamo and NIXL with the wheel of kvbm-cxl and the folder of plugins.
ARG PACKAGES=kvbm-cxl/packages-cpu:0.2.0
FROM ${PACKAGES}
COPY rootfs/ /
RUN set -eu; \
    chmod 0755 /usr/local/lib/python3.11/dist-packages/kvbm_cxl/bin/*; \
    install -d -o 1000 -g 1000 -m 0700 /run/kvbm-cxl; \
    install -d -o 1000 -g 1000 /models; \
    ln -s "$(python3 -m kvbm_cxl.cli nixl-plugin-dir --into /opt/kvbm-cxl/nixl)" /opt/kvbm-cxl/nixl-plugins
# There is no C++ compiler: vLLM must not compile its samplers, or the first request without temperature 0 ends the engine. Engines need
# --enforce-eager here.
ENV TORCHDYNAMO_DISABLE=1
ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 1000:1000
CMD ["python3", "-m", "dynamo.vllm", "--help"]
