# SPDX-License-Identifier: Apache-2.0
"""The engine's configuration as part of its namespace: all of it except fields known to shape no block (`harmless_settings`).

A value that equals the default of its field is left out: the version of vLLM, which is in the namespace as well, implies it. Every other
one is written down in a form that is equal in every process. A value without such a form makes the namespace this engine's own.
"""

import dataclasses
import enum
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from . import harmless_settings
from .log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Fields of a model's configuration that say where it came from, not what it is.
_NOT_THE_MODEL = frozenset(("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"))
# Fields that name a file, which counts by its content.
_FILES = {"MultiModalConfig": ("mm_encoder_fp8_scale_path",)}
# Configurations that shape nothing by being there. That of adapters is for requests with one.
_OPTIONAL = frozenset(("LoRAConfig", "MultiModalConfig"))
_MAX_DEPTH, _MAX_VALUES = 64, 1_000_000
_DIGEST_CHARS = 32


class UnstableValue(ValueError):
    """A value that cannot be written down so that another process of the same configuration writes the same."""


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()[:_DIGEST_CHARS]


def versions() -> str:
    """Versions, down to the patch release, of the packages whose code makes a model and its inputs."""
    import vllm

    return f"vllm {vllm.__version__}, transformers {version('transformers')}"


def engine_settings(vllm_config: "VllmConfig") -> dict[str, str]:
    """What counts of an engine's configuration: for each part of it a text of the fields that are not at their defaults, and a digest of
    vLLM's environment variables."""
    skipped = harmless_settings.of_class(type(vllm_config).__name__)
    parts = {name: value for name, value in vars(vllm_config).items() if name not in skipped}
    found = {f"settings.{name}": text_or_random(f"the engine's {name}", partial(config_text, value)) for name, value in parts.items()}
    return found | {"settings.environment": text_or_random("vLLM's environment variables", _environment)}


def text_or_random(what: str, text: Callable[[], str]) -> str:
    """A text of settings, or where there is none that other processes would write as well, one that no other engine has."""
    try:
        return text()
    except UnstableValue as error:
        logger.warning(
            "CxlConnector: %s cannot be compared with that of other engines (%s): this engine shares blocks with itself alone", what, error
        )
        return f"unknown {secrets.token_hex(16)}"


def config_text(config: Any) -> str:
    """What counts of a configuration object; empty where all of it is at its defaults."""
    if config is None:
        return ""
    text = json.dumps(stable(config), sort_keys=True)
    return "" if text == "{}" else text


def _environment() -> str:
    from vllm import envs

    skipped = harmless_settings.of_environment()
    found = {name: stable(read()) for name, read in envs.environment_variables.items() if name not in skipped}
    return digest(json.dumps(found, sort_keys=True))


def stable(value: Any) -> Any:
    """`value` as nested lists, dictionaries and plain values for JSON, alike in every process. Raises `UnstableValue`."""
    return _Writer().write(value, 0)


class _Writer:
    """Writes one value down."""

    def __init__(self) -> None:
        self._count = 0
        self._open: set[int] = set()
        """Objects that the value being written is within."""

    def write(self, value: Any, depth: int) -> Any:
        self._count += 1
        if value is None or type(value) in (bool, int, str):
            return value
        if depth > _MAX_DEPTH or self._count > _MAX_VALUES or id(value) in self._open:
            raise UnstableValue(f"{type(value).__name__} is nested without end")
        self._open.add(id(value))
        try:
            return self._object(value, depth + 1)
        finally:
            self._open.discard(id(value))

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return {_name(type(value)): value.name}
        if isinstance(value, float):
            return {"float": float.__repr__(value)}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": bytes(value).hex()}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, Mapping):
            return {"map": self._sort([self.write(key, depth), self.write(each, depth)] for key, each in value.items())}
        if isinstance(value, (set, frozenset)):
            return {"set": self._sort(self.write(each, depth) for each in value)}
        if isinstance(value, (list, tuple)):
            return [self.write(each, depth) for each in value]
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return {"name": _name(value)}
        if isinstance(value, partial):
            return {"partial": [self.write(each, depth) for each in (value.func, value.args, value.keywords)]}
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("vllm."):
            return self._config(value, depth)
        return self._instance(value, depth)

    @staticmethod
    def _sort(items: Any) -> list[Any]:
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))

    def _config(self, config: Any, depth: int) -> dict[str, Any]:
        """The fields of one of vLLM's configurations that count and differ from their defaults."""
        kind = type(config)
        skipped, files = harmless_settings.of_class(kind.__name__), _FILES.get(kind.__name__, ())
        found = {} if kind.__name__ in _OPTIONAL else {"class": _name(kind)}
        for each in dataclasses.fields(config):
            if each.name in skipped:
                continue
            value = getattr(config, each.name, None)
            text = {"file": _content(value)} if each.name in files and value is not None else self.write(value, depth)
            if json.dumps(text, sort_keys=True) != _default(kind, each.name):
                found[each.name] = text
        return found

    def _instance(self, value: Any, depth: int) -> Any:
        import torch

        kind = _name(type(value))
        if isinstance(value, (torch.dtype, torch.device)):
            return {kind: str(value)}
        if isinstance(value, torch.Tensor):
            whole = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return {kind: [str(value.dtype), list(value.shape), hashlib.sha256(whole.numpy()).hexdigest()]}
        # A model's configuration, as it would be saved.
        if callable(save := getattr(value, "to_dict", None)):
            return {kind: self.write(_without_origin(save()), depth)}
        if callable(own_hash := getattr(value, "compute_hash", None)):
            return {kind: str(own_hash())}
        attributes = getattr(value, "__dict__", None)
        # A class of the interpreter's or of an extension may hold more than its attributes say.
        is_plain = all("__module__" in vars(each) for each in type(value).__mro__[:-1])
        if attributes is None or not is_plain or callable(value) or type(value).__module__ in ("threading", "weakref"):
            raise UnstableValue(f"{kind} has no text")
        return {kind: self.write(attributes, depth)}


def _name(value: Any) -> str:
    """The name by which a class or a function can be imported."""
    name = f"{value.__module__}.{value.__qualname__}"
    if "<" in name:  # Made by a function: what it does depends on what that had.
        raise UnstableValue(f"{name} has no name of its own")
    return name


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_origin(each) for key, each in value.items() if key not in _NOT_THE_MODEL}
    if isinstance(value, (list, tuple)):
        return [_without_origin(each) for each in value]
    return value


def _content(path: Any) -> str:
    try:
        return digest(Path(path).read_bytes())
    except OSError as error:
        raise UnstableValue(f"{path} cannot be read: {error}") from error


@lru_cache(maxsize=None)
def _default(kind: type, name: str) -> str | None:
    """The default of a field, written down; None where it has none."""
    from pydantic.fields import FieldInfo

    (field,) = (each for each in dataclasses.fields(kind) if each.name == name)
    # Pydantic's have theirs in an object of its own.
    origin = field.default if isinstance(field.default, FieldInfo) else field
    make = origin.default_factory
    try:
        return json.dumps(stable(origin.default if make in (None, dataclasses.MISSING) else make()), sort_keys=True)
    except Exception:  # A required field, or a factory that needs more than there is: the value counts, whatever it is.
        return None
