# SPDX-License-Identifier: Apache-2.0
"""The connector's logger. As a child of vLLM's it has vLLM's level and form, whose handlers pass on nothing from outside."""

import logging

logger = logging.getLogger("vllm.kvbm_cxl")
