# SPDX-License-Identifier: Apache-2.0
"""The lab's end of an agent's channel: commands in a host, as processes that are written to, read, signalled and waited for.

The agent (`tests/lab/agent`) runs in the host; `frame.rs` there describes the frames.
"""

import itertools
import os
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass

from . import LabError

START, INPUT, INPUT_END, SIGNAL, PING, OUTPUT, ERROR, EXIT, REFUSED, PONG = range(1, 11)
HEADER = struct.Struct("<III")
PIECE_BYTES = 256 * 1024


class HostGone(LabError):
    """The host ended, or its agent did, with something under way."""


class Failed(LabError):
    """A command ended with another status than 0."""


@dataclass(frozen=True)
class Completed:
    """A command that ended: exit status (minus the signal that ended it), and what it printed."""

    status: int
    output: str
    error: str


class Process:
    """A command in a host."""

    def __init__(self, agent: "Agent", number: int, words: list[str]):
        self.agent, self.number, self.words = agent, number, words
        self.status: int | None = None
        self.refused: str | None = None
        self._printed = {OUTPUT: bytearray(), ERROR: bytearray()}
        self._read = 0
        self._changed = threading.Condition()

    def __str__(self):
        return f"{' '.join(self.words)} in {self.agent.name}"

    def _take(self, kind: int, payload: bytes) -> None:
        with self._changed:
            if kind in self._printed:
                self._printed[kind] += payload
            elif kind == EXIT:
                self.status = struct.unpack("<i", payload)[0]
            elif kind == REFUSED:
                self.refused = payload.decode(errors="replace")
            self._changed.notify_all()

    def _ended(self) -> bool:
        return self.status is not None or self.refused is not None or self.agent.gone

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._text(OUTPUT)

    @property
    def error(self) -> str:
        """What it has printed on standard error so far."""
        return self._text(ERROR)

    def _text(self, kind: int) -> str:
        with self._changed:
            return self._printed[kind].decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Bytes for its standard input."""
        for at in range(0, len(data), PIECE_BYTES):
            self.agent.send(INPUT, self.number, data[at : at + PIECE_BYTES])

    def end_input(self) -> None:
        """Its standard input ends."""
        self.agent.send(INPUT_END, self.number)

    def signal(self, number: int) -> None:
        """Sends its process group a signal."""
        self.agent.send(SIGNAL, self.number, struct.pack("<i", number))

    def read_line(self, timeout_s: float) -> str:
        """The next line that it prints, without its end. Raises HostGone where the host ended, LabError where no line comes."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (end := self._printed[OUTPUT].find(b"\n", self._read)) < 0:
                if self.status is None and self.refused is None and self.agent.gone:
                    raise HostGone(self.story("its host is gone"))
                if self._ended():
                    raise LabError(self.story(self.refused or "ended without another line"))
                if not self._changed.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    raise LabError(self.story(f"no line within {timeout_s:.0f} s"))
            line = self._printed[OUTPUT][self._read : end].decode(errors="replace")
            self._read = end + 1
            return line

    def follow(self):
        """What it prints, as it comes, until it ends: pieces of (whether it is standard error, bytes)."""
        read = {OUTPUT: 0, ERROR: 0}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended() or any(len(self._printed[kind]) > read[kind] for kind in read))
                pieces = [(kind, bytes(self._printed[kind][read[kind] :])) for kind in read]
                ended = self._ended()
            for kind, piece in pieces:
                read[kind] += len(piece)
                if piece:
                    yield kind == ERROR, piece
            if ended:
                return

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises HostGone where the host ends first, LabError where it could not be started or takes longer."""
        with self._changed:
            done = self._changed.wait_for(self._ended, timeout_s)
        if not done:
            raise LabError(self.story(f"still running after {timeout_s:.0f} s"))
        if self.refused is not None:
            raise LabError(f"{self}: {self.refused}")
        if self.status is None:
            raise HostGone(self.story("its host is gone"))
        return self.status

    def finish(self, timeout_s: float, check: bool = True) -> Completed:
        """Waits for its end. With `check`, raises Failed for a status other than 0."""
        status = self.wait(timeout_s)
        if check and status != 0:
            raise Failed(self.story(f"exit status {status}"))
        return Completed(status, self.output, self.error)

    def story(self, what: str) -> str:
        """What happened, with the end of what it printed."""
        return f"{self}: {what}\n{self.output[-4000:]}{self.error[-4000:]}"


class Agent:
    """One channel to a host's agent."""

    def __init__(self, name: str, channel: socket.socket, environment: dict[str, str], folder: str):
        """`environment` and `folder`: what commands get unless they are told otherwise."""
        self.name, self.environment, self.folder = name, environment, folder
        self.gone = False
        self._channel = channel
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._processes: dict[int, Process] = {}
        self._pongs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._receive, name=f"agent of {name}", daemon=True).start()

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        """One frame. Raises HostGone."""
        try:
            with self._sending:
                self._channel.sendall(HEADER.pack(kind, number, len(payload)) + payload)
        except OSError as error:
            raise HostGone(f"host {self.name} is gone: {error}") from error

    def _receive(self) -> None:
        try:
            while header := self._exactly(HEADER.size):
                kind, number, length = HEADER.unpack(header)
                payload = self._exactly(length)
                if kind == PONG:
                    self._pongs.put(payload)
                elif process := self._processes.get(number):
                    if kind in (EXIT, REFUSED):
                        del self._processes[number]
                    process._take(kind, payload)
        except OSError:
            pass
        self.gone = True
        self._pongs.put(None)
        for process in list(self._processes.values()):
            process._take(0, b"")

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._channel.recv(count - len(data))
            if not part:
                return b""
            data += part
        return bytes(data)

    def ready(self, timeout_s: float) -> bool:
        """Whether the agent answers within this time. What is asked before the agent has its end open is lost, so it is asked again."""
        deadline = time.monotonic() + timeout_s
        while not self.gone and time.monotonic() < deadline:
            try:
                self.send(PING, 0)
                if self._pongs.get(timeout=0.5) is not None:
                    return True
            except (queue.Empty, HostGone):
                continue
        return False

    def start(self, words: list, environment: dict[str, str] | None = None, folder: str | None = None) -> Process:
        """Starts a command; `environment` is added to what all commands get."""
        words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in words]
        pairs = [f"{name}={value}" for name, value in {**self.environment, **(environment or {})}.items()]
        process = Process(self, next(self._numbers), words)
        self._processes[process.number] = process
        self.send(START, process.number, "\0".join([folder or self.folder, str(len(pairs)), *pairs, *words]).encode())
        return process

    def running(self) -> list[Process]:
        """Commands that were started and have not ended."""
        return [process for process in list(self._processes.values()) if not process._ended()]

    def close(self) -> None:
        """Ends the channel, and with it all that runs in the host."""
        try:
            self._channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._channel.close()
