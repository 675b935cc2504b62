# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in the test's own process, one after the other, and what they count."""

import gc
import mmap
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbm_cxl.vllm_integration import CONNECTOR_NAME, register
from kvbm_cxl.vllm_integration.groups import Kind
from kvbm_cxl.vllm_integration.handover import prefill_params
from kvbm_cxl.vllm_integration.keys import block_key, tail_key
from kvbm_cxl.vllm_integration.loader import Loader
from kvbm_cxl.vllm_integration.saver import SaveJob
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.models import registry

# vLLM looks at each class of models in a process of its own, so that no GPU is touched. Here it would import vLLM once more for each.
registry._run_in_subprocess = lambda look: look()
BLOCK_TOKENS = 128
BLOCK_BYTES = 512 << 10
SETTLES_S = 180
# `extra_args` of a request that another engine will decode.
HAND_OVER = {"kv_transfer_params": prefill_params()}


def prompt(length: int, seed: int) -> dict:
    """A prompt of `length` tokens; other seeds share no block with it."""
    choose = random.Random(seed)
    return {"prompt_token_ids": [choose.randrange(10, 2000) for _ in range(length)]}


class Engine:
    """An engine that runs. Made by `engine`."""

    def __init__(self, llm) -> None:
        self.llm = llm
        self._before: dict[str, float] = {}

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_side(self):
        return self.core.scheduler.connector._scheduler

    @property
    def worker_side(self):
        return get_kv_transfer_group()._worker

    def outputs(self, prompts: list[dict], max_tokens: int = 8, **sampling) -> list:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        return self.llm.generate(prompts, params, use_tqdm=False)

    def texts(self, prompts: list[dict], max_tokens: int = 8, **sampling) -> list[list[int]]:
        """Tokens of greedy answers."""
        return [list(output.outputs[0].token_ids) for output in self.outputs(prompts, max_tokens, **sampling)]

    def handed_over(self, prompts: list[dict]) -> list[dict]:
        """What a prefill worker answers, for `extra_args` of the decode worker's request."""
        return [{"kv_transfer_params": output.kv_transfer_params} for output in self.outputs(prompts, max_tokens=1, extra_args=HAND_OVER)]

    def forget(self) -> None:
        """The engine lets go of what it has cached itself."""
        assert self.llm.reset_prefix_cache()

    def keys(self, asked: dict) -> list[bytes]:
        """Keys of a prompt's blocks, the tail's last."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request("keys", asked["prompt_token_ids"], SamplingParams(), None, block_hasher=self.core.request_block_hasher)
        return [*map(block_key, request.block_hashes), tail_key(request, BLOCK_TOKENS)]

    def in_pool(self, asked: dict) -> int:
        """How many of a prompt's full blocks are in the pool."""
        side, keys = self.scheduler_side, self.keys(asked)[:-1]
        return sum(side.access.call(lambda cache: cache.has(side.namespaces[0], keys)))

    def in_second_level(self, asked: dict) -> int:
        """How many of a prompt's leading blocks its second level has, as far as it knows."""
        side = self.scheduler_side
        return side.second.level.leading([bytes(side.namespaces[0])], self.keys(asked)[:-1])

    def keep_cold(self) -> None:
        """Waits until the second level has every block that its demoter looks at: what is evicted next."""
        side, deadline = self.scheduler_side, time.monotonic() + SETTLES_S
        level, ahead = side.second.level, side.second._demoter._ahead

        def missing() -> int:
            cold = side.access.call(lambda cache: cache.coldest(ahead))
            return sum(not level.leading([bytes(block.namespace)], [block.key]) for block in cold)

        self.settle()
        while left := missing():
            assert time.monotonic() < deadline, f"{left} blocks are not kept: {level.counts()}"
            time.sleep(0.01)

    def hold_copies(self, direction: str, mark: str) -> None:
        """From now on no copy into the pool ("save") or out of it ("load") ends. The first one makes the file `mark` when it would begin.
        Those of recurrent states go on: a step of a prompt waits for the states of the step before it."""
        owner, name = {"save": (SaveJob, "run"), "load": (Loader, "pull")}[direction]
        copy, shape, groups = getattr(owner, name), self.scheduler_side.shape, self.worker_side.attachment.groups
        of_states = {id(group.mover) for group, of in zip(groups, shape.groups, strict=True) if of.kind is Kind.STATE}

        def held(what, *arguments):
            if direction == "save" and id(what.mover) in of_states:
                return copy(what)
            Path(mark).touch()
            return threading.Event().wait()

        setattr(owner, name, held)

    def counted(self) -> dict[str, float]:
        """What was counted since the last call: ours as "name/label", vLLM's external hits as "external_hits", tokens as "source/NAME",
        and "preemptions"."""
        # Counts of a step leave with the next one.
        now = self._all()
        since = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        return {name: value for name, value in since.items() if value}

    def _all(self) -> dict[str, float]:
        found = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is None:
                continue
            labels = {key: text for key, text in metric.labels.items() if key not in ("engine", "model_name")}
            if metric.name.startswith("vllm:kvbm_cxl_"):
                label = "/" + next(iter(labels.values())) if labels else ""
                found[metric.name.removeprefix("vllm:kvbm_cxl_") + label] = value
            elif metric.name == "vllm:num_preemptions":
                found["preemptions"] = value
            elif metric.name == "vllm:external_prefix_cache_hits":
                found["external_hits"] = value
            elif metric.name == "vllm:prompt_tokens_by_source":
                found["source/" + next(iter(labels.values()))] = value
        return found

    def settle(self) -> None:
        """Steps until nothing is left to do, so that late counts are in."""
        # Ranks of their own have no connector here.
        saves, deadline = self.worker_side.saver.saves if has_kv_transfer_group() else None, time.monotonic() + SETTLES_S
        while saves and saves._by_key:
            assert time.monotonic() < deadline, f"{len(saves._by_key)} blocks are on their way into the pool"
            time.sleep(0.001)
        for _ in range(3):
            self.llm.llm_engine.step()


