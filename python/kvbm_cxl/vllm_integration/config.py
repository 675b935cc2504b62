# SPDX-License-Identifier: Apache-2.0
"""Options of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from dataclasses import dataclass
from typing import ClassVar

from ..options import ConfigError, PoolOptions, number


@dataclass(frozen=True)
class ConnectorConfig(PoolOptions):
    """Every option, with its default."""

    who: ClassVar[str] = "CxlConnector"

    audit: bool = True
    """Compare a share of the pool's blocks with what this engine computes for the same tokens. Some requests whose prompt was found are
    computed for that, the first one after a start among them."""
    workers: int = number(2, 1, 64)
    """Threads that copy, for each direction."""
    max_inflight_bytes: int = number(256 << 20, 1)
    """Bytes of blocks that wait to be published or are being copied. A step that would go beyond waits for room."""
    max_pinned_blocks: int = number(16384, 1)
    """Blocks that loads of this engine hold in the pool at one time. Requests beyond wait in vLLM's queue."""
    min_load_tokens: int = number(1, 1)
    """Shorter hits are computed instead."""
    publish_generated: bool = True
    """With role kv_both: publish blocks of generated tokens as well, for the next turn of a conversation."""
    window_every_tokens: int = number(1024, 1)
    """Of layers with a sliding window, what a prefix needs that ends at a multiple of this many tokens is published, besides that of the
    prompt's end, of what is generated, and of a prefix that the pool has seen before. Smaller: the second prompt with a beginning finds
    it, too; larger: fewer blocks."""
    stored_tp: int = number(0, 0)
    """Blocks lie in the pool as an engine with this tensor parallelism has them, so that engines of every tensor parallelism that divides
    it share them. 0: that of the engine. Name the largest one, alike for all engines of the pool."""
    stored_block_tokens: int = number(0, 0)
    """Tokens of a block as it lies in the pool, so that engines share blocks whose `--block-size` is a multiple of it. 0: the engine's
    block size. Name the smallest one, alike for all engines of the pool."""
    publish_behind: bool = True
    """Prefill answers a hand-over when the pool has reserved cells for its blocks, and copies them after the answer, during the next
    steps. Decode waits for blocks that are on their way. False: prefill answers when all of them are there."""
    events: bool = True
    """Where vLLM publishes KV events (`--kv-events-config`), publish those of the pool's blocks as well, of all engines."""
    events_medium: str = "EXTERNAL"
    """What these events call the pool. It decides what routers credit it with: Dynamo's takes EXTERNAL as it does DISK."""
    model_id: str = ""
    """What the model's weights are called in the pool. Left out: a digest of all bytes of their files. Workers share blocks only under the
    same one; a new version of the weights needs a new one. Configuration and settings of the engine count as without it."""
    tenant_salt: str = ""
    """A secret that keeps this engine's blocks apart from those of others with the same model."""
    record_dir: str = ""
    """A folder for a record of this engine's requests, as salted ids of their blocks without prompts: for `cxlctl record` and
    `cxl-plan`. Left out: nothing is recorded."""
    record_salt: str = ""
    """A secret that the recorded ids depend on, the same on all hosts whose records are to be merged."""
    record_max_bytes: int = number(1 << 30, 1024)
    """Longest record of an engine. What comes after it is dropped and counted."""
    l2: str = ""
    """A second level below the pool: a folder of a local disk or of a file system that hosts share, `nixl+posix://FOLDER` to have NIXL
    read and write there, or a URL as fsspec takes it. Blocks that are about to be evicted are kept there, and come back when a prompt
    begins with them. Left out: they are dropped."""
    l2_max_bytes: int = number(0, 0)
    """What the second level may hold. Beyond it the blocks that were unused for longest go."""
    l2_wait_ms: int = number(1000, 0)
    """Longest wait of a request for blocks that come back from the second level."""

    def check(self) -> None:
        if not self.events_medium:
            raise ConfigError("CxlConnector: events_medium is empty; it is a name that routers know, such as EXTERNAL")
        if bool(self.record_dir) != bool(self.record_salt):
            raise ConfigError("CxlConnector: record_dir and record_salt go together: a folder, and a secret for the ids there")
        if bool(self.l2) != (self.l2_max_bytes > 0):
            raise ConfigError("CxlConnector: l2 and l2_max_bytes go together: where evicted blocks are kept, and how many bytes of them")
