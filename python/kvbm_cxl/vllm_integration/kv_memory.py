# SPDX-License-Identifier: Apache-2.0
"""The KV cache itself in pool memory, on CPUs.

vLLM makes one allocation for all layers, inside a context that a connector may give it. This one answers that allocation with memory of the
pool. Nothing here knows of the connector: with any other one, NIXL's included, blocks then lie where peers can reach them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvbm_cxl

from .config import ConfigError
from .log import logger

# Smaller allocations in the context are scratch of vLLM's, not a KV cache.
_SMALLEST_BYTES = 1 << 20


class PoolPlacement(TorchFunctionMode):
    """While it is entered, large zeroed byte tensors for the CPU lie in the pool."""

    def __init__(self, pool: "kvbm_cxl.Pool") -> None:
        super().__init__()
        self._pool = pool
        self.memories: list[kvbm_cxl.PoolMemory] = []
        """What was placed. Each is kept alive by the tensors on it, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and (len_bytes := _len_bytes(args, kwargs)):
            return self._place(len_bytes)
        return func(*args, **kwargs)

    def _place(self, len_bytes: int) -> torch.Tensor:
        try:
            memory = self._pool.allocate(len_bytes, kept=False)
        except kvbm_cxl.CxlError as error:
            raise ConfigError(
                f"zero_copy needs {len_bytes} bytes of pool {self._pool.spec} for the KV cache: {error}. Give vLLM a smaller "
                "--kv-cache-memory-bytes, or the pool more room beside its cells (cxlctl format --cells)"
            ) from error
        self.memories.append(memory)
        tensor = torch.frombuffer(memory, dtype=torch.int8)
        tensor.zero_()
        logger.info("KV cache of %d bytes lies in pool %s at offset %#x", len_bytes, self._pool.spec, memory.offset)
        return tensor


def _len_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Length of a KV cache allocation (`torch.zeros(n, dtype=int8, device=cpu)`), 0 for anything else."""
    if kwargs.get("dtype") is not torch.int8 or torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return 0
    size = args[0] if len(args) == 1 else kwargs.get("size")
    return size if isinstance(size, int) and size >= _SMALLEST_BYTES else 0


@contextlib.contextmanager
def kv_cache_in_pool(pool: "kvbm_cxl.Pool") -> Iterator[PoolPlacement]:
    """What `get_mem_pool_context` returns. Raises `ConfigError` if no allocation was placed: vLLM then made it in another way."""
    placement = PoolPlacement(pool)
    with placement:
        yield placement
    if not placement.memories:
        raise ConfigError("zero_copy: vLLM allocated its KV cache in a way that could not be placed in the pool; leave zero_copy out")
