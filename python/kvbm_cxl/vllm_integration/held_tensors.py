# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a model's modules hold, however they hold it.

Parameters and buffers are not all: vLLM packs weights into attributes of layers, into objects, lists and closures of functions. So this
walks everything that a module refers to, except objects known to hold no weights. An opaque object that may be a weight ends the
walk with `OpaqueWeight`: then nothing is known of the model.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DIGEST_ATTRIBUTE = "kvbm_cxl_digest"
"""On an object that Python cannot look into: a digest of the weight that it was made of (`weights.watch_packing`)."""

# Packages whose objects hold no weights, or hold those of other modules: configurations, processes and their groups, compiled code,
# adapters (which are known by content, see `adapters`).
_WITHOUT_WEIGHTS = (
    *("vllm.compilation", "vllm.config", "vllm.distributed", "vllm.forward_context", "vllm.logger", "vllm.lora", "vllm.platforms"),
    *("vllm.utils", "vllm.v1.worker", "vllm.model_executor.model_loader", "transformers", "pydantic"),
    *("torch._", "torch.cuda", "torch.distributed", "torch.fx", "torch.library", "torch.utils"),
    *("threading", "_thread", "logging", "weakref", "enum", "re", "pathlib", "inspect", "typing", "asyncio", "concurrent"),
)
# By class, attributes that computing fills.
_FILLED = {"kv_cache": "AttentionLayerBase"}
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType, range, slice)
# As beginnings of a module's name with a point after it.
_PACKAGES = tuple(name if name.endswith("_") else f"{name}." for name in _WITHOUT_WEIGHTS)
_MAX_OBJECTS, _MAX_DEPTH = 5_000_000, 160


class OpaqueWeight(RuntimeError):
    """Something that may hold a weight and cannot be looked into."""


class Walk:
    """One walk over a model."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        """By id, with the objects themselves, so that no id is used again meanwhile."""

    def tensors(self, model: "torch.nn.Module") -> Iterator[tuple[str, "torch.Tensor | bytes"]]:
        """Tensors, and digests of opaque objects, each once, by its path. The order and the names are alike in every process."""
        yield from self._module(model, "", 0)

    def _module(self, module: "torch.nn.Module", path: str, depth: int) -> Iterator[tuple[str, "torch.Tensor | bytes"]]:
        found = False
        for name, value in vars(module).items():
            if name in _FILLED and _is_a(module, _FILLED[name]):
                continue
            for way, tensor in self._value(value, f"{path}.{name}", depth + 1):
                found |= isinstance(tensor, bytes) or tensor.numel() > 0
                yield way, tensor
        if not found and _weights_were_removed(module):
            what = f"{path or 'the model'} ({type(module).__name__})"
            raise OpaqueWeight(f"{what} has removed its weight and keeps it where Python cannot read it")

    def _value(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, "torch.Tensor | bytes"]]:
        import torch

        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        if len(self._seen) >= _MAX_OBJECTS or depth > _MAX_DEPTH:
            raise OpaqueWeight(f"{path} is nested without end")
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield path, value
            # Weights carry loaders and scales as attributes.
            yield from self._items(getattr(value, "__dict__", {}), path, depth)
        elif isinstance(value, torch.nn.Module):
            if not _is_without_weights(type(value)) or hasattr(value, "base_layer"):
                yield from self._module(_base_of(value), path, depth)
        elif isinstance(value, Mapping):
            yield from self._items(value, path, depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from self._items(dict(enumerate(value)), path, depth)
        else:
            yield from self._object(value, path, depth)

    def _items(self, items: Mapping[Any, Any], path: str, depth: int) -> Iterator[tuple[str, "torch.Tensor | bytes"]]:
        for key, value in list(items.items()):
            yield from self._value(value, f"{path}.{key}", depth + 1)

    def _object(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, "torch.Tensor | bytes"]]:
        if isinstance(value, FunctionType):
            held = {name: cell for name, cell in zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()))}
            held |= {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        elif isinstance(value, MethodType):
            held = {"self": value.__self__, "function": value.__func__}
        elif isinstance(value, partial):
            held = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
        else:
            held = _attributes(value)
        if not _is_without_weights(value if isinstance(value, FunctionType) else type(value)):
            if isinstance(digest := held.get(DIGEST_ATTRIBUTE), bytes):
                yield path, digest
            elif _is_opaque(value):
                raise OpaqueWeight(f"{path} ({type(value).__module__}.{type(value).__qualname__}) cannot be looked into")
            else:
                yield from self._items(held, path, depth)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not filled yet.
        return None


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = {name: getattr(value, name, None) for name in slots if name not in ("__dict__", "__weakref__")}
    return held | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_without_weights(kind: Any) -> bool:
    """Whether a class or function is of a package whose objects hold no weights."""
    return f"{kind.__module__}.".startswith(_PACKAGES)


def _base_of(module: "torch.nn.Module") -> "torch.nn.Module":
    """The layer that adapters are put upon: what they add is theirs."""
    return module.base_layer if _is_without_weights(type(module)) and hasattr(module, "base_layer") else module


def _is_a(module: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _is_opaque(value: Any) -> bool:
    """Whether an object is a handle of something that Python does not see: it may be a packed weight."""
    kind = type(value)
    return kind.__name__ in ("PyCapsule", "ScriptObject", "CPUDNNLGEMMHandler") or kind.__module__.startswith("ctypes")


def _weights_were_removed(module: "torch.nn.Module") -> bool:
    """Whether a module has a parameter of a weight's name, and no numbers in it."""
    weights = [tensor for name, tensor in module._parameters.items() if tensor is not None and "weight" in name]
    return bool(weights) and all(tensor.numel() == 0 for tensor in weights)
