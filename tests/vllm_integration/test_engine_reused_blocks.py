# SPDX-License-Identifier: Apache-2.0
"""Blocks that vLLM frees and fills again while their request still runs, as it does behind a sliding window and with states: the pool
gets what they held under their keys."""

import time

import pytest
import tiny_models
from engines import engine, prompt
from kvbm_cxl.vllm_integration.saver import SaveJob

# No tail, behind whose tokens anything may stand.
PROMPT, STEP_TOKENS = prompt(1504, 1), 128
# Blocks of an engine that has hardly any more than the prompt needs, and of one that has many.
TIGHT, ROOMY = {"granite4": 20, "gpt-oss": 110, "gemma3": 110, "llama4": 110}, 400
# Even of a model whose blocks have many tokens, as those with states have.
LEAST = 8
# Several steps.
LATE_S = 0.5


@pytest.mark.parametrize("behind", (False, True), ids=("", "publish_behind"))
@pytest.mark.parametrize("family", TIGHT)
def test_copies_that_begin_late_read_what_the_blocks_held(family, behind, make_pool, tmp_path, monkeypatch):
    model, options = tiny_models.make(family, tmp_path), tiny_models.options(family)
    options["extra"] |= {"publish_behind": behind}
    run, late_s, namespaces = SaveJob.run, 0.0, {}

    def later(job):
        namespaces.update(dict.fromkeys(job.keys, (job.mover.namespace, job.block_bytes)))
        time.sleep(late_s)
        run(job)

    def stored(blocks: int) -> dict[bytes, bytes]:
        """What the pool holds when an engine with so many blocks has computed the prompt, by key."""
        namespaces.clear()
        size = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": STEP_TOKENS, "max_model_len": 2048}
        with engine(model, "kv_both", make_pool(size="192M", cells="512K:80%"), **size, **options) as running:
            running.texts([PROMPT])
            running.settle()
            found, access = {}, running.scheduler_side.access
            for key, (namespace, len_bytes) in namespaces.items():
                found[key] = bytearray(len_bytes)
                (pulled,) = access.call(lambda cache: cache.pull_all(namespace, [key], [found[key]]))
                assert not pulled.reason
            return found

    monkeypatch.setattr(SaveJob, "run", later)
    right, late_s = stored(ROOMY), LATE_S
    found = stored(TIGHT[family])
    # The tight one has the windows' blocks no more that only other prompts would need.
    unknown, wrong = len(found.keys() - right.keys()), sum(found[key] != right[key] for key in found if key in right)
    assert len(found) >= LEAST and not unknown and not wrong, f"of {len(found)} blocks"
