# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own; as a program, that process."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "peers"))

import lines  # noqa: E402
from peer_process import PeerProcess  # noqa: E402


class EngineProcess(PeerProcess):
    """The same arguments as `engines.engine`; calls are methods of `engines.Engine`."""

    START_S, ANSWER_S = 900, 600

    def __init__(self, *arguments: Any, env: dict[str, str] | None = None, wait: bool = True, **options: Any) -> None:
        """`env`: more for its environment."""
        own = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        words = [HERE / "engine_process.py", json.dumps([arguments, options])]
        super().__init__(words, {**os.environ, **(env or {}), **own}, wait=wait)


def main() -> None:
    import conftest  # What it sets in the environment comes before vLLM.
    from engines import engine
    from kvbm_cxl.vllm_integration import movers, saver

    saver.LEAST_PATIENCE = conftest.PATIENT
    # Longer than any test: copies that a test holds do not end by themselves.
    movers.COPY_TIMEOUT_MS = 3_600_000
    arguments, options = json.loads(sys.argv[1])
    with contextlib.ExitStack() as running:
        lines.serve(lambda: running.enter_context(engine(*arguments, **options)))


if __name__ == "__main__":
    main()
