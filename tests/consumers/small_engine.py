# SPDX-License-Identifier: Apache-2.0
"""The engine of these tests, in a process of its own: one process, no network, one thread; and what it is asked."""

import os
import random

# Before vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

from vllm import LLM, SamplingParams  # noqa: E402


def small_engine(model: str, **options) -> LLM:
    """An engine with room for some prompts of 1000 tokens."""
    usual = {"max_model_len": 2048, "kv_cache_memory_bytes": 64 * (512 << 10)}
    return LLM(model=model, dtype="float32", enforce_eager=True, seed=0, disable_log_stats=False, **{**usual, **options})


def answer(llm: LLM, seed: int) -> list:
    """The tokens of the answer to prompt `seed`, and how many tokens of the prompt were cached."""
    numbers = random.Random(seed)
    prompt = {"prompt_token_ids": [numbers.randrange(10, 2000) for _ in range(1000)]}
    (told,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    return [list(told.outputs[0].token_ids), told.num_cached_tokens]
