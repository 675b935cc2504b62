# SPDX-License-Identifier: Apache-2.0
"""Environment variables of every process of the graph."""

import os
from pathlib import Path

from . import etcd
from .options import ROOT, Options

HARNESS = ROOT / "deploy" / "dynamo" / "cpu_harness"
# Longest step of an engine.
STEP_TIMEOUT_S = 300
# Silence after which a host of the pool is taken for dead. All of them share this machine's processors, which others may have for a while.
SUSPECT_MS = 5000
# How often a member of the pool looks for recalls and fences, on a processor that is not emulated.
POLL_US = 1000
# Settings of the caller that would reach into the graph: it says all of them itself.
DROPPED = ("DYN_", "CXL_", "KVBM_CXL_", "NIXL_", "UCX_", "VLLM_", "ETCD_", "NATS_", "PYTHONDONTWRITEBYTECODE")


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be seen."""
    return Path("/proc/driver/nvidia/gpus").is_dir() and any(Path("/proc/driver/nvidia/gpus").iterdir())


def _discovery(options: Options, folder: Path) -> dict[str, str]:
    if options.discovery == "file":
        return {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "discovery")}
    return {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_LEASE_TTL": str(etcd.lease_s(options))}


def common(options: Options, folder: Path) -> dict[str, str]:
    """For all processes: no etcd and NATS unless asked for, nothing fetched, nothing outside of the graph's folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    told = {
        **kept,
        **_discovery(options, folder),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_NAMESPACE": "serve",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(options.state / "vllm"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONUNBUFFERED": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(options.ready_timeout_s)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_TIMEOUT_S * options.slowness),
    }
    if options.model and not os.path.isdir(options.model):
        del told["HF_HUB_OFFLINE"]
    if not has_gpu():
        # A thread per process: more of them than cores wait for each other instead of computing.
        told |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        # To look again is work, too: an emulated processor would do little else.
        told["CPU_HARNESS_SLOWNESS"] = str(options.slowness)
        if options.slowness > 1:
            # For a CPU that means that the model runs in the engine's own process: one less that imports vLLM and looks for messages.
            told["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        told["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HARNESS), os.environ.get("PYTHONPATH")]))
    return told | options.environment


def network(address: str) -> dict[str, str]:
    """Where the others reach a process of a host with this address."""
    names = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "VLLM_NIXL_SIDE_CHANNEL_HOST")
    return dict.fromkeys(names, address)


def pool(options: Options, spec: str, machine: str | None, folder: Path) -> dict[str, str]:
    """Where the pool is. A worker with a machine of its own is a host by itself, as if it ran in another chassis of the rack."""
    told = {"CXL_POOL": spec, "CXL_SUSPECT_MS": str(SUSPECT_MS), "CXL_POLL_US": str(POLL_US * options.slowness)}
    if machine is not None:
        told |= {"CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(folder / f"host-{machine[:8]}")}
    return told
