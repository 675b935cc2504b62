# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: a record of requests, as salted ids of their blocks, for `cxlctl record` and `cxl-plan`.

A request is entered once, when vLLM admits it, with the tokens found by then; blocks given to the workers to publish follow.
Of the groups of a model the first one is recorded, and of its workers the first one's names: the others have the same blocks.
"""

from collections.abc import Iterable

import kvbm_cxl

from .block_names import BlockNames
from .config import ConnectorConfig
from .failures import ThreadFailures
from .log import logger
from .metadata import Blocks
from .request_state import RequestState
from .stats import Tally

_OUTCOMES = ("written", "dropped", "failed")


class Recording:
    """Enters requests and publishes. No call waits for the file."""

    def __init__(self, names: BlockNames, recorder: "kvbm_cxl.TraceRecorder") -> None:
        self._names = names
        self._recorder = recorder
        self._counted = (0, 0, 0)

    @classmethod
    def begin(cls, config: ConnectorConfig, names: BlockNames, failures: ThreadFailures) -> "Recording | None":
        """A record as the options say; None if they name none, or no file can be made: the engine continues without one."""
        if not config.record_dir:
            return None
        block_tokens = names.shape.groups[0].block_tokens
        try:
            recorder = kvbm_cxl.TraceRecorder(
                config.record_dir, config.record_salt, block_tokens=block_tokens, max_bytes=config.record_max_bytes
            )
        except kvbm_cxl.CxlError as error:
            failures.report("recording requests", error, config.record_dir)
            return None
        logger.info("kvbm-cxl: requests are recorded in %s", recorder.path)
        return cls(names, recorder)

    def record_request(self, tracked: RequestState, found_tokens: int) -> None:
        """vLLM admitted a request that has `found_tokens` without computing them."""
        if not (self._names.namespaces and self._names.era.is_known):
            return
        prompt_tokens = tracked.request.num_prompt_tokens
        keys = self._names.keys(tracked, 0, prompt_tokens // self._names.shape.groups[0].block_tokens)
        self._recorder.asked(self._names.namespaces[0], keys, prompt_tokens, found_tokens)

    def record_publish(self, saves: Iterable[Blocks]) -> None:
        """Blocks were handed to the workers to be published."""
        keys = [key for save in saves if save.group == 0 and not save.tail_tokens and not save.is_state for key in save.keys]
        if keys and self._names.namespaces:
            self._recorder.published(self._names.namespaces[0], keys)

    def count_in(self, tally: Tally) -> None:
        """Moves what became of the entries since the last call into `tally`."""
        before, self._counted = self._counted, self._recorder.counts
        for outcome, count, known in zip(_OUTCOMES, self._counted, before):
            tally.count("recorded_entries", outcome, count - known)

    def close(self) -> None:
        """Writes what waits, and ends the file."""
        self._recorder.close()
