# SPDX-License-Identifier: Apache-2.0
"""Whole engines with damaged blocks, without a usable pool, and of two models on one pool. Never wrong text."""

import shutil

import pytest
from engines import BLOCK_BYTES, engine, flip_bytes, prompt
from kvbm_cxl.options import ConfigError
from safetensors.numpy import load_file, save_file

PROMPT = prompt(500, 1)


@pytest.fixture(scope="module")
def text(model):
    """The answer of an engine without a connector."""
    with engine(model, None) as plain:
        return plain.texts([PROMPT])[0]


def _payload(running, key: bytes) -> bytes:
    side, into = running.scheduler_side, bytearray(BLOCK_BYTES)
    assert side.access.call(lambda cache: cache.pull(side.namespaces[0], key, into))
    return bytes(into)


@pytest.mark.parametrize("damaged", (0, 2, 3), ids=("first", "middle", "tail"))
@pytest.mark.parametrize("policy", ("recompute", "fail"))
def test_a_flipped_byte_is_never_served(model, pool, text, policy, damaged):
    with engine(model, "kv_both", pool, policy=policy) as running:
        (handed_over,) = running.handed_over([PROMPT])
        running.settle()
        running.llm.reset_prefix_cache()
        flip_bytes(pool, _payload(running, running.keys(PROMPT)[damaged]), [BLOCK_BYTES // 3])
        running.counted()
        (output,) = running.outputs([PROMPT], extra_args=handed_over)
        answer, reason = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
        running.settle()
        counted = running.counted()
        assert counted["pulled_blocks/checksum"] == 1 and counted["pulled_blocks/hit"] == 3 and counted["loads/failed"] == 1
        if policy == "recompute":
            assert (answer, reason) == (text, "length")
            # The damaged block was evicted, and is published again, right this time. The tail is for the hand-over alone.
            assert counted.get("published_blocks/stored", 0) == (damaged < 3)
        else:
            assert (answer, reason) == ([], "error")
        assert running.scheduler_side.access.call(lambda cache: cache.pinned()) == 0
        # The next one to ask gets the right text under either policy: the damaged block is there no more, or was replaced.
        running.llm.reset_prefix_cache()
        assert running.texts([PROMPT], extra_args=handed_over) == [text]
        assert "pulled_blocks/checksum" not in running.counted()


def test_without_checksums_a_flipped_byte_is_not_noticed(model, pool, text):
    """What the checksums are for: shows that the tests above would see wrong text."""
    with engine(model, "kv_both", pool, extra={"checksums": False}) as running:
        running.texts([PROMPT])
        running.llm.reset_prefix_cache()
        # Of every number the sign and more.
        flip_bytes(pool, _payload(running, running.keys(PROMPT)[1]), range(3, BLOCK_BYTES, 4))
        (answer,) = running.texts([PROMPT])
        assert answer != text


def test_start_without_a_usable_pool_says_what_to_do(model, make_pool, folder):
    missing = folder / "there-is-no-pool"
    for spec, extra, words in (
        (str(missing), {}, "cxlctl format"),
        (make_pool(cells="64K:75%"), {}, "512K:75%"),
        ("", {}, "CXL_POOL"),
        (str(missing), {"chekcsums": True}, "no option 'chekcsums'"),
    ):
        with pytest.raises((ConfigError, RuntimeError), match=words):
            with engine(model, "kv_both", spec, extra=extra):
                pass
    garbage = folder / "garbage"
    garbage.write_bytes(b"this is no pool" * (1 << 17))
    with pytest.raises((ConfigError, RuntimeError), match="cannot use pool"):
        with engine(model, "kv_both", str(garbage)):
            pass


def test_two_models_on_one_pool_never_meet(model, pool, folder, text):
    """The same shape, other weights, the same prompts."""
    other = folder / "another-model"
    if not other.exists():
        shutil.copytree(model, other)
        weights = load_file(other / "model.safetensors")
        save_file({name: array * 1.5 if "k_proj" in name else array for name, array in weights.items()}, other / "model.safetensors")
    with engine(str(other), None) as plain:
        expected = plain.texts([PROMPT])
    assert expected != [text], "the models differ in what they say"
    with engine(model, "kv_both", pool) as first:
        first.texts([PROMPT])
    with engine(str(other), "kv_both", pool) as second:
        assert second.texts([PROMPT]) == expected
        assert "external_hits" not in second.counted()
    copy = folder / "a-copy"
    if not copy.exists():
        shutil.copytree(model, copy)
    with engine(str(copy), "kv_both", pool) as third:
        assert third.texts([PROMPT]) == [text]
        assert third.counted()["external_hits"] == 384, "a copy elsewhere is the same model"
