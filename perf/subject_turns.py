# SPDX-License-Identifier: Apache-2.0
"""A process of `perf/lmcache_turns.py`: a vLLM engine, without LMCache or with LMCache in its process."""

import time

# Before vLLM, for which it sets the environment.
from small_engine import SamplingParams, small_engine  # isort: skip
import lmcache_cpu
from lmcache_engine import connector


class Subject:
    """`way` is `none` or a file with LMCache's configuration, which names the pool."""

    def __init__(self, pool, model, way, tokens):
        lmcache_cpu.make_it_run()
        self._llm = small_engine(model, max_model_len=tokens, **connector(way))

    def ask(self, prompt, answer_tokens):
        """The answer, how many tokens of the prompt were cached, and seconds until its first token and its last."""
        start = time.perf_counter()
        wanted = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        (told,) = self._llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        took_s = time.perf_counter() - start
        return [list(told.outputs[0].token_ids), told.num_cached_tokens, told.metrics.first_token_latency, took_s]
