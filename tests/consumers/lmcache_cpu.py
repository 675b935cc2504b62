# SPDX-License-Identifier: Apache-2.0
"""What LMCache lacks to run with vLLM 0.31 on a CPU. Everything else of both is their own.

Within an engine it copies between the engine's KV cache and its own memory, and has nothing that does so on CPUs. Here a chunk is whole
pages, layer by layer, as they lie there: vLLM's attention on CPUs keeps the keys of several tokens together, so that a chunk has to be
whole blocks (`chunk_size`, and `save_unfull_chunk` off).
"""

import sys

import lmcache.v1.gpu_connector as connectors
import torch
from lmcache.v1.gpu_connector import GPUConnectorInterface
from vllm.triton_utils import dispatcher

_rebind = dispatcher._rebind_kernels


def _rebind_without_llvmlite(overrides):
    """vLLM 0.31 for CPUs looks at every module, and one of llvmlite, which LMCache loads, does not stand that."""
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.binding")}
    try:
        return _rebind(overrides)
    finally:
        sys.modules.update(held)


class CpuConnector(GPUConnectorInterface):
    def __init__(self, metadata):
        self._metadata = metadata

    def _pages(self, chunk, first, end, kvcaches, slot_mapping):
        """The bytes of each layer's pages of a chunk: those of the chunk, those of the engine, and which pages."""
        tokens = kvcaches[0].shape[2]
        pages = slot_mapping[first:end:tokens] // tokens
        assert (end - first) % tokens == 0, "a chunk of a part of a block"
        rows = chunk.raw_data.view(torch.uint8)[: chunk.get_size()].view(len(kvcaches), len(pages), -1)
        for row, layer in zip(rows, kvcaches, strict=True):
            yield row, layer.view(layer.shape[0], -1).view(torch.uint8), pages

    def from_gpu(self, memory_obj, start, end, *, kvcaches, slot_mapping, **_):
        for row, layer, pages in self._pages(memory_obj, start, end, kvcaches, slot_mapping):
            torch.index_select(layer, 0, pages, out=row)

    def to_gpu(self, memory_obj, start, end, *, kvcaches, slot_mapping, **_):
        for row, layer, pages in self._pages(memory_obj, start, end, kvcaches, slot_mapping):
            layer.index_copy_(0, pages, row)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **kwargs)

    def get_shape(self, num_tokens):
        (shape,) = self._metadata.get_shapes(num_tokens)
        return shape


def make_it_run() -> None:
    """Before an engine is made. LMCache's own factory ends with `No supported cpu connector found`."""
    dispatcher._rebind_kernels = _rebind_without_llvmlite
    connectors.CreateGPUConnector = lambda config, metadata, *_, **__: CpuConnector(metadata)
