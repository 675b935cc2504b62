# SPDX-License-Identifier: Apache-2.0
"""The lab's Ethernet: frames of each virtual host are given to all others, in this process; no port and no interface of the machine."""

import select
import socket
import threading

LARGEST_FRAME_BYTES = 128 * 1024


def address_of(number: int) -> str:
    """The IP address of the host of this number."""
    return f"10.77.0.{number}"


class Hub:
    """Sockets come in pairs: one end for the virtual machine, one that is kept."""

    def __init__(self):
        self._kept: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._open = True
        self._thread = threading.Thread(target=self._forward, name="Ethernet", daemon=True)
        self._thread.start()

    def plug(self, name: str) -> socket.socket:
        """The end for a host, in the place of the one that it had before. The caller closes it."""
        kept, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        kept.setblocking(False)
        with self._lock:
            old = self._kept.get(name)
            self._kept[name] = kept
        self._wake.send(b"p")
        if old:
            old.close()
        return given

    def _forward(self) -> None:
        while self._open:
            with self._lock:
                sockets = list(self._kept.values())
            try:
                readable, _, _ = select.select([*sockets, self._woken], [], [])
            except (OSError, ValueError):  # One was closed meanwhile: the list is made anew.
                continue
            for source in readable:
                if source is self._woken:
                    source.recv(64)
                    continue
                try:
                    frame = source.recv(LARGEST_FRAME_BYTES)
                except OSError:
                    continue
                # Not the list above: a host may have been plugged since it was made.
                with self._lock:
                    plugged = list(self._kept.values())
                for other in plugged:
                    if other is not source:
                        self._give(other, frame)

    @staticmethod
    def _give(to: socket.socket, frame: bytes) -> None:
        """A frame that does not fit is lost, as on a wire."""
        try:
            to.send(frame)
        except OSError:
            pass

    def close(self) -> None:
        """Unplugs all."""
        self._open = False
        self._wake.send(b"e")
        self._thread.join(5)
        for one in (*self._kept.values(), self._wake, self._woken):
            one.close()
