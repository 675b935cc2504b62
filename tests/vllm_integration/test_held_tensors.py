# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a model holds, however it holds it: a change of one number shows, and what cannot be read is never "unchanged"."""

import ctypes
import datetime
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from kvbm_cxl.vllm_integration import weights
from kvbm_cxl.vllm_integration.held_tensors import DIGEST_ATTRIBUTE, OpaqueWeight, Walk
from kvbm_cxl.vllm_integration.stats import Tally
from kvbm_cxl.vllm_integration.weights import UNKNOWN, WeightsInMemory, fingerprint


def numbers() -> torch.Tensor:
    return torch.arange(2000, dtype=torch.float32).reshape(40, 50)


@dataclass
class Packed:
    tensor: torch.Tensor
    scale: torch.Tensor


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor) -> None:
        self.tensor = tensor


class Slot:
    __slots__ = "tensor"

    def __init__(self, tensor) -> None:
        self.tensor = tensor


class Method:
    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def apply(self, x):
        return x @ self.tensor


def _closure(tensor):
    return lambda x: x @ tensor


def _default(tensor):
    return lambda x, weight=tensor: x @ weight


def _keyword(tensor):
    def apply(x, *, weight=tensor):
        return x @ weight

    return apply


def _outside(tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
    return layer


def _with_attribute(tensor):
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.scale = tensor
    return parameter


HOLDERS = {
    "attribute": lambda tensor: tensor,
    "list": lambda tensor: [torch.zeros(1), tensor],
    "tuple in a dict": lambda tensor: {"a": (1, {"b": tensor})},
    "dataclass": lambda tensor: Packed(tensor, torch.ones(2)),
    "object": lambda tensor: Method(tensor),
    "slots": Slots,
    "slot": Slot,
    "set": lambda tensor: {tensor},
    "closure": _closure,
    "closure of a closure": lambda tensor: _closure(Packed(tensor, torch.ones(1))),
    "default": _default,
    "keyword": _keyword,
    "partial": lambda tensor: partial(torch.matmul, other=tensor),
    "argument of a partial": lambda tensor: partial(torch.matmul, tensor),
    "function of a partial": lambda tensor: partial(_closure(tensor), 1),
    "function of a method": lambda tensor: MethodType(_closure(tensor), 1),
    "method": lambda tensor: Method(tensor).apply,
    "module that is not registered": lambda tensor: [_outside(tensor)],
    "attribute of a parameter": _with_attribute,
    "namespace": lambda tensor: SimpleNamespace(tensor=tensor),
}
WAYS = {"parameter": "register_parameter", "buffer": "register_buffer", "buffer that is not saved": "register_buffer"}


def _model(how: str, tensor: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Module())
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    if how == "parameter":
        model[1].register_parameter("held", torch.nn.Parameter(tensor, requires_grad=False))
    elif how in WAYS:
        model[1].register_buffer("held", tensor, persistent=how == "buffer")
    else:
        model[1].held = HOLDERS[how](tensor)
    return model


@pytest.mark.parametrize("how", (*WAYS, *HOLDERS))
@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float8_e4m3fn))
def test_one_number_shows_however_it_is_held(how, kind):
    tensor = numbers().to(kind)
    model = _model(how, tensor)
    before = fingerprint(model)
    assert before == fingerprint(_model(how, numbers().to(kind))), "equal numbers elsewhere"
    for place in ((0, 0), (17, 33), (39, 49)):
        kept = tensor[place].clone()
        tensor.view(torch.uint8)[place[0], (place[1] + 1) * tensor.element_size() - 1] ^= 1
        assert fingerprint(model) != before
        tensor[place] = kept
    assert fingerprint(model) == before


def test_each_tensor_counts_once_and_models_within_models_end():
    model = _model("list", numbers())
    model[1].again, model[1].whole = model[1].held, [model]
    assert len(list(Walk().tensors(model))) == len(list(Walk().tensors(_model("list", numbers()))))


class AttentionLayerBase(torch.nn.Module):
    """Called as vLLM's layers that have a KV cache."""


