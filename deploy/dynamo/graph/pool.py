# SPDX-License-Identifier: Apache-2.0
"""The pool that KV blocks lie in: the one that is named, or one in /dev/shm that goes with the graph."""

import json
import os
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import GraphError
from .options import ROOT, Options

if TYPE_CHECKING:
    from .model import Model

TIMEOUT_S = 60
PAGE = 4096
# A pool of our own has room for a few of the longest prompts, whatever the model.
MIN_POOL_BYTES, POOL_BLOCKS = 1 << 30, 128
# For block descriptions for routers: enough for all blocks of 200 KiB or more.
DESCRIPTION_CELLS = "2K:1%"
BLOCK_PERCENT = 75


def cxlctl_path() -> Path:
    """The command line: of the installed package, or of the last build. Raises GraphError."""
    with suppress(ImportError, FileNotFoundError):
        from kvbm_cxl import programs

        return programs.cxlctl_path()
    built = ROOT / "target" / "release" / "cxlctl"
    if built.is_file():
        return built
    raise GraphError(f"no cxlctl at {built}, nor in a package kvbm_cxl: run `make build`")


def cxlctl(spec: str, *arguments: str, environment: dict | None = None) -> str:
    """What a command of cxlctl prints. Raises GraphError with what it complained of."""
    command = [str(cxlctl_path()), *arguments]
    told = {**os.environ, "CXL_POOL": spec, **(environment or {})}
    try:
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GraphError(f"cxlctl {' '.join(arguments)}: {error}") from error
    if done.returncode:
        raise GraphError(f"cxlctl {' '.join(arguments)} on {spec}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@dataclass(frozen=True)
class Pool:
    """Where KV blocks are.

    own: the file that goes with the graph; machines: identities of the workers' hosts, none where each machine has its own; run: as
    `cxlctl`, on a machine that has the pool; fresh: nothing is in it but what the graph puts there.
    """

    spec: str
    own: Path | None
    machines: tuple[str, ...]
    run: Callable[..., str] = cxlctl
    fresh: bool = True

    def machine(self, number: int) -> str | None:
        """The identity of a worker's host."""
        return self.machines[number] if self.machines else None

    def fsck(self) -> dict:
        """What a check of all metadata says. Raises GraphError where the check cannot be made."""
        try:
            return json.loads(self.run(self.spec, "fsck", "--json"))
        except ValueError as error:
            raise GraphError(f"cxlctl fsck: {error}") from error


def cell_bytes(block_bytes: int) -> int:
    """A cell that holds a block."""
    return -(-block_bytes // PAGE) * PAGE


def format_pool(
    spec: str,
    block_bytes: int | None,
    force: bool = False,
    announced: bool = False,
    run: Callable[..., str] = cxlctl,
) -> None:
    """Makes an empty pool with cells of a block. Raises GraphError.

    announced: with cells for descriptions of blocks, which routers receive.
    """
    arguments = ["format", "--slots", "32"]
    if block_bytes:
        for cells in (f"{cell_bytes(block_bytes)}:{BLOCK_PERCENT}%", *[DESCRIPTION_CELLS] * announced):
            arguments += ["--cells", cells]
    run(spec, *arguments, *(["--force"] if force else []))


def _is_announced(options: Options) -> bool:
    return options.router == "kv" and options.connector == "cxl"


def make_in_lab(options: Options, model: "Model", lab) -> Pool:
    """A pool in the memory that the hosts of a lab share. Raises GraphError."""
    format_pool(lab.spec, model.block_bytes, announced=_is_announced(options), run=lab.cxlctl)
    return Pool(lab.spec.partition(",")[0], None, (), lab.cxlctl)


def make(options: Options, model: "Model", note_path) -> Pool:
    """The pool for these options. `note_path` gets a file before it exists, so that it is removed whatever happens. Raises GraphError."""
    if options.pool:
        if options.format_given_pool:
            format_pool(options.pool, model.block_bytes, force=True, announced=_is_announced(options))
        cxlctl(options.pool, "info", "--json")
        return Pool(options.pool, None, (), fresh=False)
    machines = tuple(uuid.uuid4().hex for _ in range(options.prefill + options.decode))
    own = Path("/dev/shm") / f"kvbm-cxl-serve-{uuid.uuid4().hex[:12]}"
    note_path(own)
    size_bytes = options.pool_bytes or max(MIN_POOL_BYTES, POOL_BLOCKS * cell_bytes(model.block_bytes or 0))
    format_pool(f"{own},size={size_bytes}", model.block_bytes, announced=_is_announced(options))
    return Pool(str(own), own, machines)
