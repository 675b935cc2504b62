# SPDX-License-Identifier: Apache-2.0
"""watcher.py RECORD, with the launcher's pipe as standard input: sweeps when the launcher is gone, however it went."""

import signal
import sys
from pathlib import Path


def main() -> int:
    """Blocks until the pipe's other end is closed. What the launcher swept by itself is not there any more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    from graph.sweep import Record, sweep

    record = Record.read(Path(sys.argv[1]))
    return 1 if record is not None and sweep(record) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