def arguments(role: str | None, pool: str, policy: str, blocks: int, options: dict, spread: bool) -> dict:
    """What vLLM is told, with what all tests have in common. `spread`: the connector is made in processes of vLLM's own."""
    extra, told = options.get("extra", {}), {name: value for name, value in options.items() if name != "extra"}
    if role is not None:
        told["kv_transfer_config"] = {
            "kv_connector": CONNECTOR_NAME,
            "kv_role": role,
            "kv_load_failure_policy": policy,
            # Tests count what is found; those of the audit turn it on.
            "kv_connector_extra_config": {"pool": pool, "audit": False, **extra},
            **({"kv_connector_module_path": "kvbm_cxl.vllm_integration.connector"} if spread else {}),
        }
    common = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True, "disable_log_stats": False, "seed": 0}
    return {**common, "kv_cache_memory_bytes": blocks * BLOCK_BYTES, **told}


@contextmanager
def engine(model: str, role: str | None, pool: str = "", policy: str = "recompute", blocks: int = 64, **options) -> Iterator[Engine]:
    """An engine with `blocks` blocks of KV cache; `role` None: without a connector. `extra`: the connector's options, others are vLLM's."""
    from vllm import LLM

    register()
    # Workers are processes of their own, where nothing is registered yet.
    spread = bool({"tensor_parallel_size", "pipeline_parallel_size"} & options.keys())
    settings = arguments(role, pool, policy, blocks, options, spread)
    llm, before = None, set(left_by_ranks())
    try:
        llm = LLM(model=model, **settings)
        yield Engine(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        # An engine that did not start is a process that ends; this one goes on.
        ensure_kv_transfer_shutdown()
        del llm
        gc.collect()
        # Workers of several ranks are ended before they remove what they talk through.
        for path in set(left_by_ranks()) - before:
            path.unlink(missing_ok=True)


def left_by_ranks() -> Iterable[Path]:
    return Path("/dev/shm").glob("vllm_dist_*cpushm_*")


def flip_bytes(pool: str, payload: bytes, offsets: Iterable[int]) -> None:
    """Changes bytes of a block's payload in the pool's file, behind the back of all hosts."""
    with open(pool, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for start in range(0, len(payload), 64):
            piece = payload[start : start + 64]
            found = memory.find(piece) if len(set(piece)) > 16 else -1
            if found >= 0 and memory.find(piece, found + 1) < 0:  # Nothing but this block has these bytes.
                break
        else:
            raise AssertionError("the block does not lie in the pool")
        assert memory[found - start : found - start + len(payload)] == payload
        for offset in offsets:
            memory[found - start + offset] ^= 0xFF
