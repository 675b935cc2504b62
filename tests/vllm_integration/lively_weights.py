# SPDX-License-Identifier: Apache-2.0
"""Random weights with which a tiny model makes something of its prompt. Those that vLLM makes up itself (`load_format="dummy"`) are so
small that an answer hardly depends on any token but the last, so that equal text would prove nothing.

vLLM imports this in every worker, for the sake of `worker_extension_cls`.
"""

import zlib

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors


class Extension:
    """Adds nothing to a worker."""


_tame = DummyModelLoader.load_weights


def _load_weights(self, model: torch.nn.Module, model_config) -> None:
    if model_config.use_mla:
        # vLLM's kernels of MLA for CPUs give decode another result than prefill has of the same tokens. With these weights it shows.
        return _tame(self, model, model_config)
    for prefix, layer in model.named_modules():
        for name, tensor in get_layer_tensors(layer).items():
            if name not in layer._non_persistent_buffers_set and tensor.is_floating_point():
                _fill(f"{prefix}.{name}", tensor, _first_expert(layer))


def _fill(name: str, tensor: torch.Tensor, first_expert: int) -> None:
    """By name, so that a stage of a pipeline has its part of the whole model; experts one by one, so that a rank has its own."""
    if tensor.dim() == 3:
        for number, expert in enumerate(tensor.unbind()):
            _fill(f"{name}.{first_expert + number}", expert, 0)
    elif tensor.dim() > 1:
        tensor.data.copy_(_random(name, tensor.shape, (3 / tensor.shape[-1]) ** 0.5))
    elif name.endswith(".A"):  # How fast a state is forgotten.
        tensor.data.copy_(-_random(name, tensor.shape, 0.2).abs())
    elif "norm" not in name:
        tensor.data.copy_(_random(name, tensor.shape, 0.1))


def _random(name: str, shape: torch.Size, most: float) -> torch.Tensor:
    return torch.empty(shape).uniform_(-most, most, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _first_expert(layer: torch.nn.Module) -> int:
    parallel = getattr(getattr(layer, "moe_config", None), "moe_parallel_config", None)
    return parallel.ep_rank * layer.moe_config.num_local_experts if parallel is not None and parallel.use_ep else 0


DummyModelLoader.load_weights = _load_weights
