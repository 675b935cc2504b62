# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what prefill said that it publishes, and is not there yet. Whether it comes, the pool knows."""

from dataclasses import dataclass

import kvbm_cxl

from .block_names import BlockNames
from .log import logger
from .pool_access import PoolAccess
from .request_state import PinnedLookup, RequestState

# Asked at a time. A block that does not come is mostly among the first that are missing.
_ASKED = 64


@dataclass
class ComingBlocks:
    """The blocks that prefill announced and the lookup did not find, of every group on every rank."""

    access: PoolAccess
    names: BlockNames
    tracked: RequestState
    lookup: PinnedLookup

    def all_come(self) -> bool:
        """Whether each of them is there or on its way."""
        try:
            return all(self._come(position) for position in range(len(self.names.shape.groups)))
        except kvbm_cxl.CxlError as error:
            logger.debug("blocks that request %s waits for: %s", self.tracked.request.request_id, error)
            return False

    def _come(self, position: int) -> bool:
        keys = self._keys(position)
        for namespace in self.names.by_group[position]:
            for start in range(0, len(keys), _ASKED):
                asked = keys[start : start + _ASKED]
                if "absent" in self.access.call(lambda cache: cache.presence(namespace, asked)):
                    return False
        return True

    def _keys(self, position: int) -> list[bytes]:
        shape, request, expected = self.names.shape, self.tracked.request, self.tracked.expected
        group, tokens = shape.groups[position], min(expected.tokens, request.num_prompt_tokens) if expected else 0
        needed = group.needed_blocks(tokens)
        start = max(needed.start, self.lookup.tokens // group.block_tokens)
        keys = self.names.keys(self.tracked, start, tokens // group.block_tokens, position)
        if shape.takes_tails and tokens % group.block_tokens and tokens == request.num_prompt_tokens:
            keys.append(self.names.tail(self.tracked, position))
        return keys