def test_the_kv_cache_is_no_weight():
    layer = AttentionLayerBase()
    layer.kv_cache, layer.scale = torch.zeros(100), torch.ones(1)
    before = fingerprint(layer)
    layer.kv_cache += 1
    assert fingerprint(layer) == before
    layer.scale += 1
    assert fingerprint(layer) != before
    # Of any other module it is.
    other = torch.nn.Module()
    other.kv_cache = torch.zeros(100)
    before = fingerprint(other)
    other.kv_cache += 1
    assert fingerprint(other) != before


def test_what_adapters_add_is_not_the_models():
    from vllm.lora.layers import BaseLayerWithLoRA

    upon = BaseLayerWithLoRA()
    upon.base_layer, upon.lora_a_stacked = torch.nn.Linear(3, 3), (torch.zeros(4),)
    model = torch.nn.Sequential(upon)
    before = fingerprint(model)
    upon.lora_a_stacked[0].add_(1)
    assert fingerprint(model) == before
    upon.base_layer.weight.data[1, 1] += 1
    assert fingerprint(model) != before


class CPUDNNLGEMMHandler:
    """Called as vLLM's handle of a weight in memory of oneDNN."""


class ScriptObject:
    """Called as torch's handle of an object of C++."""


OPAQUE = (datetime.datetime_CAPI, CPUDNNLGEMMHandler(), ScriptObject(), ctypes.c_void_p(1), _closure(CPUDNNLGEMMHandler()))


@pytest.mark.parametrize("handle", OPAQUE, ids=lambda handle: type(handle).__name__)
def test_a_handle_that_may_be_a_weight_means_that_nothing_is_known(handle, caplog):
    model = torch.nn.Linear(3, 3)
    model.packed = handle
    with pytest.raises(OpaqueWeight):
        fingerprint(model)
    assert WeightsInMemory(SimpleNamespace(get_model=lambda: model), Tally()).look() == UNKNOWN
    assert "cannot be looked into" in caplog.text


def test_a_module_may_have_no_weight():
    model = torch.nn.Sequential(torch.nn.LayerNorm(3, elementwise_affine=False), torch.nn.ReLU())
    assert fingerprint(model)
    # One that another module has as well, with a scale that is not used.
    model.append(torch.nn.Linear(3, 3, bias=False))
    model.append(torch.nn.Linear(3, 3, bias=False))
    model[3].weight = model[2].weight
    model[3].weight_scale = torch.nn.Parameter(torch.empty(0))
    assert fingerprint(model)


def test_a_walk_has_an_end(monkeypatch):
    from kvbm_cxl.vllm_integration import held_tensors

    model = torch.nn.Linear(3, 3)
    model.held = held = []
    for _ in range(3000):
        held.append([])
        held = held[0]
    with pytest.raises(OpaqueWeight, match="without end"):
        fingerprint(model)
    monkeypatch.setattr(held_tensors, "_MAX_OBJECTS", 5)
    model.held = [object() for _ in range(10)]
    with pytest.raises(OpaqueWeight, match="without end"):
        fingerprint(model)


def test_what_a_weight_is_counts_as_its_bytes_do():
    """The same bytes under another name, of another type, and in another shape."""
    found, tensor = set(), torch.arange(1, 25, dtype=torch.float32)
    views = (tensor.view(torch.int32), tensor.view(4, 6), tensor.view(6, 4), tensor.view(6, 4).t(), tensor.as_strided((3, 12), (6, 1)))
    for held in (tensor, *views, tensor[:12], tensor[12:]):
        found.add(fingerprint(_model("attribute", held)))
    renamed = _model("attribute", tensor)
    renamed[1].other = renamed[1].__dict__.pop("held")
    assert len(found | {fingerprint(renamed)}) == 9
    tensor[0] += 1
    assert fingerprint(_model("attribute", tensor[12:])) in found, "what lies beside it does not count"


def test_weights_that_were_removed_are_looked_for():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False))
    model[0].weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(OpaqueWeight, match="0 .*removed its weight"):
        fingerprint(model)
    model[0].apply_packed = _closure(numbers())
    assert fingerprint(model)


