# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side remembers of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .handover import Expected
from .keys import Rehashed
from .sessions import Session

if TYPE_CHECKING:
    import kvbm_cxl
    from kvbm_cxl.l2 import Promotion
    from vllm.v1.request import Request


@dataclass
class PinnedLookup:
    """What a lookup found beyond the tokens that vLLM has, pinned."""

    computed_tokens: int
    """Tokens that vLLM has."""
    tokens: int
    """Tokens of the request that are there when it is loaded, those that vLLM has included."""
    tail_tokens: int
    pins: list["kvbm_cxl.Pins"]
    known_tokens: int = 0
    """Tokens of the longest prefix of which full attention has every block; windows, or states, at its end may be missing."""

    def release(self) -> None:
        for pins in self.pins:
            pins.release()

    @property
    def pinned(self) -> int:
        return sum(map(len, self.pins))


@dataclass
class RequestState:
    """The state of a request until it is finished."""

    request: "Request"
    session: Session | None = None
    """Of a streaming session."""
    rehashed: Rehashed | None = None
    """The request with hashes of the pool's blocks, where vLLM's are of others."""
    lookup: PinnedLookup | None = None
    loading: bool = False
    loading_keys: list[bytes] = field(default_factory=list)
    """Of full blocks."""
    load_failed: bool = False
    saved_tokens: int = 0
    """Leading tokens whose full blocks were handed to the workers."""
    shared_tokens: int = 0
    """Where a prefix ends that other requests have, too, and of which the pool may lack windows, or states: they are worth publishing."""
    next_blocks: dict[int, int] = field(default_factory=dict)
    """For each KV cache group the block after the last that was given to them."""
    tail_saved: bool = False
    tail_is_fresh: bool = False
    """No step since the tail was saved has added tokens after it."""
    begun_s: float | None = None
    """When a step first computed tokens of it."""
    published: bool = False
    """The whole prompt was handed to the workers, and a hand-over's answer waits until they have done what it needs."""
    last_save_step: int = 0
    """Latest step with a save that no answer waits for."""
    expected: Expected | None = None
    first_lookup_s: float | None = None
    """When it was first looked up."""
    reused_tokens: int = 0
    """Tokens that vLLM had itself when it last looked it up."""
    promotion: "Promotion | None" = None
    """Its blocks that are on their way back from the second level."""
    promoted_until_s: float = 0.0
    """How long it waits for them."""
    was_promoted: bool = False
    """The second level was asked for what continues it."""
    counted: bool = False
    is_audited: bool | None = None
    """Whether found tokens are computed for the audit; None while nothing was found."""
    found_tokens: int = 0
    """Tokens that were found of it before some were left out for the audit."""
    computed_from: int | None = None
    """Tokens that were there before the first step of the request, from the pool or from vLLM's own prefix cache."""
    adapter: bytes = b""
    """Digest of its adapter; empty without one."""
    stale: bool = False
    """Some of its blocks were computed with other weights, or another adapter, than the engine has now: none is published any more."""

    def __post_init__(self) -> None:
        if self.request.resumable:
            self.session = Session()

    @property
    def hashes(self) -> Sequence[bytes]:
        """vLLM's hashes of its blocks, as far as they are those of its tokens."""
        return self.session.right(self.request) if self.session else self.request.block_hashes

    @property
    def adapter_in_use(self) -> tuple[int, bytes] | None:
        """Number and digest of its adapter."""
        lora = self.request.lora_request
        return (lora.lora_int_id, self.adapter) if lora else None

    @property
    def has_begun(self) -> bool:
        """Whether blocks of it are in vLLM's cache, or on their way there."""
        return self.loading or self.request.num_computed_tokens > 0
