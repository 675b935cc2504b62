# SPDX-License-Identifier: Apache-2.0
"""Which hits are computed all the same, in part, so that the workers can compare blocks of the pool with what they compute (`audit`).

An engine with a wrong key finds what it looks for, and would never compute a block that the pool has. So the end of a hit is left out: of
the first one after a start, the second, the fourth and so on, and then of every 256th. Its request takes as long as without a pool, up to
the tokens of one usual step. Of hand-overs it is every 256th alone: decode engines compute no prompts, and what prefill finds it compares
itself.
"""

from dataclasses import dataclass

from .groups import Shape
from .request_state import PinnedLookup, RequestState

_EVERY = 256
# At most so many tokens are computed of such a hit: what vLLM computes in a step by default.
_COMPUTED_TOKENS = 2048


@dataclass
class AuditedHits:
    """Chooses them. Used by the scheduler's thread."""

    is_on: bool = False
    """Whether the workers compare blocks."""
    _hits: int = 0
    _handovers: int = 0

    def limit(self, tracked: RequestState, lookup: PinnedLookup, shape: Shape) -> int | None:
        """The tokens from which on a request is computed although they were found; None where its hit stays whole."""
        whole = lookup.tokens // shape.align_tokens * shape.align_tokens
        limit = max(whole - _COMPUTED_TOKENS, lookup.computed_tokens)
        if not self.is_on or whole - limit < shape.align_tokens:
            return None
        if tracked.is_audited is None:
            tracked.is_audited = self._is_handover_chosen() if tracked.expected else self._is_hit_chosen()
        return limit if tracked.is_audited else None

    def _is_hit_chosen(self) -> bool:
        self._hits += 1
        return self._hits & (self._hits - 1) == 0 or self._hits % _EVERY == 0

    def _is_handover_chosen(self) -> bool:
        self._handovers += 1
        return self._handovers % _EVERY == 0
