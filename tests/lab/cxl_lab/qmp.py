# SPDX-License-Identifier: Apache-2.0
"""QEMU's machine protocol: what is done to a virtual machine from outside."""

import json
import socket
import threading

from . import LabError


class Qmp:
    """One monitor. Events are kept by name."""

    def __init__(self, channel: socket.socket, timeout_s: float = 60):
        # For reading alone: a text file that is written to, too, forgets what it has read ahead, and with it events.
        self._lines = channel.makefile("r", encoding="utf-8")
        channel.settimeout(timeout_s)
        self._channel = channel
        self._lock = threading.Lock()
        self.events: list[str] = []
        self._answer()
        self.execute("qmp_capabilities")

    def _answer(self) -> dict:
        while True:
            try:
                line = self._lines.readline()
            except OSError as error:
                raise LabError(f"the monitor does not answer: {error}") from error
            if not line:
                raise LabError("the monitor is gone")
            message = json.loads(line)
            if "event" not in message:
                return message
            self.events.append(message["event"])

    def execute(self, command: str, **arguments):
        """What QEMU answers; raises LabError with its reason where it refuses."""
        with self._lock:
            try:
                self._channel.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            except OSError as error:
                raise LabError(f"{command}: the monitor is gone: {error}") from error
            answer = self._answer()
        if "error" in answer:
            raise LabError(f"{command}: {answer['error'].get('desc', answer['error'])}")
        return answer["return"]

    def close(self) -> None:
        """Lets go of the monitor."""
        self._lines.close()
        self._channel.close()
