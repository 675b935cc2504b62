# SPDX-License-Identifier: Apache-2.0
"""What a chunk of LMCache within an engine looks like, and what it is called in the pool.

LMCache's keys name the model, the rank, the type and the tags of a request; neither the chunk size, nor the layout, nor how tokens become
a hash. All of these are part of the namespace. A chunk that is not full is shorter, and its length tells how many tokens it has.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

import kvbm_cxl

from ..consumers.names import key_of, namespace_of
from .shapes import Shape, shape_of, shape_of_object


@dataclass
class Chunks:
    """Chunks of one engine. May be called from any thread."""

    config: LMCacheEngineConfig
    metadata: LMCacheMetadata
    extra: str = ""
    """What the operator names besides."""
    replica: str = ""
    """Whose partition they are in; empty: that of all replicas."""
    _known: dict[tuple, "kvbm_cxl.Namespace"] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def format(self) -> MemoryFormat:
        return MemoryFormat.KV_MLA_FMT if self.metadata.use_mla else MemoryFormat.KV_2LTD

    def layout(self, tokens: int | None = None) -> tuple[list, list]:
        """Shapes and types of a chunk of `tokens`, or of a full one. The engine may register its layers after the backend was made."""
        return self.metadata.get_shapes(tokens), self.metadata.get_dtypes()

    def tokens_in(self, len_bytes: int) -> int:
        """How many tokens a chunk of this length has; 0 where there is no such chunk."""
        shapes, dtypes = self.layout()
        full_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        tokens, rest = divmod(len_bytes * self.metadata.chunk_size, full_bytes)
        return 0 if rest or tokens > self.metadata.chunk_size else tokens

    def has(self, objects: Sequence[MemoryObj]) -> list[bool]:
        """Which of them are chunks as `layout` and `format` tell, and not what else LMCache may hold."""
        known: dict[tuple, bool] = {}
        found = []
        for one in objects:
            meta = one.meta
            kind = (meta.fmt, one.get_size(), tuple(meta.shapes or [meta.shape]), tuple(meta.dtypes or [meta.dtype]))
            if kind not in known:
                tokens = self.tokens_in(one.get_size()) if meta.fmt is self.format else 0
                known[kind] = tokens > 0 and shape_of_object(one) == shape_of(*self.layout(tokens))
            found.append(known[kind])
        return found

    def namespaces(self, keys: Sequence[CacheEngineKey]) -> list["kvbm_cxl.Namespace"]:
        """The namespaces of the chunks with these keys."""
        shape = shape_of(*self.layout())
        with self._lock:
            return [self._namespace(key, shape) for key in keys]

    def _namespace(self, key: CacheEngineKey, shape: Shape) -> "kvbm_cxl.Namespace":
        name = (key.model_name, key.world_size, key.worker_id, key.dtype, key.tags, shape)
        known = self._known.get(name)
        if known is None:
            fields: dict[str, Any] = {"model": key.model_name, "ranks": key.world_size, "rank": key.worker_id, "dtype": key.dtype}
            fields |= {"tags": key.tags, "shape": shape, "tokens": self.metadata.chunk_size, "format": self.format.name}
            # The shapes have heads and their size in one number.
            fields |= {"kv_shape": self.metadata.kv_shape}
            fields |= {"hash": self.config.pre_caching_hash_algorithm, "extra": self.extra, "replica": self.replica}
            known = self._known[name] = namespace_of("lmcache-in-process", **fields)
        return known

    def known_namespaces(self) -> list["kvbm_cxl.Namespace"]:
        """The namespaces that this engine has met."""
        with self._lock:
            return list(self._known.values())


def name_of(key: CacheEngineKey) -> bytes:
    """The key in the pool."""
    return key_of(f"{key.chunk_hash_hex}@{getattr(key, 'layer_id', '')}")
