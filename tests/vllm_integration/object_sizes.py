# SPDX-License-Identifier: Apache-2.0
"""Sizes of all containers that objects of the package hold, however deep."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

_PACKAGE = "kvbm_cxl"
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def sizes(*roots: Any) -> dict[str, int]:
    """By path from a root, or from a module of the package that is loaded: entries of each container. Those of objects within one
    container count together, so that an object for each request shows as well."""
    found: dict[str, int] = {}
    known: set[int] = set()
    modules = [(name, vars(module)) for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == _PACKAGE]
    waiting: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    waiting += [(f"{name}.{key}", value) for name, names in modules for key, value in names.items() if isinstance(value, _CONTAINERS)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, _CONTAINERS):
            found[path] = found.get(path, 0) + len(value)
        waiting += _parts(path, value)
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[]", part) for pair in list(value.items()) for part in pair)
    elif isinstance(value, _CONTAINERS):
        yield from ((f"{path}[]", part) for part in list(value))
    elif type(value).__module__.partition(".")[0] == _PACKAGE and not isinstance(value, type):
        yield from ((f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def grown(before: dict[str, int], after: dict[str, int], spare: int) -> dict[str, tuple[int, int]]:
    """Containers that have more entries by more than `spare`."""
    return {path: (before.get(path, 0), size) for path, size in after.items() if size - before.get(path, 0) > spare}
