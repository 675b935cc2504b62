# SPDX-License-Identifier: Apache-2.0
"""Runs NIXL's own benchmark, nixlbench of a user's build, as one of two hosts of a pool.

nixlbench has a closed list of backends. Our plugin gets the name of one that has memory on both sides and takes no parameters, by a link in
the folder for NIXL_PLUGIN_DIR; NIXL does not compare the name of a file with what the plugin calls itself. Two processes find each other by
nixlbench's ASIO runtime, at an address of the initiator, which is the one that waits there: no etcd is needed.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ._errors import NixlError
from ._installation import Installation
from ._overlay import make_overlay
from ._plugin import malloc_path

# What nixlbench says when the initiator does not wait yet.
_TOO_EARLY = "Connection failed"
_RETRY_S = 1.0


def environment(installation: Installation, folder: Path, name: str, is_in_pool: bool) -> dict[str, str]:
    """The environment of nixlbench: plugins of `installation` and ours as backend `name`, below `folder`.

    With `is_in_pool` its buffers lie in the pool. Raises NixlError.
    """
    plugins = make_overlay(installation, folder, (name,))
    bundled = installation.site / f"{installation.package}.libs"
    libraries = [str(installation.libraries), str(bundled), os.environ.get("LD_LIBRARY_PATH", "")]
    env = {**os.environ, "NIXL_PLUGIN_DIR": str(plugins), "LD_LIBRARY_PATH": ":".join(filter(None, libraries))}
    if is_in_pool:
        env["LD_PRELOAD"] = ":".join(filter(None, [str(malloc_path()), os.environ.get("LD_PRELOAD", "")]))
    return env


def _address(host: str, wait_s: float) -> str:
    """The address of a host, which may have no name yet: nixlbench takes numbers alone. Raises NixlError."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise NixlError(f"{host} has no address: {error}; name the initiator's host by one that both sides can resolve") from error
        time.sleep(_RETRY_S)


def _once(command: Sequence[str], env: dict[str, str]) -> tuple[int, bool]:
    """Runs a command and passes on what it prints: its exit status, and whether it came before the initiator."""
    is_early = False
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, text=True, **both) as process:
            assert process.stdout is not None
            for line in process.stdout:
                is_early = is_early or _TOO_EARLY in line
                print(line, end="", flush=True)
    except OSError as error:
        raise NixlError(f"{command[0]} cannot be run: {error}") from error
    # Ended by a signal: as a shell has it.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, is_early


def run(binary: Path, initiator: str, port: int, env: dict[str, str], name: str, arguments: Sequence[str], wait_s: float) -> int:
    """Runs nixlbench until it ends, and returns its exit status.

    The side whose machine has the address of `initiator` is the initiator, and prints the figures; the other is the target, and waits up to
    `wait_s` seconds for it. Raises NixlError where the address or the program is missing.
    """
    found = _address(initiator, wait_s)
    command = [str(binary), f"--backend={name}", "--runtime_type=ASIO", f"--asio_address={found}", f"--asio_port={port}", *arguments]
    deadline = time.monotonic() + wait_s
    while True:
        status, is_early = _once(command, env)
        if not (status and is_early):
            return status
        if time.monotonic() >= deadline:
            print(f"kvbm-cxl: no initiator at {found}:{port} within {wait_s:.0f} s", file=sys.stderr)
            return status
        time.sleep(_RETRY_S)
