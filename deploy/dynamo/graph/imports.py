# SPDX-License-Identifier: Apache-2.0
"""Imports what the processes of a graph import, so that its bytecode is there when they start: else each of them compiles all of it."""

import importlib
import os

MODULES = (
    "dynamo.frontend.main",
    "dynamo.vllm.main",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)

# What they print on the way is of no use here.
says = os.fdopen(os.dup(1), "w")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
for module in MODULES:
    try:
        importlib.import_module(module)
    except ImportError as error:
        # It only costs time: the process that needs the module will say more.
        says.write(f"{module}: {error}\n")
says.close()
