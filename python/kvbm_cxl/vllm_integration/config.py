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
    """Compare a share of the pool's blocks with this engine's own computation. The engine then computes some requests that the pool could
    serve, including the first one after a start."""
    workers: int = number(2, 1, 64)
    """Copy threads for each direction."""
    max_inflight_bytes: int = number(256 << 20, 1)
    """Most bytes of blocks that wait to be published or are being copied. A step that would exceed it waits."""
    max_pinned_blocks: int = number(16384, 1)
    """Most blocks that loads of this engine pin at a time. Further requests wait in vLLM's queue."""
    min_load_tokens: int = number(1, 1)
    """Compute hits that are shorter than this."""
    publish_generated: bool = True
    """With role kv_both: also publish blocks of generated tokens, for the next turn of a conversation."""
    window_every_tokens: int = number(1024, 1)
    """With sliding windows: also publish the window at multiples of this many tokens of a prompt. A larger number takes fewer blocks."""
    stored_tp: int = number(0, 0)
    """Store blocks as an engine with this tensor parallelism: the largest of all engines. 0: the engine's own."""
    stored_block_tokens: int = number(0, 0)
    """Store blocks of this many tokens: the smallest `--block-size` of all engines. 0: the engine's own."""
    publish_behind: bool = True
    """Prefill answers a transfer request as soon as the pool has reserved cells; decode waits for these blocks. False: prefill answers when
    all blocks are in the pool."""
    events: bool = True
    """If vLLM publishes KV events (`--kv-events-config`), also publish those of the pool's blocks, of all engines."""
    events_medium: str = "EXTERNAL"
    """Medium name in these events. Routers weigh hits by it: Dynamo's treats EXTERNAL like DISK."""
    model_id: str = ""
    """Name of the weights in the pool; use a new one for each version. Default: a digest of all bytes of their files."""
    tenant_salt: str = ""
    """Secret that separates this engine's blocks from those of others with the same model."""
    record_dir: str = ""
    """Folder for a record of requests, as salted ids of blocks without prompts: for `cxlctl record`. Default: no record."""
    record_salt: str = ""
    """Secret that the recorded ids depend on. Use one on all hosts whose records are merged."""
    record_max_bytes: int = number(1 << 30, 1024)
    """Longest record of an engine. Further entries are dropped and counted."""
    l2: str = ""
    """Second level for blocks that are about to be evicted: a folder, `nixl+posix://FOLDER` for access by NIXL, or a URL of fsspec."""
    l2_max_bytes: int = number(0, 0)
    """Size limit of the second level. Beyond it the least recently used blocks are deleted."""
    l2_wait_ms: int = number(1000, 0)
    """Longest wait of a request for blocks from the second level."""

    def check(self) -> None:
        if not self.events_medium:
            raise ConfigError("CxlConnector: events_medium is empty; it is a name that routers know, such as EXTERNAL")
        if bool(self.record_dir) != bool(self.record_salt):
            raise ConfigError("CxlConnector: record_dir and record_salt go together: a folder, and a secret for the ids there")
        if bool(self.l2) != (self.l2_max_bytes > 0):
            raise ConfigError("CxlConnector: l2 and l2_max_bytes go together: the store of evicted blocks, and its size limit")
