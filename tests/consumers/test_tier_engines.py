# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with the tier, on two hosts one after the other: text as without a cache, also after the first was killed."""

import contextlib
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import kvbm_cxl
import pytest
from peer_process import PeerProcess
from peers import HERE, ROOT, fsck, until

pytest.importorskip("vllm", reason="vLLM is not installed: `make setup-serve`")
try:
    distribution("kvbm-cxl")
except PackageNotFoundError:
    pytest.skip("the package is not installed beside vLLM, which finds the tier by it: `make python-package`", allow_module_level=True)
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))
# 1000 tokens are 7 chunks of 128 and a part of one.
CHUNKS, CACHED = 21, 896
SEEDS = [0, 1, 2]


class Engine(PeerProcess):
    def __init__(self, model, pool, environment, log, ranks):
        self._id = log.name
        super().__init__([HERE / "tiered_engine.py", model, pool, self._id, ranks], environment, log)

    def ask(self, *told):
        """Texts, how many tokens of each prompt came from a cache, and vLLM's counters since the engine started."""
        answers, counts = self("ask", *told)
        return [text for text, _ in answers], [cached for _, cached in answers], counts

    def kill(self):
        super().kill()
        # What vLLM leaves of its primary tier when it is killed.
        Path(f"/dev/shm/vllm_offload_{self._id}.mmap").unlink(missing_ok=True)


@pytest.fixture
def start(tmp_path, on_host):
    with contextlib.ExitStack() as started:

        def start(machine, model, pool="", ranks=1):
            environment = {**on_host(machine), "VLLM_SERVER_DEV_MODE": "1"}
            engine = Engine(str(model), pool, environment, tmp_path / f"kvbm-cxl-test-{machine}-{os.getpid()}", ranks)
            started.callback(engine.kill)
            return engine

        yield start


def test_a_second_host_answers_from_what_a_killed_engine_stored(start, make_pool, tmp_path, monkeypatch):
    from tiny_model import tiny_model

    monkeypatch.setenv("CXL_SUSPECT_MS", "3000")
    pool, model = make_pool(size="96M", cells="512K:75%"), tiny_model(tmp_path / "model")
    wanted, cached, _ = start("plain", model).ask(*SEEDS)
    assert cached == [0, 0, 0]
    first = start("a", model, pool)
    texts, cached, counts = first.ask(*SEEDS)
    assert texts == wanted and cached == [0, 0, 0]
    assert counts["vllm:kvbm_cxl_tier_stored_chunks/stored"] == CHUNKS
    # Another host of the rack: it takes over what the dead one had, and until then that is not served.
    with kvbm_cxl.Pool(pool) as rack, rack.cache() as cache:
        first.kill()
        until(lambda: cache.usage().ready == CHUNKS, "the chunks of the dead host to be taken over")
        # From a copy of the model elsewhere, too.
        copy = tmp_path / "copy"
        shutil.copytree(model, copy)
        second = start("b", copy, pool)
        texts, cached, counts = second.ask(*SEEDS)
    assert texts == wanted, "the same text as without a cache"
    assert cached == [CACHED] * 3, counts
    assert counts["vllm:kvbm_cxl_tier_loaded_chunks/hit"] == CHUNKS
    assert counts["vllm:kv_offload_tiering_chunk_hits/1:cxl"] == CHUNKS and counts["vllm:kvbm_cxl_tier_pool_is_open/"] == 1
    second.kill()
    assert fsck(pool) | {"notes": 0} == {"errors": 0, "warnings": 0, "notes": 0}


def test_weights_that_are_replaced_and_a_pool_that_goes_change_no_text(start, make_pool, tmp_path):
    from tiny_model import tiny_model

    pool, model, other = make_pool(size="96M", cells="512K:75%"), tiny_model(tmp_path / "model"), tiny_model(tmp_path / "other", seed=21)
    wanted, _, _ = start("plain", model).ask(*SEEDS)
    wanted_of_other, _, _ = start("plain-other", other).ask(*SEEDS)
    assert wanted != wanted_of_other
    engine = start("a", model, pool)
    assert engine.ask(*SEEDS)[0] == wanted
    texts, cached, _ = engine.ask("reload", str(other), "reset", *SEEDS)
    assert texts == wanted_of_other and cached == [0, 0, 0], "no chunk of the earlier weights"
    texts, cached, counts = engine.ask("reset", *SEEDS)
    assert texts == wanted_of_other and cached == [CACHED] * 3 and counts["vllm:kvbm_cxl_tier_stored_chunks/stored"] == 2 * CHUNKS
    texts, cached, _ = engine.ask("reload", str(model), "reset", *SEEDS)
    assert texts == wanted and cached == [CACHED] * 3, "those of the start are there again"
    # The pool's file is emptied: no page of it is left.
    os.truncate(pool, 0)
    texts, cached, counts = engine.ask("reset", *SEEDS)
    assert texts == wanted and cached == [0, 0, 0]
    assert engine.ask(*SEEDS)[0] == wanted and "vllm:kvbm_cxl_tier_pool_is_open/" not in engine.ask()[2]


def test_engines_of_two_ranks_share_chunks_and_none_with_one_of_one(start, make_pool, tmp_path):
    """A chunk has the parts of both ranks."""
    from tiny_model import tiny_model

    pool, model = make_pool(size="96M", cells="512K:75%"), tiny_model(tmp_path / "model")
    first = start("a", model, pool, ranks=2)
    wanted, _, counts = first.ask(*SEEDS)
    assert counts["vllm:kvbm_cxl_tier_stored_chunks/stored"] == CHUNKS
    texts, cached, _ = start("b", model, pool, ranks=2).ask(*SEEDS)
    assert texts == wanted and cached == [CACHED] * 3
    texts, cached, _ = start("c", model, pool).ask(*SEEDS)
    assert texts == wanted and cached == [0, 0, 0]
