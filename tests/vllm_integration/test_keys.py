# SPDX-License-Identifier: Apache-2.0
"""Names of blocks: equal for equal content in every process, different for anything that shapes a block."""

import subprocess
import sys

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration.keys import block_key, encode, group_keys, name_variant, tail_key
from requests_of_vllm import BLOCK_TOKENS, request, tokens


def test_full_blocks_have_the_first_half_of_vllms_hash():
    asked = request("a", tokens(50))
    assert group_keys(asked, 0, 9) == [bytes(block_hash[:16]) for block_hash in asked.block_hashes]
    assert len(asked.block_hashes) == 3 and len(block_key(asked.block_hashes[0])) == 16
    assert group_keys(asked, 1, 2) == [block_key(asked.block_hashes[1])]


def test_a_prompt_of_whole_blocks_has_no_tail():
    assert tail_key(request("a", tokens(48)), BLOCK_TOKENS) is None
    assert tail_key(request("a", tokens(BLOCK_TOKENS)), BLOCK_TOKENS) is None


@pytest.mark.parametrize("length", (1, 5, 15, 17, 31, 47))
def test_tails_are_chained_to_what_is_before_them(length):
    mine = tokens(length)
    key = tail_key(request("a", mine), BLOCK_TOKENS)
    assert key == tail_key(request("b", mine), BLOCK_TOKENS) and len(key) == 16
    for changed in {0, length - 1}:
        others = [*mine[:changed], mine[changed] + 1, *mine[changed + 1 :]]
        assert tail_key(request("c", others), BLOCK_TOKENS) != key
    assert tail_key(request("d", mine[:-1]), BLOCK_TOKENS) != key
    assert tail_key(request("e", [*mine, 7]), BLOCK_TOKENS) != key


def test_generated_tokens_do_not_change_the_tail():
    asked = request("a", tokens(20))
    key = tail_key(asked, BLOCK_TOKENS)
    asked.append_output_token_ids(tokens(30, 1))
    assert len(asked.block_hashes) == 3 and tail_key(asked, BLOCK_TOKENS) == key


def test_a_tail_is_never_named_as_a_full_block():
    mine = tokens(40)
    full = {block_key(block_hash) for block_hash in request("a", mine).block_hashes}
    assert full.isdisjoint(tail_key(request("b", mine[:length]), BLOCK_TOKENS) for length in range(1, 40) if length % BLOCK_TOKENS)
    # Nor as a block of another user of the pool's own chain with the same tokens.
    assert tail_key(request("c", mine[:5]), BLOCK_TOKENS) != kvbm_cxl.chain_key(None, mine[:5])


@pytest.mark.parametrize("length", (5, 37))
def test_salt_and_adapter_are_in_the_tail(length):
    from vllm.lora.request import LoRARequest

    mine = tokens(length)

    def adapter(name, path):
        return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)

    made = [
        request("a", mine),
        request("b", mine, cache_salt="x"),
        request("c", mine, cache_salt="y"),
        request("d", mine, lora_request=adapter("x", "/adapters/1")),
        request("e", mine, lora_request=adapter("y", "/adapters/1")),
        request("f", mine, lora_request=adapter("x", "/adapters/2")),
    ]
    assert len({tail_key(each, BLOCK_TOKENS) for each in made}) == len(made)


def test_images_and_embeddings_are_in_the_tail():
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def image(identifier, offset=2):
        place = PlaceholderRange(offset=offset, length=6)
        return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place, mm_hash=identifier)]

    mine = tokens(10)
    made = [request("a", mine), request("b", mine, mm_features=image("one")), request("c", mine, mm_features=image("two"))]
    made.append(request("d", mine, mm_features=image("one", offset=3)))
    for seed in range(2):
        made.append(request(f"e{seed}", None, prompt_embeds=torch.full((10, 4), float(seed))))
    assert len({tail_key(each, BLOCK_TOKENS) for each in made}) == len(made)
    # An image that lies before the tail is in its parent.
    long = tokens(40)
    keys = {tail_key(request(name, long, mm_features=image(name)), BLOCK_TOKENS) for name in ("one", "two")}
    assert len(keys) == 2


def test_keys_are_equal_in_other_processes(folder):
    """vLLM's hashes and ours, in a process with another hash seed of Python's."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from requests_of_vllm import *; from kvbm_cxl.vllm_integration.keys import *\n"
        "made = request('a', tokens(40), cache_salt='s'); print([key.hex() for key in group_keys(made, 0, 2)], tail_key(made, 16).hex())"
    )
    out = subprocess.run([sys.executable, "-c", program, *sys.path], capture_output=True, text=True, check=True, timeout=300).stdout
    mine = request("a", tokens(40), cache_salt="s")
    assert out.splitlines()[-1] == f"{[key.hex() for key in group_keys(mine, 0, 2)]} {tail_key(mine, 16).hex()}"


def test_encoding_tells_values_apart():
    values = ["", "a", "ab", b"a", b"", 0, 1, -1, 12, None, (), ("a",), ("a", "b"), (("a",), "b"), ("ab",), ("a", ("b",)), (1, 2), (12,)]
    assert len({encode(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="no encoding for float"):
        encode(1.5)


def test_weights_and_adapters_are_part_of_a_key():
    """Each of both, and neither in the place of the other."""
    key, other = bytes(range(16)), bytes(range(16, 32))
    assert name_variant(key, b"", b"") == key
    names = [name_variant(key, *more) for more in ((other, b""), (b"", other), (other, other), (other, key), (key, other))]
    assert len({key, *names, name_variant(other, other, b"")}) == 7 and {len(name) for name in names} == {16}
