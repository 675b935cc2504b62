# SPDX-License-Identifier: Apache-2.0
"""Ports of a host's servers, offered at 127.0.0.1 of this machine under the same numbers."""

import socket
import threading

from . import LabError
from .agent import Process
from .host import Host, agent_program


class Forward:
    """Every connection to 127.0.0.1:`port` becomes one to the same port of the host's own 127.0.0.1."""

    def __init__(self, host: Host, port: int):
        self.host, self.port = host, port
        self._server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, name=f"port {port} of {host.name}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                relay = self.host.start([agent_program(), "connect", f"127.0.0.1:{self.port}"])
                threading.Thread(target=self._upwards, args=(client, relay), daemon=True).start()
                for error, piece in relay.follow():
                    if not error:
                        client.sendall(piece)
            except (LabError, OSError):
                pass  # The host or the client is gone: the other end sees the connection close.
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    @staticmethod
    def _upwards(client: socket.socket, relay: Process) -> None:
        try:
            while data := client.recv(64 * 1024):
                relay.write(data)
            relay.end_input()
        except (LabError, OSError):
            pass

    def close(self) -> None:
        """Takes no more connections."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # To close it alone would leave the thread waiting.
        except OSError:
            pass
        self._server.close()
