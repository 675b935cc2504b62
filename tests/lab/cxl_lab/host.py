# SPDX-License-Identifier: Apache-2.0
"""What every host of a lab can do, whatever it is made of."""

import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import ROOT, LabError
from .agent import Agent, Completed, Process
from .ethernet import address_of

AGENT = ROOT / "target" / "release" / "lab-agent"
# What commands in a host see of this process's environment.
PASSED = ("PATH", "LANG", "LC_ALL", "PYTHONDONTWRITEBYTECODE")


def agent_program() -> Path:
    """The agent; raises LabError where it is not built."""
    if not AGENT.is_file():
        raise LabError(f"no {AGENT}: `make build-lab` builds it")
    return AGENT


def environment(name: str) -> dict[str, str]:
    """For commands in the host of this name: a machine of its own, with its own place for its processes to meet."""
    passed = {variable: os.environ[variable] for variable in PASSED if variable in os.environ}
    return passed | {"HOME": "/run/tmp", "TMPDIR": "/run/tmp", "CXL_MACHINE_ID": f"lab-{name}", "CXL_STATE_DIR": "/run/cxl-state"}


# The kernel ends a host when the thread that started it ends: this one stays as long as the process.
_starter = ThreadPoolExecutor(1, "starter of hosts")


def spawn(command: list[str], descriptors: tuple[int, ...], output) -> subprocess.Popen:
    """Starts a host's process, which ends when this one does, whatever ends it."""
    guard = shutil.which("setpriv")
    if guard is None:
        raise LabError("no setpriv (util-linux): hosts could outlive the lab")
    # A group of its own: Ctrl-C is for the lab, which then ends its hosts.
    return _starter.submit(
        subprocess.Popen,
        [guard, "--pdeathsig", "KILL", "--", *command],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
    ).result()


class Host:
    """One host. `devices`: where its programs find the shared memory."""

    def __init__(self, name: str, number: int, folder: Path):
        """`number`: from 1 on, no two hosts of a lab have the same."""
        self.name, self.number, self.folder = name, number, folder
        self.devices: list[str] = []
        self.machine: subprocess.Popen | None = None
        self._agent: Agent | None = None

    def __str__(self):
        return f"host {self.name}"

    @property
    def address(self) -> str:
        """Its IP address on the lab's Ethernet."""
        return address_of(self.number)

    @property
    def agent(self) -> Agent:
        """What runs commands in it. Raises LabError where it is not up."""
        if self._agent is None:
            raise LabError(f"{self} is not up")
        return self._agent

    def start(self, words: list, environment: dict[str, str] | None = None, folder: str | None = None) -> Process:
        """Starts a command: program and arguments, as they are on this machine. `environment` is added to the host's own."""
        return self.agent.start(words, environment, folder)

    def run(self, words: list, environment: dict[str, str] | None = None, timeout_s: float = 60, check: bool = True) -> Completed:
        """Runs a command to its end. With `check`, raises Failed for a status other than 0."""
        process = self.start(words, environment)
        try:
            return process.finish(timeout_s, check)
        except LabError:
            if process.status is None and not self.agent.gone:
                process.signal(signal.SIGKILL)
            raise

    def alive(self) -> bool:
        """Whether its process runs."""
        return self.machine is not None and self.machine.poll() is None

    def story(self) -> str:
        """What it wrote on its console."""
        raise NotImplementedError

    def begin(self) -> None:
        """Starts to boot."""
        raise NotImplementedError

    def ready(self, timeout_s: float) -> None:
        """Waits until commands can run in it; raises LabError where it does not come up."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stops it between two instructions, as long as one likes."""
        raise NotImplementedError

    def resume(self) -> None:
        """Lets it go on as if nothing had happened."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends it at once, as a power failure does."""
        if self.machine is not None:
            self.machine.kill()
            self.machine.wait(30)
        self._down()

    def _down(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
