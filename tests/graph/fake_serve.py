# SPDX-License-Identifier: Apache-2.0
"""serve.py over fake children: everything of the launcher is real."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "deploy" / "dynamo"))

import serve  # noqa: E402
from graph import workers  # noqa: E402

CHILD = [sys.executable, str(HERE / "fake_child.py")]


class FakeReference:
    """Says what the fake frontend says, or what FAKE_TEXT says."""

    def __init__(self, *_):
        pass

    def begin(self, prompts, _):
        self.count = len(prompts)

    def texts(self):
        return [os.environ.get("FAKE_TEXT", "fake")] * self.count


workers.frontend_command = lambda _, port: [*CHILD, "frontend", str(port)]
workers.worker_command = lambda _, __, worker, *___: [*CHILD, "worker", str(worker.system_port)]
serve.Reference = FakeReference

if __name__ == "__main__":
    sys.exit(serve.main(sys.argv[1:]))
