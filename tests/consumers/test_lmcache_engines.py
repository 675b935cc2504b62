# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with LMCache within their process and its storage plugin: the second answers from what a killed one on another host stored.

LMCache has nothing that copies between its memory and an engine's on CPUs: `lmcache_cpu` stands in that one place.
"""

import json
import sys

import kvbm_cxl
import pytest
from peers import ROOT, fsck, until

pytest.importorskip("lmcache", reason="LMCache is not installed: `make setup-lmcache`")
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup-serve`")
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))
# Of each of three prompts of 1000 tokens 7 chunks of 128, and a part of one that is not stored.
CHUNKS = 21


def configuration(path, pool):
    """A file with the configuration of LMCache, as docs/start/lmcache.md has it. JSON is YAML."""
    extra = {"storage_plugin.cxl.module_path": "kvbm_cxl.lmcache", "storage_plugin.cxl.class_name": "CxlStorageBackend", "cxl.pool": pool}
    config = {"storage_plugins": ["cxl"], "extra_config": extra, "pre_caching_hash_algorithm": "sha256_cbor"}
    # Whole blocks of the engine, and no cache of LMCache's own in front of the pool.
    config |= {"chunk_size": 128, "save_unfull_chunk": False, "local_cpu": False, "max_local_cpu_size": 0.1}
    path.write_text(json.dumps(config))
    return path


def of_all_hosts(rack, name):
    """The sum of a counter that hosts keep in the pool."""
    lines = [line for line in rack.prometheus().splitlines() if line.startswith(f"cxl_pool_host_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_second_host_answers_from_what_a_killed_engine_stored(engine, make_pool, tmp_path, monkeypatch):
    from tiny_model import tiny_model

    monkeypatch.setenv("CXL_SUSPECT_MS", "3000")
    pool, model = make_pool(size="96M", cells="512K:75%"), tiny_model(tmp_path / "model")
    plain = engine("plain", model, "none")
    wanted = plain("answers")
    plain.kill()
    assert [cached for _, cached in wanted] == [0, 0, 0]
    config = configuration(tmp_path / "lmcache.yaml", pool)
    with kvbm_cxl.Pool(pool) as rack, rack.cache() as cache:
        first = engine("a", model, config)
        assert first("answers") == wanted, "nothing was there"
        until(lambda: of_all_hosts(rack, "published_blocks") == CHUNKS, "the chunks to be stored")
        first.kill()
        until(lambda: cache.usage().ready == CHUNKS, "the chunks of the dead host to be taken over")
        second = engine("b", model, config)
        # 896 of 1000 tokens of each prompt were loaded, and the text is that of an engine without a cache.
        assert second("answers") == [[tokens, 896] for tokens, _ in wanted]
        until(lambda: of_all_hosts(rack, "pulled_blocks") == CHUNKS, "the second host to tell what it pulled")
    assert fsck(pool)["errors"] == 0
