# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: which of vLLM's hashes of a session are those of its tokens.

A session continues with new input after each answer. vLLM 0.31 then replaces the answer's last token, which it has not computed, but keeps
the hash of a block that this token ended; all later hashes chain over it. Such a block has no name in the pool. vLLM's own prefix cache
goes on to use that hash for other tokens than it stands for, so that requests that have it may have been given the wrong block
(`BlockNames.may_publish`).
"""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Session:
    """The state of a session's hashes."""

    stale: bytes | None = None
    """The first of vLLM's hashes that stands for other tokens than the session has now."""
    _turn: tuple[Any, ...] = ()
    _right: list[bytes] = field(default_factory=list)

    def right(self, request: "Request") -> list[bytes]:
        """Its leading hashes that are those of its tokens."""
        turn = (request.num_prompt_tokens, request.arrival_time)
        if turn != self._turn:
            self._turn, self._right, self.stale = turn, [], None
        known = len(self._right)
        if self.stale is None or known == 0:
            beside = copy.copy(request)
            beside.block_hashes = list(self._right)
            # vLLM's own function, of the tokens as they are now.
            for fresh, kept in zip(request._block_hasher(beside), request.block_hashes[known:]):
                if fresh != kept:
                    self.stale = kept
                    break
                self._right.append(kept)
        return self._right
