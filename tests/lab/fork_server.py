# SPDX-License-Identifier: Apache-2.0
"""A process in a host that has imported what peers need, and makes each peer by a fork.

In an emulated processor a start of Python with those imports takes more than a second, a fork some hundredths of one. What is forked is a
process of its own in every other way: it opens the pool and joins by itself, and nothing of a pool was open before.

`lab-agent fork SOCKET PROGRAM ARGUMENT...` asks for one: PROGRAM is a module whose `main` is called. The peer has the asking process's
streams, environment and process group, so that whatever is done to that process is done to the peer too.
"""

import gc
import importlib
import os
import signal
import socket
import struct
import sys
import traceback

import drill_peer  # noqa: F401 - imported here, once, for all peers
import peer  # noqa: F401


def parse(asked: bytes):
    """(process, environment, words): what came, parts that end with a NUL: process, number of variables, NAME=value..., words."""
    process, count, *parts = asked.decode().split("\0")[:-1]
    pairs, words = parts[: int(count)], parts[int(count) :]
    return int(process), dict(pair.split("=", 1) for pair in pairs), words


def received(connection) -> bytes:
    """All that comes until the other side has said everything."""
    with connection.makefile("rb") as stream:
        return stream.read()


def status_of(asked: bytes) -> int | None:
    """Forks a peer and waits for its end: exit status, or minus a signal. None in the peer."""
    process, variables, words = parse(asked)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setpgid(0, process)
    for number, way in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        stream = os.open(f"/proc/{process}/fd/{number}", way)
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = words
    return None


def attend(connection) -> bool:
    """Has one peer made and tells how it ended; whether this is the peer now."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = status_of(received(connection))
    if status is None:
        return True
    try:
        connection.sendall(struct.pack("<i", status))
    except BrokenPipeError:
        # Who asked was killed together with the peer.
        pass
    return False


def serve(path) -> bool:
    """Makes peers until it is killed; returns in each process that it makes, whether that is to be a peer."""
    # No call waits for the process that attends to a peer.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return attend(connection)


def main():
    """As the program `fork_server.py SOCKET`."""
    try:
        peer_now = serve(sys.argv[1])
    except Exception:
        # Of an attendant or of the server itself: a peer has its program's own errors.
        traceback.print_exc()
        sys.exit(1)
    if peer_now:
        importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
