#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times conversations with long contexts through vLLM engines: without LMCache, with LMCache in host memory, and with the pool.

The workload is that of a published benchmark of LMCache on CXL memory, at the scale of a CPU: 10 contexts of 5 turns each, one request at
a time, each turn with all that was said before, more contexts than the engine's own cache holds, so that without LMCache every turn
computes all of its prompt. Contexts have 3072 tokens, a model of 4 layers computes them on one thread. LMCache 0.5.6 is within the
engine's process and takes its memory from the host (`local_cpu`), or has its storage plugin in a pool of mode `software` and no cache in
front of it; between LMCache's memory and the engine's `tests/consumers/lmcache_cpu.py` copies, as LMCache has nothing that does so on
CPUs. The engines get each request in turns, in another order each time. At the end an engine that was just started on another host gets
each conversation's last turn.

Every answer has to be that of the engine without LMCache, and the turns behind the first have to find all whole chunks of the turn
before. `ttft_warm_off_over_pool` is the median time to the first token of the turns behind the first without LMCache by that with the
pool: above 1 the pool is faster; `ttft_first_...` is of the first turns, which find nothing and store, `ttft_mean_...` the mean over all
turns, `wall_...` of the time to the last token, `ttft_elsewhere_...` of the other host's engine.
"""

import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "consumers"), str(ROOT / "deploy" / "dynamo")]

import kvbm_cxl  # noqa: E402
import peers  # noqa: E402
from tiny_model import tiny_model  # noqa: E402

CONTEXTS, TURNS = 10, 5
CONTEXT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, MOST_TOKENS = 3072, 64, 8, 4096
CHUNK_TOKENS = 128
WAYS = ("off", "dram", "pool")
PUBLISHED = """published: Lablup and XCENA, LMCache's Maru backend, a CXL memory card, Qwen3-30B-A3B on a GPU, contexts of 174,000 tokens
  off over CXL: wall clock 3.7, mean time to the first token 4.2, warm turns 15; two replicas under load 3.8 and 17
  first token, seconds: off 40 in every turn; CXL 41.3, 3.5, then 1.0; host memory 1.15 in turn 1, then as CXL"""


def configuration(folder, way, pool):
    """LMCache's configuration in a file."""
    config = {"chunk_size": CHUNK_TOKENS, "save_unfull_chunk": False, "pre_caching_hash_algorithm": "sha256_cbor"}
    if way == "dram":
        config |= {"local_cpu": True, "max_local_cpu_size": 1.0}
    else:
        extra = {"storage_plugin.cxl.module_path": "kvbm_cxl.lmcache", "storage_plugin.cxl.class_name": "CxlStorageBackend"}
        config |= {"storage_plugins": ["cxl"], "extra_config": {**extra, "cxl.pool": pool}}
        config |= {"local_cpu": False, "max_local_cpu_size": 0.25}
    path = folder / f"{way}.json"
    path.write_text(json.dumps(config))
    return str(path)


def whole_chunks(tokens):
    return tokens // CHUNK_TOKENS * CHUNK_TOKENS


class Talk:
    """A conversation, as all engines have it."""

    def __init__(self, number):
        self._random = random.Random(number)
        self.prompt = self._tokens(CONTEXT_TOKENS)
        # How much of the prompt a cache has.
        self.stored = 0

    def _tokens(self, count):
        return [self._random.randrange(10, 2000) for _ in range(count)]

    def question(self):
        self.prompt += self._tokens(QUESTION_TOKENS)

    def answered(self, answer):
        self.stored = whole_chunks(len(self.prompt))
        self.prompt += answer


