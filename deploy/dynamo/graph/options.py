# SPDX-License-Identifier: Apache-2.0
"""What can be chosen, and from where: the command line, which `make serve` fills from its variables."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONNECTORS = ("cxl", "nixl-cxl", "nixl-ucx")
ROUTERS = ("least-loaded", "round-robin", "kv")
DISCOVERIES = ("file", "etcd")
# Where the workers run, and how much slower than here everything is there: the processor of a virtual machine is emulated.
SLOWNESS = {"processes": 1, "namespaces": 1, "lab": 40}
READY_TIMEOUT_S = 300


@dataclass(frozen=True)
class Options:
    """A graph: how many workers of which kind, on what, and how requests and KV blocks find their way."""

    prefill: int = 1
    decode: int = 1
    connector: str = "cxl"
    # A folder or a name that vLLM knows; empty = the tiny model.
    model: str = ""
    # Devices, as CXL_POOL has them; empty = a pool of our own in /dev/shm, which goes with the graph.
    pool: str = ""
    # 0 = 1 GiB, or more where the model's blocks are large.
    pool_bytes: int = 0
    format_given_pool: bool = False
    router: str = "round-robin"
    discovery: str = "file"
    # Every worker a host of its own on this machine, or prefill and decode in two hosts of a lab: namespaces, or virtual machines.
    hosts: str = "processes"
    once: bool = False
    port: int = 0
    # Where models and logs are kept.
    state: Path = ROOT / "target" / "serve"
    # Added to every worker's command line, to the frontend's, and to the connector's configuration.
    worker_arguments: tuple[str, ...] = ()
    frontend_arguments: tuple[str, ...] = ()
    connector_config: dict = field(default_factory=dict)
    # Added to every process's environment.
    environment: dict = field(default_factory=dict)
    ready_timeout_s: float = READY_TIMEOUT_S

    @property
    def needs_pool(self) -> bool:
        """Whether KV blocks go through a pool."""
        return self.connector != "nixl-ucx"

    @property
    def slowness(self) -> int:
        """How many times longer than on this machine things may take on the workers' hosts."""
        return SLOWNESS[self.hosts]


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 16:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 16")
    return number


def _size(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    number, shift = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 0)
    return int(number) << shift


def parse(arguments: Sequence[str]) -> Options:
    """Options of a command line; ends the program with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="serve.py", description="A Dynamo graph on this machine whose prefill and decode workers exchange KV blocks through a pool."
    )
    parser.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill workers (1)")
    parser.add_argument("--decode", type=_count, default=1, metavar="N", help="decode workers (1)")
    parser.add_argument("--connector", choices=CONNECTORS, default="cxl", help="how KV blocks travel (cxl)")
    parser.add_argument("--model", default="", help="a folder or a name that vLLM knows; without it a tiny random model that is made here")
    pool_help = "a formatted pool such as /dev/dax0.0; without it one in /dev/shm that goes with the graph"
    parser.add_argument("--pool", default="", metavar="SPEC", help=pool_help)
    parser.add_argument("--format-pool", action="store_true", help="format the pool that --pool names: what it holds is lost")
    parser.add_argument("--pool-size", type=_size, default=0, metavar="SIZE", help="of a pool in /dev/shm (1G, or more)")
    parser.add_argument("--router", choices=ROUTERS, default="least-loaded", help="how the frontend chooses workers (least-loaded)")
    parser.add_argument("--discovery", choices=DISCOVERIES, default="file", help="how processes find each other (file)")
    hosts_help = "each worker by itself here (processes), or prefill and decode on two hosts: namespaces, or virtual machines (lab)"
    parser.add_argument("--hosts", choices=SLOWNESS, default="processes", help=hosts_help)
    parser.add_argument("--once", action="store_true", help="ask, verify, end: 0 if everything was as it has to be, else 1")
    parser.add_argument("--port", type=int, default=0, help="of the frontend; 0 = a free one")
    parser.add_argument("--state", type=Path, default=Options.state, metavar="DIR", help="where models and logs are kept (target/serve)")
    timeout_help = f"longest wait for the workers, in seconds ({READY_TIMEOUT_S}; virtual machines {READY_TIMEOUT_S * SLOWNESS['lab']})"
    parser.add_argument("--ready-timeout", type=float, metavar="S", help=timeout_help)
    parser.add_argument("worker_arguments", nargs="*", metavar="-- ARG", help="added to the command line of every worker")
    said = parser.parse_args(arguments)
    if said.format_pool and not said.pool:
        parser.error("--format-pool is about --pool; a pool of our own is always formatted")
    if said.pool and said.hosts != "processes":
        parser.error("--pool is on this machine: the hosts of a lab have a memory device of their own")
    return Options(
        prefill=said.prefill,
        decode=said.decode,
        connector=said.connector,
        model=said.model,
        pool=said.pool,
        pool_bytes=said.pool_size,
        format_given_pool=said.format_pool,
        router=said.router,
        # Virtual machines have no folder in common that tells them of changes.
        discovery="etcd" if said.hosts == "lab" else said.discovery,
        hosts=said.hosts,
        once=said.once,
        port=said.port,
        state=Path(os.path.abspath(said.state)),
        worker_arguments=tuple(said.worker_arguments),
        ready_timeout_s=said.ready_timeout or READY_TIMEOUT_S * SLOWNESS[said.hosts],
    )
