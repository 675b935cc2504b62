# SPDX-License-Identifier: Apache-2.0
"""An engine of several data-parallel ranks, as `vllm serve --data-parallel-size` makes it: each rank has a scheduler, a KV cache and
processes of its own, and the test says which rank answers."""

import asyncio
import itertools
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import engines
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

START_S = 900
_wait = multiprocessing.connection.wait


def _wait_longer(processes, timeout=None):
    """vLLM gives a process that coordinates ranks 120 s to start, in which it imports vLLM. A loaded machine may take longer."""
    return _wait(processes, timeout if timeout is None else max(timeout, START_S))


multiprocessing.connection.wait = _wait_longer


class Ranks:
    """Ranks that run. Made by `ranks`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, llm: AsyncLLM) -> None:
        self._loop, self._llm, self._before = loop, llm, {}
        self._numbers = itertools.count()

    def texts(self, prompts: list[tuple[int, dict, int]]) -> list[list[int]]:
        """Tokens of greedy answers to (rank, prompt, tokens of the answer), all at once."""

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*(self._text(*each) for each in prompts))

        return self._run(all_of_them())

    async def _text(self, rank: int, prompt: dict, tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        text = []
        async for output in self._llm.generate(prompt, params, f"request-{next(self._numbers)}", data_parallel_rank=rank):
            text = list(output.outputs[0].token_ids)
        return text

    def wait_published(self, rank: int, blocks: int) -> None:
        """Waits until a rank has put so many blocks into the pool since the last call. What it counts leaves with its steps."""
        counted, deadline = 0, time.monotonic() + START_S
        while (counted := counted + self.counted("kvbm_cxl_published_blocks", rank, outcome="stored")) < blocks:
            assert time.monotonic() < deadline, f"rank {rank} has published {counted} blocks of {blocks}"
            self.texts([(rank, engines.prompt(2, next(self._numbers)), 1)])

    def forget(self) -> None:
        """Every rank lets go of what it has cached itself."""
        assert self._run(self._llm.reset_prefix_cache())

    def counted(self, name: str, rank: int, **labels: str) -> float:
        """What a rank has counted in `vllm:NAME` since the last call for it."""
        found = [
            metric.value
            for metric in get_metrics_snapshot()
            if metric.name == f"vllm:{name}" and metric.labels["engine"] == str(rank) and labels.items() <= metric.labels.items()
        ]
        key = (name, rank, *labels.items())
        since, self._before[key] = sum(found) - self._before.get(key, 0), sum(found)
        return since

    def _run(self, awaited):
        return self._loop.run_until_complete(asyncio.wait_for(awaited, START_S))


@contextmanager
def ranks(model: str, role: str | None, pool: str = "", count: int = 2, blocks: int = 64, **options) -> Iterator[Ranks]:
    """The options are those of `engines.engine`."""
    told = engines.arguments(role, pool, "recompute", blocks, options, spread=True)
    before, path = set(engines.left_by_ranks()), os.environ.get("PYTHONPATH")
    # vLLM's processes find what the test finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    loop = asyncio.new_event_loop()
    llm = None

    async def make() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, data_parallel_size=count, **told))

    try:
        llm = loop.run_until_complete(make())
        yield Ranks(loop, llm)
    finally:
        if llm is not None:
            llm.shutdown(timeout=60)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": path} if path is not None else {})
        for left in set(engines.left_by_ranks()) - before:
            left.unlink(missing_ok=True)