@pytest.mark.parametrize("lost", (torch.zeros(4, device="meta"), torch.zeros(4)), ids=("meta", "freed"))
def test_a_tensor_without_memory_cannot_be_read(lost):
    if lost.device.type == "cpu":
        lost.untyped_storage().resize_(0)
    with pytest.raises(OpaqueWeight, match="no memory"):
        fingerprint(_model("attribute", lost))


def test_a_weight_that_is_packed_out_of_sight_leaves_its_digest(monkeypatch):
    from vllm import _custom_ops

    packed = []
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", lambda weight, size: packed.append(weight) or CPUDNNLGEMMHandler())
    monkeypatch.setattr(_custom_ops, "create_onednn_scaled_mm", lambda weight, *, scales: CPUDNNLGEMMHandler())
    weights.watch_packing()
    once = _custom_ops.create_onednn_mm
    weights.watch_packing()

    def model(tensor) -> torch.nn.Module:
        made = torch.nn.Linear(3, 3)
        torch.nn.init.zeros_(made.weight), torch.nn.init.zeros_(made.bias)
        made.run = _closure(_custom_ops.create_onednn_mm(tensor.t(), 32))
        return made

    tensor = numbers()
    before = fingerprint(model(tensor))
    assert before == fingerprint(model(numbers())) and len(packed) == 2
    tensor[3, 3] += 1e-3
    assert fingerprint(model(tensor)) != before
    assert isinstance(getattr(_custom_ops.create_onednn_mm(tensor, 1), DIGEST_ATTRIBUTE), bytes)
    assert _custom_ops.create_onednn_mm is once, "watched twice it is the same"
    scaled = [_custom_ops.create_onednn_scaled_mm(tensor, scales=torch.full((2,), scale)) for scale in (1.0, 1.0, 2.0)]
    first, second, third = (getattr(handle, DIGEST_ATTRIBUTE) for handle in scaled)
    assert first == second != third


def test_what_computing_fills_is_no_weight():
    model = torch.nn.Linear(3, 3)
    model.buffer, model.packed = torch.zeros(100), [torch.ones(5)]
    seen = WeightsInMemory(SimpleNamespace(get_model=lambda: model), Tally())
    seen.before_warm_up()
    model.buffer += 1
    model.later = torch.ones(3)
    first = seen.look()
    model.buffer += 1
    model.later += 1
    assert not seen.answer(1) and seen.latest == first
    model.packed[0][2] += 1
    assert seen.answer(2) and seen.latest != first
    model.packed[0][2] -= 1
    assert seen.answer(3) and seen.latest == first
    # A parameter is a weight, whatever happened to it.
    seen = WeightsInMemory(SimpleNamespace(get_model=lambda: model), Tally())
    seen.before_warm_up()
    model.weight.data += 1
    first = seen.look()
    model.weight.data += 1
    assert seen.answer(1) and seen.latest != first


@pytest.mark.parametrize("size", (1, 3, 4, 5, 4096, 100_003))
def test_sums_of_a_gpu_show_any_change(monkeypatch, size):
    """Computed here on a CPU, by the same calls."""
    monkeypatch.setattr(weights, "_PIECE_WORDS", 1000)

    def sums(tensor) -> bytes:
        return next(iter(weights._on_host({"a": weights._sums(tensor)}).values()))

    random = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (size + 1,), generator=random, dtype=torch.uint8)
    for tensor in (memory[:size], memory[1:]):  # The second one is not where words begin.
        before = sums(tensor)
        assert before == sums(tensor.clone())
        for place in {0, size // 2, size - 1, *torch.randint(0, size, (8,), generator=random).tolist()}:
            for bit in (1, 128):
                tensor[place] ^= bit
                assert sums(tensor) != before, (place, bit)
                tensor[place] ^= bit
        assert sums(tensor) == before
    words = torch.randint(0, 1 << 30, (5000,), generator=random, dtype=torch.int32)
    before = sums(words)
    for one, other in ((0, 1), (7, 4000), (1000, 2000)):
        swapped = words.clone()
        swapped[[one, other]] = words[[other, one]]
        assert sums(swapped) != before, "the same words in another order"
