# SPDX-License-Identifier: Apache-2.0
"""A running graph: what `serve.py` and the tests start, ask and end."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from . import environment, etcd, hosts, processes, workers
from .client import TIMEOUT_S, Answer, ask, get
from .discovery import KeepAlive
from .errors import GraphError
from .model import Model, choose
from .options import Options
from .ports import Ports
from .processes import Child
from .readiness import wait_until_ready
from .sweep import Record, sweep
from .workers import Worker

PATIENCE_S = 8
PLUGIN_TIMEOUT_S = 60
METRICS_TIMEOUT_S = 10
KEPT_LOGS = 5


class Graph:
    """Started when entered; ended, with nothing left, when left. Needs the main thread for nothing but signals of the caller."""

    def __init__(self, options: Options, say: Callable[[str], None] = lambda line: print(line, flush=True)):
        self.options, self.say = options, say
        self.children: dict[str, Child] = {}
        self.ports = Ports()
        self.keep_alive = None
        self.replaced_ports: list[int] = []
        self.folder = Path(tempfile.mkdtemp(prefix="cxl-serve-"))
        self.record = Record(self.folder / "record.json", self.folder)
        self.watcher = processes.start_watcher(self.record)
        self.place = hosts.ThisMachine(options, self.record)

    def __enter__(self) -> "Graph":
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def _start(self) -> None:
        options = self.options
        for name in ("tmp", "discovery"):
            (self.folder / name).mkdir()
        self.logs = self._new_logs(options.state / "logs")
        self.model: Model = choose(options)
        self.say(f"model {self.model.name}: {self.model.path}")
        if options.hosts != "processes":
            self.place = hosts.InLab(options, self.logs, self.say)
        self.pool = self.place.make_pool(self.model) if options.needs_pool else None
        if self.pool:
            own = self.pool.own
            self.say(f"pool {self.pool.spec}" + (f", {own.stat().st_size >> 20} MiB, goes with the graph" if own else ""))
        self.environment = environment.common(options, self.folder)
        self.etcd_port = self._start_etcd() if options.discovery == "etcd" else None
        self.port = options.port or self.ports.take()
        roles = [("prefill", number) for number in range(options.prefill)] + [("decode", number) for number in range(options.decode)]
        self.workers = {worker.name: worker for worker in (Worker.make(role, number, self.ports) for role, number in roles)}
        self._child("frontend", workers.frontend_command(options, self.port), {"DYN_SYSTEM_PORT": str(self.ports.take())}, [self.port])
        for name in self.workers:
            self._start_worker(name)
        if options.discovery == "file":
            self.keep_alive = KeepAlive(self.folder / "discovery", self._dead_ports)

    def _new_logs(self, folder: Path) -> Path:
        """A folder for this graph's logs; the last few graphs keep theirs."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)
        made = folder / self.folder.name
        made.mkdir()
        return made

    def _child(self, name: str, command: list[str], told: dict[str, str], ports: Sequence[int] = ()) -> Child:
        told = self.environment | environment.network(self.place.address(name)) | told
        child = self.place.child(name, command, told, self.logs / f"{name}.log", ports)
        self.children[name] = child
        return child

    def _start_etcd(self) -> int:
        port, peer_port = self.ports.take(), self.ports.take()
        address = self.place.address("etcd")
        server = self._child("etcd", etcd.server_command(port, peer_port, self.folder / "etcd", address), {}, [port])
        etcd.wait_until_up(server, port)
        self.environment["ETCD_ENDPOINTS"] = etcd.url(port, address)
        return port

    def _keep_slot(self, name: str, told: dict[str, str]) -> None:
        """Has the host of a worker hold its slot of the pool by a lease, before the worker joins."""
        keeper = f"keeper-{name}"
        if keeper not in self.children:
            command = etcd.keeper_command(self.options, self.environment["ETCD_ENDPOINTS"])
            etcd.wait_until_joined(self._child(keeper, command, told))

    def _dead_ports(self) -> list[int]:
        died = [worker.rpc_port for name, worker in list(self.workers.items()) if self.children[name].status() is not None]
        return self.replaced_ports + died

    def live_ports(self) -> set[int]:
        """Where the workers that run listen for requests."""
        return {worker.rpc_port for name, worker in self.workers.items() if self.children[name].status() is None}

    def restart_worker(self, name: str) -> Child:
        """Starts a worker in the place of one that has ended: the same host of the pool, other ports."""
        old = self.workers[name]
        self.replaced_ports.append(old.rpc_port)
        self.workers[name] = Worker.make(old.role, old.number, self.ports)
        return self._start_worker(name)

    def _start_worker(self, name: str) -> Child:
        worker, told = self.workers[name], {}
        if self.pool:
            told |= environment.pool(self.options, self.pool.spec, self.pool.machine(list(self.workers).index(name)), self.folder)
            if self.etcd_port:
                self._keep_slot(name, told)
        if self.options.connector == "nixl-cxl":
            told |= self._plugin()
        (self.logs / f"{name}.log").unlink(missing_ok=True)
        command = workers.worker_command(self.options, self.model, worker, self.folder)
        return self._child(name, command, worker.environment() | told, [worker.system_port])

    def _plugin(self) -> dict[str, str]:
        """As `NIXL_PLUGIN_DIR=$(kvbm-cxl nixl-plugin-dir)`, but in the graph's own folder."""
        command = [sys.executable, "-m", "kvbm_cxl.cli", "nixl-plugin-dir", "--into", str(self.folder / "nixl")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PLUGIN_TIMEOUT_S, check=False)
        if done.returncode:
            raise GraphError(f"kvbm-cxl nixl-plugin-dir: {done.stderr.strip()}; `make python-package` installs the plugin")
        return {"NIXL_PLUGIN_DIR": done.stdout.strip()}

    def wait_until_ready(self) -> float:
        """Waits until all workers are known and one has answered, with progress; seconds it took. Raises GraphError."""
        return wait_until_ready(self)

    def check(self) -> None:
        """Raises GraphError where a process has ended by itself, with the end of its log."""
        self.record.look()
        for child in self.children.values():
            if child.status() is not None and not child.expected_to_end:
                raise GraphError(f"{child.name} ended with {child.status()}; the end of {child.log}:\n{child.tail()}")

    def ask(self, prompt: str | list[int], max_tokens: int = 16, **named) -> Answer:
        """A greedy completion. Raises RequestFailed."""
        named = {"timeout_s": TIMEOUT_S * self.options.slowness} | named
        return ask(self.port, self.model.name, prompt, max_tokens, **named)

    def metrics(self, name: str) -> str:
        """What a worker, or "frontend", tells Prometheus. Raises GraphError."""
        port = self.port if name == "frontend" else self.workers[name].system_port
        try:
            return get(port, "/metrics", METRICS_TIMEOUT_S * self.options.slowness)
        except OSError as error:
            raise GraphError(f"{name} does not tell its metrics on port {port}: {error}") from error

    def end_processes(self) -> None:
        """Ends all processes, and leaves the pool to be looked at before `end`."""
        processes.end_all(list(self.children.values()), PATIENCE_S)

    def end(self) -> None:
        """Ends all processes and removes what they leave. Raises GraphError where something would not go."""
        if self.watcher is None:
            return
        if self.keep_alive:
            self.keep_alive.stop()
        try:
            self.end_processes()
        finally:
            self.place.end()
            left = sweep(self.record)
            self.watcher.stdin.close()
            self.watcher.wait(30)
            self.watcher = None
        if left:
            raise GraphError(f"processes {left} do not end")
