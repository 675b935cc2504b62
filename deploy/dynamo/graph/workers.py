# SPDX-License-Identifier: Apache-2.0
"""The command of each process of the graph. deploy/dynamo/*.sh has the same commands for nodes of their own."""

import json
import sys
from dataclasses import dataclass

from .environment import has_gpu
from .model import BLOCK_TOKENS, Model
from .options import Options
from .ports import Ports

# A tiny cache: what a test needs, several times over.
CPU_ARGUMENTS = ("--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20), "--dtype", "float32", "--max-model-len", "4096")


@dataclass(frozen=True)
class Worker:
    """A worker's place in the graph, and its ports. One that is started again gets new ones, so that nobody takes it for the old one."""

    role: str
    number: int
    system_port: int
    rpc_port: int
    side_channel_port: int
    events_port: int

    @classmethod
    def make(cls, role: str, number: int, ports: Ports) -> "Worker":
        """With ports that nobody else got."""
        return cls(role, number, *(ports.take() for _ in range(4)))

    @property
    def name(self) -> str:
        """As in logs and messages."""
        return f"{self.role}-{self.number}"

    def environment(self) -> dict[str, str]:
        """Its ports."""
        return {
            "DYN_SYSTEM_PORT": str(self.system_port),
            "DYN_TCP_RPC_PORT": str(self.rpc_port),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            # It has no requests of its own to finish when the whole graph ends.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }


def kv_transfer_config(options: Options, role: str) -> dict:
    """How KV blocks travel, as vLLM's --kv-transfer-config."""
    if options.connector == "cxl":
        config = {"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        extra = {}
    else:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        extra = {"backends": ["CXL"]} if options.connector == "nixl-cxl" else {"backends": ["UCX"]}
        if not has_gpu():
            config["kv_buffer_device"] = "cpu"
    extra |= options.connector_config
    return config | ({"kv_connector_extra_config": extra} if extra else {})


def worker_command(options: Options, model: Model, worker: Worker) -> list[str]:
    """A prefill or decode worker."""
    command = [sys.executable, "-m", "dynamo.vllm", "--model", model.path, "--served-model-name", model.name]
    command += ["--disaggregation-mode", worker.role, "--block-size", str(BLOCK_TOKENS)]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(options, worker.role))]
    if options.router == "kv":
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{worker.events_port}"}
        command += ["--kv-events-config", json.dumps(events)]
    return command + list(() if has_gpu() else CPU_ARGUMENTS) + list(options.worker_arguments)


def frontend_command(options: Options, port: int) -> list[str]:
    """What clients talk to."""
    command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    # A request whose worker dies goes on elsewhere.
    return [*command, "--router-mode", options.router, "--migration-limit", "3"]
