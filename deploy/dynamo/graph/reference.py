# SPDX-License-Identifier: Apache-2.0
"""What the model says where nothing is disaggregated, connected or cached: one vLLM engine in a process of its own.

    reference.py MODEL MAX_TOKENS ENGINE < prompts.json > texts.json        ENGINE: arguments of LLM(), in JSON

The texts of one model never change, so they are kept next to it for the next time.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Model

TIMEOUT_S = 600


class Reference:
    """Runs during the start of the graph: `begin`, then `texts`."""

    def __init__(self, model: "Model", environment: dict[str, str], cache: Path, record=None, log: Path | None = None):
        self.model, self.environment, self.cache, self.record, self.log = model, environment, cache, record, log
        self.process, self.prompts, self.max_tokens = None, [], 0

    def _file(self) -> Path:
        asked = json.dumps([self.model.path, self.model.engine, self.max_tokens, self.prompts, self.environment.get("OMP_NUM_THREADS")])
        return self.cache / f"{hashlib.sha256(asked.encode()).hexdigest()[:20]}.json"

    def begin(self, prompts: Sequence[str | list[int]], max_tokens: int) -> None:
        """Starts the engine, unless it has said all this before."""
        self.prompts, self.max_tokens = list(prompts), max_tokens
        if self._file().exists():
            return
        told = self.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, str(Path(__file__)), self.model.path, str(max_tokens), json.dumps(self.model.engine)]
        with open(self.log or os.devnull, "wb") as log:
            self.process = subprocess.Popen(
                command, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        if self.record:
            self.record.add_session(self.process.pid)

    def texts(self, timeout_s: float = TIMEOUT_S) -> list[str]:
        """One text for each prompt. Raises RuntimeError."""
        if self.process:
            try:
                said, _ = self.process.communicate(json.dumps(self.prompts), timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                self.process.kill()
                raise RuntimeError(f"the reference run did not end within {timeout_s:.0f} s; its log is {self.log}") from error
            if self.process.returncode:
                raise RuntimeError(f"the reference run ended with {self.process.returncode}; its log is {self.log}")
            self.process = None
            self.cache.mkdir(parents=True, exist_ok=True)
            draft = self._file().with_suffix(f".{os.getpid()}")
            draft.write_text(said)
            draft.replace(self._file())
        return json.loads(self._file().read_text())


def main(model: str, max_tokens: int, engine: dict) -> None:
    """Reads prompts, writes texts."""
    # What vLLM prints goes to the log, not among the texts.
    texts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, enable_prefix_caching=False, **engine)
    prompts = [asked if isinstance(asked, str) else {"prompt_token_ids": asked} for asked in json.load(sys.stdin)]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    json.dump([answer.outputs[0].text for answer in answers], texts)
    texts.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
