# SPDX-License-Identifier: Apache-2.0
"""The command of each process of the graph. deploy/dynamo/*.sh has the same commands for nodes of their own."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from .environment import has_gpu
from .model import BLOCK_TOKENS, Model
from .options import Options
from .ports import Ports

# What the router credits a block of the pool with, in blocks of a worker's own memory. To pull one costs a few percent of computing it, so
# that load decides which worker is asked, as in Beluga 6.3; Dynamo's default of 0.25 is of disks.
POOL_HIT_WEIGHT = 0.95


@dataclass(frozen=True)
class Worker:
    """A worker's place in the graph, and its ports. One that is started again gets new ones, so that it is not taken for the old one."""

    role: str
    number: int
    system_port: int
    rpc_port: int
    side_channel_port: int

    @classmethod
    def make(cls, role: str, number: int, ports: Ports) -> "Worker":
        """With ports that no other worker got."""
        return cls(role, number, *(ports.take() for _ in range(3)))

    @property
    def name(self) -> str:
        """As in logs and messages."""
        return f"{self.role}-{self.number}"

    def environment(self) -> dict[str, str]:
        """Its ports."""
        return {
            "DYN_SYSTEM_PORT": str(self.system_port),
            "DYN_TCP_RPC_PORT": str(self.rpc_port),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            # It has no requests of its own to finish when the whole graph ends.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }


def kv_transfer_config(options: Options, role: str) -> dict:
    """How KV blocks travel, as vLLM's --kv-transfer-config."""
    if options.connector == "cxl":
        config = {"kv_connector": "CxlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        # The launcher verifies hits to the token, so no part of a hit is computed for the audit.
        extra = {"audit": False}
    else:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        extra = {"backends": ["CXL"]} if options.connector == "nixl-cxl" else {"backends": ["UCX"]}
        if not has_gpu():
            config["kv_buffer_device"] = "cpu"
    extra |= options.connector_config
    return config | ({"kv_connector_extra_config": extra} if extra else {})


def kv_events_config(folder: Path, worker: Worker) -> dict:
    """Where a worker's KV events go, as vLLM's --kv-events-config: to a socket in `folder`. With tcp vLLM would bind all addresses."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events-{worker.name}-{worker.rpc_port}"}


def worker_command(options: Options, model: Model, worker: Worker, folder: Path) -> list[str]:
    """A prefill or decode worker, with its sockets in `folder`."""
    command = [sys.executable, "-m", "dynamo.vllm", "--model", model.path, "--served-model-name", model.name]
    command += ["--disaggregation-mode", worker.role, "--block-size", str(BLOCK_TOKENS)]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(options, worker.role))]
    if options.router == "kv":
        command += ["--kv-events-config", json.dumps(kv_events_config(folder, worker))]
    return [*command, *model.engine_flags(), *options.worker_arguments]


def frontend_command(options: Options, port: int) -> list[str]:
    """What clients talk to."""
    command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    # A request whose worker dies continues elsewhere.
    command += ["--router-mode", options.router, "--migration-limit", "3"]
    if options.router == "kv" and options.connector == "cxl":
        command += ["--router-disk-cache-hit-weight", str(POOL_HIT_WEIGHT)]
    return [*command, *options.frontend_arguments]
