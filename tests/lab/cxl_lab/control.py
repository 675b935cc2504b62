# SPDX-License-Identifier: Apache-2.0
"""How `scripts/lab` reaches a lab that another process keeps: lines of JSON over a socket in a folder of the user's own."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

from . import ROOT, LabError
from .agent import HostGone
from .lab import Lab

SOCKET = ROOT / "target" / "lab" / "control"
# What is done to a host by its name alone.
ACTIONS = ("pause", "resume", "kill", "unplug", "link_error")


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    # A path of a socket has 107 bytes: through the folder's descriptor it is short wherever the checkout lies.
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(f"/proc/self/fd/{folder}/{path.name}") == 0:
                raise LabError("a lab is up already in this checkout: `scripts/lab down` ends it")
        path.unlink(missing_ok=True)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o600)
    server.listen()
    return server


def _ignoring_who_is_gone(act, *arguments, **named) -> None:
    try:
        act(*arguments, **named)
    except OSError:
        pass


class Control:
    """Serves a lab to other processes until one of them asks for its end."""

    def __init__(self, path: Path = SOCKET):
        """Raises LabError where a lab is served there already."""
        self.path, self._server, self._ended = path, _listen(path), threading.Event()

    def serve(self, lab: Lab) -> None:
        """Returns when it shall end."""
        threading.Thread(target=self._accept, args=(lab,), daemon=True).start()
        self._ended.wait()

    def _accept(self, lab: Lab) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(lab, client), daemon=True).start()

    def _answer(self, lab: Lab, client: socket.socket) -> None:
        def say(**answer) -> None:
            client.sendall(json.dumps(answer).encode() + b"\n")

        with client, client.makefile("r", encoding="utf-8") as lines:
            try:
                if line := lines.readline():
                    self._obey(lab, json.loads(line), client, say)
            except (LabError, ValueError, KeyError) as error:
                _ignoring_who_is_gone(say, failed=str(error))
            except OSError:
                pass  # The client is gone.
            finally:
                # A thread that still reads would keep the connection open.
                _ignoring_who_is_gone(client.shutdown, socket.SHUT_RDWR)

    def _obey(self, lab: Lab, request: dict, client: socket.socket, say) -> None:
        what, name = request["what"], request.get("host")
        if what == "down":
            say(done="ending")
            self._ended.set()
        elif what == "status":
            say(done="\n".join(f"{host.name}  {'up' if host.alive() else 'down'}  {' '.join(host.devices)}" for host in lab.hosts))
        elif what == "boot":
            lab[name].kill()
            lab.boot(name)
            say(done=f"{name} is up")
        elif what == "log":
            say(done=lab[name].story())
        elif what == "run":
            self._run(lab, request, client, say)
        elif what in ACTIONS and hasattr(lab[name], what):
            getattr(lab[name], what)()
            say(done=f"{name}: {what}")
        else:
            raise LabError(f"{lab[name]} cannot {what}")

    @staticmethod
    def _run(lab: Lab, request: dict, client: socket.socket, say) -> None:
        process = lab[request["host"]].start(request["words"], request["environment"])

        def watch() -> None:
            """The client sends nothing more: when its end closes, it was interrupted."""
            if not client.recv(1):
                try:
                    process.signal(signal.SIGTERM)
                except HostGone:
                    pass

        threading.Thread(target=watch, daemon=True).start()
        for error, piece in process.follow():
            say(error=error, text=piece.decode(errors="replace"))
        say(status=process.wait(1))

    def close(self) -> None:
        """Serves no client any more."""
        self._server.close()
        self.path.unlink(missing_ok=True)


def ask(what: str, path: Path = SOCKET, **request):
    """Asks the lab that is up; its answers. Raises LabError where there is none, or it refuses."""
    try:
        folder = os.open(path.parent, os.O_PATH)
    except OSError as error:
        raise LabError("no lab is up in this checkout: `scripts/lab up` starts one") from error
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError as error:
        client.close()
        raise LabError("no lab is up in this checkout: `scripts/lab up` starts one") from error
    finally:
        os.close(folder)
    with client, client.makefile("r", encoding="utf-8") as lines:
        client.sendall(json.dumps({"what": what, **request}).encode() + b"\n")
        for line in lines:
            answer = json.loads(line)
            if "failed" in answer:
                raise LabError(answer["failed"])
            yield answer
