# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.31 has no implementation of for CPUs, so that experts can be spread over data-parallel ranks there: collectives between
ranks with different numbers of tokens. Without them such an engine ends at its first step with "Worker failed with error ''".

vLLM imports this in every worker, for the sake of `worker_extension_cls`.
"""

import torch
from lively_weights import Extension  # noqa: F401  The weights are those of the other tests.
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def _all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
    """The parts of all ranks, one behind the other."""
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    parts = [input_.new_empty((size, *input_.shape[1:])) for size in sizes or [len(input_)] * self.world_size]
    parts[self.rank_in_group] = input_.contiguous()
    for rank, part in zip(self.ranks, parts, strict=True):
        torch.distributed.broadcast(part, rank, group=self.device_group)
    return torch.cat(parts)


def _reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's part of the sum over all ranks."""
    assert dim == 0
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].contiguous()


assert "all_gatherv" not in vars(CpuCommunicator), "vLLM has them now: this file can go"
CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
