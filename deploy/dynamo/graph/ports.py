# SPDX-License-Identifier: Apache-2.0
"""Free ports of 127.0.0.1."""

import os
import random
import socket

from .errors import GraphError

# Below the range that Linux takes ports for outgoing connections from, so that none of these takes one that was found free here.
FIRST, LAST = 20000, 32000


class Ports:
    """Gives each port once, so that processes that start at the same time never get the same one."""

    def __init__(self):
        self.next = random.Random(os.getpid() ^ int.from_bytes(os.urandom(4), "big")).randrange(FIRST, LAST)

    def take(self, count: int = 1) -> int:
        """The first of `count` ports in a row that no process listens on. Raises GraphError."""
        for _ in range(LAST - FIRST):
            if self.next + count > LAST:
                self.next = FIRST
            first, self.next = self.next, self.next + count
            if all(_is_free(port) for port in range(first, first + count)):
                return first
        raise GraphError(f"no {count} free ports between {FIRST} and {LAST} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
