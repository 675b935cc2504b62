# SPDX-License-Identifier: Apache-2.0
"""The KV cache itself in pool memory, on CPUs.

vLLM makes one allocation for all layers, inside a context that a connector may give it. This one answers that allocation with memory of the
pool whose blocks can be lent to readers where they lie.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvbm_cxl

from .config import ConfigError
from .log import logger
from .pool_access import PoolAccess

# Smaller allocations in the context are scratch of vLLM's, not a KV cache.
_SMALLEST_BYTES = 1 << 20


class PoolPlacement(TorchFunctionMode):
    """While it is entered, large zeroed byte tensors for the CPU lie in the pool. Left without any, it raises `ConfigError`."""

    def __init__(self, access: PoolAccess, block_count: int, parts: int) -> None:
        """`block_count`: blocks of the KV cache; `parts`: at most so many pieces has each of them."""
        super().__init__()
        self._access, self._block_count, self._parts = access, block_count, parts
        self.regions: list[kvbm_cxl.LentRegion] = []
        """What was placed. The memory is kept alive by the tensors on it, too."""

    def __exit__(self, kind, value, trace) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and not self.regions:
            raise ConfigError("zero_copy: vLLM allocated its KV cache in a way that could not be placed in the pool; leave zero_copy out")

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and (len_bytes := _len_bytes(args, kwargs)):
            return self._place(len_bytes)
        return func(*args, **kwargs)

    def _place(self, len_bytes: int) -> torch.Tensor:
        spec = self._access.spec
        try:
            region = self._access.call(lambda cache: cache.lent_region(len_bytes, self._block_count, parts=self._parts))
        except kvbm_cxl.CxlError as error:
            raise ConfigError(
                f"zero_copy needs {len_bytes} bytes of pool {spec} for the KV cache: {error}. Give vLLM a smaller "
                "--kv-cache-memory-bytes, or the pool more room beside its cells (cxlctl format --cells)"
            ) from error
        self.regions.append(region)
        tensor = torch.frombuffer(region.memory, dtype=torch.int8)
        tensor.zero_()
        logger.info("KV cache of %d bytes lies in pool %s at offset %#x", len_bytes, spec, region.memory.offset)
        return tensor


def _len_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Length of a KV cache allocation (`torch.zeros(n, dtype=int8, device=cpu)`), 0 for anything else."""
    if kwargs.get("dtype") is not torch.int8 or torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return 0
    size = args[0] if len(args) == 1 else kwargs.get("size")
    return size if isinstance(size, int) and size >= _SMALLEST_BYTES else 0
