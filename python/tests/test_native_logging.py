# SPDX-License-Identifier: Apache-2.0
"""Errors of the pool's background threads are in Python's logging, counted, and the last one is kept."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from pools import HERE, ROOT, opened, until


def test_rounds_that_fail_are_logged_and_kept(spec, caplog):
    """The first line of the superblock changes under an open pool, as when another program formats it."""
    pool = opened(spec)
    cache = pool.cache(upkeep_ms=10)
    assert pool.last_error is None
    with Path(spec.partition(",")[0]).open("r+b") as file:
        first = file.read(64)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]) + first[1:])
    until(lambda: pool.last_error, "no error is kept")
    until(lambda: any(record.name == "kvbm_cxl" for record in caplog.records), "nothing is logged")
    told = [record for record in caplog.records if record.name == "kvbm_cxl"]
    assert told[0].levelno == logging.WARNING and told[0].getMessage().startswith("the ")
    assert told[0].thread != threading.get_ident()
    repeated = [record.getMessage() for record in told]
    assert len(set(repeated)) == len(repeated), "one that repeats is logged once a minute"
    with Path(spec.partition(",")[0]).open("r+b") as file:
        file.write(first)
    del cache


# Its thread is in a filter, which holds no lock that logging would wait for at the end, while the interpreter ends.
ENDS = """
import logging, sys, threading, time
from pathlib import Path
from pools import opened

entered = threading.Event()

def slow(record):
    entered.set()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    return True

logging.getLogger("kvbm_cxl").addFilter(slow)
pool = opened(sys.argv[1])
cache = pool.cache(upkeep_ms=10)
with Path(sys.argv[1]).open("r+b") as file:
    file.write(bytes(64))
assert entered.wait(180)
"""


def test_the_interpreter_ends_while_an_error_is_handed_over(spec):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(HERE)])}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, spec.partition(",")[0]], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
