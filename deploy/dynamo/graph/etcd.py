# SPDX-License-Identifier: Apache-2.0
"""Discovery by etcd: a server of the graph's own, and a keeper for each host of the pool, whose slot comes from a lease there."""

import json
import time
from pathlib import Path

from .client import RequestFailed, get
from .errors import GraphError
from .options import ROOT, Options
from .processes import Child

TIMEOUT_S = 30
# A host is fenced, and a process of Dynamo gone, when nothing was heard of it for so long.
LEASE_S = 10


def programs() -> tuple[Path, Path]:
    """etcd and cxl-member. Raises GraphError where they were not set up."""
    etcd, keeper = ROOT / ".venv" / "etcd" / "etcd", ROOT / "target" / "release" / "cxl-member"
    missing = [str(path) for path in (etcd, keeper) if not path.exists()]
    if missing:
        raise GraphError(f"no {' and no '.join(missing)}: run `make build-member`")
    return etcd, keeper


def url(port: int, address: str = "127.0.0.1") -> str:
    """Where clients reach the server."""
    return f"http://{address}:{port}"


def server_command(port: int, peer_port: int, folder: Path, address: str) -> list[str]:
    """A server alone, which listens on 127.0.0.1, and on `address` where that is another, and keeps what it has below `folder`."""
    client, peer = url(port, address), url(peer_port)
    listen = ["--listen-client-urls", ",".join({url(port), client}), "--advertise-client-urls", client, "--listen-peer-urls", peer]
    alone = ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    return [str(programs()[0]), "--data-dir", str(folder), *listen, *alone]


def lease_s(options: Options) -> int:
    """How long a lease lasts without a sign of life, in seconds."""
    return LEASE_S * options.slowness


def keeper_command(options: Options, server: str) -> list[str]:
    """What keeps the slot of the host that it is started on; the pool comes from its environment."""
    return [str(programs()[1]), "--endpoints", server, "--ttl-s", str(lease_s(options))]


def wait_until_up(server: Child, port: int) -> None:
    """Until the server takes requests. Raises GraphError."""

    def is_up() -> bool:
        try:
            return json.loads(get(port, "/health", timeout_s=1)).get("health") == "true"
        except (OSError, RequestFailed, ValueError):
            return False

    _wait(is_up, server)


def wait_until_joined(keeper: Child) -> None:
    """Until the keeper has said which slot it has. Raises GraphError."""
    _wait(lambda: '"slot"' in keeper.text(), keeper)


def _wait(is_so, child: Child) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        if child.status() is not None:
            raise GraphError(f"{child.name} ended with {child.status()}:\n{child.tail()}")
        if time.monotonic() > deadline:
            raise GraphError(f"{child.name} is not ready after {TIMEOUT_S} s:\n{child.tail()}")
        time.sleep(0.05)