def checked(way, talk, told, wanted):
    """Times of an answer. Raises RuntimeError where it is another one than `wanted`, or was not answered from what it was to be."""
    answer, cached, ttft_s, took_s = told
    if answer != wanted:
        raise RuntimeError(f"{way}: {answer} is not the answer {wanted} of the engine without LMCache")
    least, most = (0, CHUNK_TOKENS) if way == "off" else (talk.stored, len(talk.prompt))
    if not least <= cached <= most:
        raise RuntimeError(f"{way}: {cached} tokens of {len(talk.prompt)} were cached, which is not {least} to {most}")
    return ttft_s, took_s


def conversations(engines):
    """The talks, and by way of each turn the times of all of them."""
    talks, times = [Talk(number) for number in range(CONTEXTS)], {way: [[] for _ in range(TURNS)] for way in WAYS}
    for turn in range(TURNS):
        for number, talk in enumerate(talks):
            talk.question()
            first = (turn + number) % len(WAYS)
            told = {way: engines[way]("ask", talk.prompt, ANSWER_TOKENS) for way in WAYS[first:] + WAYS[:first]}
            for way in WAYS:
                times[way][turn].append(checked(way, talk, told[way], told["off"][0]))
            if turn < TURNS - 1:
                talk.answered(told["off"][0])
            else:
                talk.last, talk.stored = told["off"][0], whole_chunks(len(talk.prompt))
        print(f"turn {turn}, first token, median s:" + "".join(f"  {way} {ttft(times[way][turn]):.3f}" for way in WAYS), flush=True)
    return talks, times


def ttft(times):
    return statistics.median(ttft_s for ttft_s, _ in times)


def ratios_of(times):
    """Those of the engines that ran together."""
    ratios = {}
    for slower, faster in (("off", "pool"), ("off", "dram"), ("dram", "pool")):
        def ratio(figure, slower=slower, faster=faster):
            return round(figure(times[slower]) / figure(times[faster]), 4)

        name = f"{slower}_over_{faster}"
        ratios[f"ttft_warm_{name}"] = ratio(lambda turns: ttft(sum(turns[1:], [])))
        ratios[f"ttft_first_{name}"] = ratio(lambda turns: ttft(turns[0]))
        ratios[f"ttft_mean_{name}"] = ratio(lambda turns: statistics.mean(ttft_s for ttft_s, _ in sum(turns, [])))
        ratios[f"wall_{name}"] = ratio(lambda turns: sum(took_s for _, took_s in sum(turns, [])))
    return ratios


def main():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-cxl-perf-") as name, contextlib.ExitStack() as started:
        folder = Path(name)
        pool, model = str(folder / "pool"), str(tiny_model(folder / "model"))
        kvbm_cxl.format_pool(f"{pool},size=384M", cells="512K:75%")

        def engine(host, way):
            path = os.pathsep.join(filter(None, [str(ROOT / "perf"), os.environ.get("PYTHONPATH")]))
            environment = {"CXL_STATE_DIR": str(folder / f"state-{host}"), "CXL_MACHINE_ID": host}
            environment |= {"VLLM_CACHE_ROOT": str(folder / "vllm"), "PYTHONPATH": path}
            environment |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
            config = "none" if way == "off" else configuration(folder, way, pool)
            variation = {"model": model, "way": config, "tokens": MOST_TOKENS}
            made = started.enter_context(peers.Peer("turns", pool, {**os.environ, **environment}, variation))
            # What an engine makes at its first request.
            made("ask", [7] * (CHUNK_TOKENS + 1), ANSWER_TOKENS)
            return made

        talks, times = conversations({way: engine(way, way) for way in WAYS})
        ratios, elsewhere = ratios_of(times), engine("elsewhere", "pool")
        again = [checked("pool", talk, elsewhere("ask", talk.prompt, ANSWER_TOKENS), talk.last) for talk in talks]
        print(f"the last turn on another host, first token, median s:  {ttft(again):.3f}")
        ratios["ttft_elsewhere_off_over_pool"] = round(ttft(times["off"][-1]) / ttft(again), 4)
    print(PUBLISHED)
    print("RATIOS " + json.dumps(ratios))


if __name__ == "__main__":
    main()
