# SPDX-License-Identifier: Apache-2.0
"""Namespaces of LMCache's objects.

LMCache's keys name the model, the rank, the object group and the tenant, not what an object looks like. Two servers of one model with
another chunk size or data type would find each other's objects, so the shapes and types of an object are part of its namespace. A lookup
gets them; a load and a store see them in the object.

Objects that a serializer made are flat buffers, whose shape a lookup does not know: it looks for them under the name of such buffers,
until a store or a load has shown which of the two this server has.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import kvbm_cxl

from ..consumers.names import namespace_of

Shape = tuple[tuple[tuple[int, ...], str], ...]
FLAT: Shape = (((-1,), "bytes"),)
"""Stands for the shape of any flat buffer, whose length depends on its content."""


def shape_of(shapes: Iterable[Iterable[int]], dtypes: Iterable[Any]) -> Shape:
    """Shapes and types as LMCache has them; `FLAT` for a buffer of bytes."""
    shape = tuple((tuple(int(size) for size in one), str(dtype)) for one, dtype in zip(shapes, dtypes, strict=True))
    return FLAT if len(shape) == 1 and len(shape[0][0]) == 1 and shape[0][1] == "torch.uint8" else shape


def shape_of_object(memory_object: Any) -> Shape:
    """That of a memory object."""
    meta = memory_object.meta
    return shape_of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])


def memory_of(memory_object: Any) -> memoryview:
    """The bytes of a memory object that count, where they lie."""
    return memoryview(memory_object.byte_array).cast("B")[: memory_object.get_size()]


@dataclass
class _Seen:
    stored: dict[Shape, None] = field(default_factory=dict)
    """Shapes of the objects that this server stored or loaded."""
    told: dict[Shape, None] = field(default_factory=dict)
    """Shapes given to lookups."""


@dataclass
class Namespaces:
    """Namespaces by what LMCache's keys name, and by shape. May be called from any thread."""

    extra: str
    _known: dict[tuple, "kvbm_cxl.Namespace"] = field(default_factory=dict)
    _seen: dict[tuple, _Seen] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, key: Any, shape: Shape) -> "kvbm_cxl.Namespace":
        """The namespace of an object that is stored or loaded."""
        with self._lock:
            self._seen_of(key).stored[shape] = None
            return self._namespace(key, shape)

    def to_look_in(self, key: Any, shape: Shape) -> list["kvbm_cxl.Namespace"]:
        """The namespaces that may hold an object of the shape given to a lookup. Without one: all that this server has met."""
        with self._lock:
            seen = self._seen_of(key)
            if not shape:
                shapes = {**seen.stored, **seen.told, FLAT: None}
            else:
                seen.told[shape] = None
                # Either all objects are flat buffers, or none is.
                shapes = ([FLAT] if FLAT in seen.stored else [shape]) if seen.stored else [shape, FLAT]
            return [self._namespace(key, one) for one in shapes]

    def _seen_of(self, key: Any) -> _Seen:
        return self._seen.setdefault((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), _Seen())

    def _namespace(self, key: Any, shape: Shape) -> "kvbm_cxl.Namespace":
        name = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, shape)
        known = self._known.get(name)
        if known is None:
            fields = {"model": key.model_name, "kv_rank": key.kv_rank, "group": key.object_group_id, "salt": key.cache_salt}
            known = self._known[name] = namespace_of("lmcache", **fields, shape=shape, extra=self.extra)
        return known
