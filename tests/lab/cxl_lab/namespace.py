# SPDX-License-Identifier: Apache-2.0
"""Hosts without virtual machines: namespaces of this machine that share one file and nothing else.

Each has its own processes, file systems to write to, /dev/shm, network and name. They are one machine to the memory: it is coherent, and
atomics work. So they are the fast stand-in for what does not depend on that. No root is needed where users may make namespaces.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from . import LabError
from .agent import Agent
from .host import Host, agent_program, environment, spawn

POOL = "/dev/shm/pool"
# In a user namespace of the lab's own: the file lies in a file system that goes with the last process that has it.
ANCHOR = f"""set -e
mount -t tmpfs -o size={{len_bytes}} pool /dev/shm
truncate -s {{len_bytes}} {POOL}
ip link set lo up 2>/dev/null || true
[ {{ethernet}} = 0 ] || {{{{ ip link add bridge type bridge && ip link set bridge up; }}}}
echo ready
exec sleep infinity
"""
HOST = f"""set -e
mount -t tmpfs run /run
mkdir /run/tmp
: >/run/pool
mount --bind {POOL} /run/pool
mount -t tmpfs shm /dev/shm
: >{POOL}
mount --move /run/pool {POOL}
rm /run/pool
hostname "$1"
ip link set lo up 2>/dev/null || true
exec "$2" "fd:$3"
"""
UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc")


def children(pid: int) -> list[int]:
    """The processes that it started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(number) for number in task.read_text().split()]
        except OSError:
            continue
        for number in direct:
            found += [number, *children(number)]
    return found


class Anchor:
    """The process that holds what the hosts of a lab share."""

    def __init__(self, len_bytes: int, ethernet: bool):
        script = ANCHOR.format(len_bytes=len_bytes, ethernet=int(ethernet))
        command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script]
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if (said := self.process.stdout.readline()) != "ready\n":
            self.close()
            raise LabError(f"namespaces cannot be made here: {said.strip() or 'no reason given'}")

    def enter(self, *words: str) -> list[str]:
        """A command among what they share."""
        target = ["--target", str(self.process.pid), "--user", "--mount", "--net", "--preserve-credentials"]
        return ["nsenter", *target, "--", *words]

    def link(self, host_pid: int, number: int) -> None:
        """A cable from the bridge to a host's eth0."""
        cable = f"cable{number}"
        make = f"ip link add {cable} type veth peer name eth0 netns {host_pid}"
        script = f"ip link del {cable} 2>/dev/null; {make} && ip link set {cable} master bridge up"
        done = subprocess.run(self.enter("sh", "-c", script), capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            raise LabError(f"no Ethernet between namespaces: {done.stderr.strip()}")

    def close(self) -> None:
        """Lets go of it."""
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()


class NamespaceHost(Host):
    """One host of namespaces."""

    def __init__(self, name: str, number: int, anchor: Anchor, folder: Path, root: Path, ethernet: bool):
        super().__init__(name, number, folder)
        self.anchor, self.root, self.ethernet = anchor, root, ethernet

    @property
    def log(self) -> Path:
        """What went wrong while it came up."""
        return self.folder / f"{self.name}.log"

    def begin(self) -> None:
        """Makes the namespaces."""
        self._down()
        ours, theirs = socket.socketpair()
        script = ["sh", "-c", HOST, "host", self.name, str(agent_program()), str(theirs.fileno())]
        with theirs, self.log.open("ab") as output:
            self.machine = spawn(self.anchor.enter(*UNSHARE, *script), (theirs.fileno(),), output)
        self._agent = Agent(self.name, ours, environment(self.name), str(self.root))

    def ready(self, timeout_s: float) -> None:
        """Waits for the agent, and plugs the cable in."""
        if not self.agent.ready(timeout_s):
            raise LabError(f"{self}: not up\n{self.story()}")
        if self.ethernet:
            self.anchor.link(self._inside()[0], self.number)
            self.run(["sh", "-c", f"ip address add {self.address}/24 dev eth0 && ip link set eth0 up"])
        self.devices = [POOL]

    def story(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def _inside(self) -> list[int]:
        return children(self.machine.pid)

    def _signal(self, number: int) -> set[int]:
        reached = set()
        for pid in self._inside():
            try:
                os.kill(pid, number)
                reached.add(pid)
            except ProcessLookupError:
                continue
        return reached

    def pause(self) -> None:
        """All its processes stop, those too that one of them started meanwhile."""
        reached: set[int] = set()
        deadline = time.monotonic() + 10
        while (now := self._signal(signal.SIGSTOP)) - reached:
            reached |= now
            if time.monotonic() > deadline:
                raise LabError(f"{self}: it makes processes faster than they can be stopped")

    def resume(self) -> None:
        """They go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Its first process ends, and with it all others."""
        if self.alive():
            for pid in self._inside()[:1]:
                os.kill(pid, signal.SIGKILL)
        super().kill()
