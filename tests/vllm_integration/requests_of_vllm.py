# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests as its scheduler has them, and stand-ins for what it hands to a connector with them."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_TOKENS = 16
init_none_hash(sha256)


def hasher(block_tokens: int):
    """What vLLM hashes requests with in an engine with such blocks."""
    return get_request_block_hasher(block_tokens, sha256)


_HASHER = hasher(BLOCK_TOKENS)


def tokens(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(2000) for _ in range(length)]


def request(name: str, token_ids: list[int], params: dict | None = None, **more) -> Request:
    """A request of vLLM's, hashed in blocks of 16 tokens. `params`: its kv_transfer_params."""
    sampling = SamplingParams(extra_args={"kv_transfer_params": params} if params else None, **more.pop("sampling", {}))
    return Request(name, token_ids, sampling, None, **{"block_hasher": _HASHER, **more})


def allocation(block_ids: list[int]) -> SimpleNamespace:
    """What `update_state_after_alloc` gets as blocks."""
    return SimpleNamespace(get_block_ids=lambda: (block_ids,))


@dataclass
class Scheduled:
    """A step as vLLM's scheduler describes it."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens that requests had before the step."""
    first: set[str] = field(default_factory=set)
    """Requests that are scheduled for the first time."""
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[tuple[int, int]] | None = None
    block_table_updates: dict[str, tuple[list[int], ...]] | None = None

    @property
    def scheduled_new_reqs(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(req_id=name, block_ids=(self.blocks.get(name, []),), num_computed_tokens=self.computed.get(name, 0))
            for name in self.first
        ]

    @property
    def scheduled_cached_reqs(self) -> SimpleNamespace:
        """None of these has a block more than before."""
        names = [name for name in self.num_scheduled_tokens if name not in self.first]
        computed = [self.computed.get(name, 0) for name in names]
        return SimpleNamespace(req_ids=names, resumed_req_ids=set(), new_block_ids=[None] * len(names), num_computed_tokens=computed)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def kv_connector_block_state(self) -> SimpleNamespace:
        return SimpleNamespace(get_block_ids=lambda name: (self.blocks[name],) if name in self.blocks else None)
