# SPDX-License-Identifier: Apache-2.0
"""How much Python runs for one block that a worker saves, and for one that it pulls: calls, and files that a reader has to open."""

import sys
import threading
from collections import Counter
from pathlib import Path

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration.metadata import Blocks
from test_worker_side import KEYS, bench, path  # noqa: F401

PACKAGE = str(Path(kvbm_cxl.__file__).parent)
GENERATED = "<string>"  # Methods that dataclasses make.
MAX_CALLS, MAX_FILES = 40, 8


class Calls:
    """Python calls of the package, on all threads that are started from now on."""

    def __init__(self) -> None:
        self.is_on, self.counts, self._lock = False, Counter(), threading.Lock()
        threading.setprofile(self._note)

    def _note(self, frame, event, _arg) -> None:
        file = frame.f_code.co_filename
        if self.is_on and event == "call" and file.startswith((PACKAGE, GENERATED)):
            with self._lock:
                self.counts[file.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    def __enter__(self) -> None:
        self.is_on = True
        sys.setprofile(self._note)

    def __exit__(self, *_exception) -> None:
        sys.setprofile(None)
        self.is_on = False

    def check(self) -> None:
        calls, files = self.counts.total(), {file for file, _ in self.counts} - {GENERATED}
        text = "\n".join(f"{count:3} {file} {name}" for (file, name), count in sorted(self.counts.items()))
        assert 10 < calls <= MAX_CALLS and 3 < len(files) <= MAX_FILES, f"{calls} calls over {len(files)} files:\n{text}"


@pytest.fixture
def calls():
    yield Calls()
    sys.setprofile(None)
    threading.setprofile(None)


def test_a_block_is_saved_by_few_calls(calls, bench):  # noqa: F811
    """From the first hook of the step until the block is in the pool, counted, and vLLM may give it away."""
    here = bench()
    here.run(saves=[Blocks("first", KEYS[1:2], [1])], complete={"first"})  # Threads have started.
    here.counts()
    step = here.orders(saves=[Blocks("a", KEYS[:1], [0])], complete={"a"})
    with calls:
        here.side.before_overwrite(step)
        here.side.start_loads(step)
        here.side.save(step)
    assert here.counts()["published_blocks/stored"] == 1
    calls.check()


def test_a_block_is_pulled_by_few_calls(calls, bench):  # noqa: F811
    """From the first hook of the step until vLLM is told that the request's load is over."""
    here = bench()
    here.run(saves=[Blocks("a", KEYS[:1], [0])], complete={"a"})
    step = here.orders(loads=[Blocks("b", KEYS[:1], [1])], idle=True)
    with calls:
        here.side.before_overwrite(step)
        here.side.start_loads(step)
        here.side.save(step)
        _, loaded = here.side.take_finished(set())
    assert loaded == {"b"} and not here.side.loader.take_failed_blocks()
    calls.check()
