# SPDX-License-Identifier: Apache-2.0
"""The test's side of its worker processes: every call has a deadline, every process is ended by its id."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import wheels

CALL_TIMEOUT_S = 60
# Silence after which a host is taken for dead. The default is a second, for which a processor that others use as well may be away.
SUSPECT_MS = 2500


class WorkerError(Exception):
    """A call failed in the worker; `kind` is the name of the exception there."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Unresponsive(Exception):
    """A worker did not answer in time, or is gone."""


class Host:
    """One worker process, on a machine of its own as far as pools are concerned."""

    numbers = itertools.count(1)

    def __init__(self, folder, wheel, environment=None, machine=None, program=wheels.HERE / "worker.py"):
        self.number = next(self.numbers)
        self.log = folder / f"worker-{self.number}.log"
        machine = machine or f"machine-{self.number}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXL_", "NIXL_", "PYTHON", "UCX_"))}
        extra = {
            "PYTHONPATH": os.pathsep.join(wheels.python_path(wheel)),
            "CXL_MACHINE_ID": machine,
            "CXL_STATE_DIR": str(folder / f"state-{machine}"),
            "CXL_SUSPECT_MS": str(SUSPECT_MS),
            "NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "WARN"),
        }
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            command = [sys.executable, str(program), str(theirs.fileno())]
            self.process = subprocess.Popen(
                command, env={**kept, **extra, **(environment or {})}, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        self.connection = Connection(ours.detach())
        self.pid = self.process.pid

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments, **named: self.call(method, *arguments, **named)

    def begin(self, method, *arguments, **named):
        """Asks for something without waiting for the answer: `end` does."""
        try:
            self.connection.send((method, arguments, named))
        except OSError as error:
            raise Unresponsive(self.story(f"{method}: {error}")) from error

    def end(self, timeout_s=CALL_TIMEOUT_S):
        """The answer to the last `begin`."""
        try:
            if not self.connection.poll(timeout_s):
                self.process.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
                raise Unresponsive(self.story(f"no answer within {timeout_s} s"))
            well, *answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise Unresponsive(self.story(f"gone: {error!r}, exit {self.process.wait(10)}")) from error
        if not well:
            kind, text = answer
            raise WorkerError(kind, self.story(text))
        return answer[0]

    def call(self, method, *arguments, call_timeout_s=CALL_TIMEOUT_S, **named):
        """Lets the worker do something, and returns what it returns."""
        self.begin(method, *arguments, **named)
        return self.end(call_timeout_s)

    def story(self, text):
        """What happened, with the end of what the worker printed."""
        printed = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
        return f"worker {self.number} (pid {self.pid}): {text}\n{printed}"

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Ends it at once, as a crash does."""
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout_s=20):
        """Ends it as an application ends; its exit status."""
        self.begin("quit")
        self.end(timeout_s)
        self.connection.close()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            raise Unresponsive(self.story(f"did not end within {timeout_s} s")) from error

    def discard(self):
        """Ends it whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self.connection.close()
