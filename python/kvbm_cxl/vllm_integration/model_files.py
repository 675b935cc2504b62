# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has on disk: a digest of all bytes of their files.

Reading begins when a worker starts (`begin`), during vLLM's own loading; making the namespace waits for it. Files that change
in between could be others than those in memory: the model is unknown then.
"""

import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import ConfigError
from .file_digests import FileDigests, State, state_of
from .log import logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Left there by training; no loader of vLLM's reads them.
_NOT_WEIGHTS = frozenset(("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "rng_state.pt"))
_NOTICE_S = 30.0


def files_of(place: Path) -> list[Path]:
    """The files of weights that vLLM may load from a folder, or the one file that a model is."""
    if place.is_file():
        return [place]
    found = {path for pattern in _PATTERNS for path in place.glob(pattern) if path.is_file() and path.name not in _NOT_WEIGHTS}
    return sorted(found)


def place_of(model: "ModelConfig") -> Path | None:
    """Where a model's files are: its folder or file, or the snapshot of the Hugging Face cache that vLLM loads."""
    place = Path(model.model)
    if place.exists():
        return place
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except (ImportError, ValueError):  # No hub, or not a name of one.
        return None
    # .../snapshots/COMMIT/config.json
    return Path(found).parent if isinstance(found, str) else None


@dataclass
class _Reading:
    """The digest of a model's files, by a thread of its own."""

    place: Path
    states: dict[str, State]
    _found: str = ""
    _error: Exception | None = None
    _thread: threading.Thread | None = None

    @classmethod
    def begin(cls, place: Path) -> "_Reading":
        files = files_of(place)
        reading = cls(place, {path.name: state_of(path) for path in files})
        reading._thread = threading.Thread(target=reading._run, args=(files,), name="kvbm-cxl-digests", daemon=True)
        reading._thread.start()
        return reading

    def _run(self, files: list[Path]) -> None:
        try:
            started_s = time.monotonic()
            self._found = _digests.of_names_and_contents(files).hex()
            logger.info("digest of %d files of weights in %s: %.1f s", len(files), self.place, time.monotonic() - started_s)
        except Exception as error:  # Raised where the digest is asked for.
            self._error = error

    def wait(self) -> str:
        """The digest. Raises what kept it from being taken."""
        while self._thread and self._thread.is_alive():
            self._thread.join(_NOTICE_S)
            if self._thread.is_alive():
                len_bytes = sum(state[2] for state in self.states.values())
                logger.info("waiting for the digest of the weights in %s: %d bytes", self.place, len_bytes)
        if self._error:
            raise self._error
        return self._found

    def is_current(self) -> bool:
        """Whether the files are those that were there when reading began."""
        try:
            return {path.name: state_of(path) for path in files_of(self.place)} == self.states
        except OSError:
            return False


_digests = FileDigests()
_lock = threading.Lock()
_readings: dict[Path, _Reading] = {}


def begin(vllm_config: "VllmConfig") -> None:
    """Begins to read the files of an engine's models, before vLLM loads them."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model in filter(None, (vllm_config.model_config, draft)):
        place = place_of(model)
        if place is not None and files_of(place):
            with _lock:
                _readings[place] = _Reading.begin(place)


def weights_digest(place: Path) -> str:
    """A digest over names and contents of all files of weights of a model. One that no other model has, with a warning, where it cannot be
    known which of them were loaded."""
    if not files_of(place):
        raise ConfigError(
            f"CxlConnector finds no weights ({', '.join(_PATTERNS)}) in {place}: "
            'name the model with kv_connector_extra_config {"model_id": "..."}'
        )
    with _lock:
        reading = _readings.get(place)
        if reading is None:
            reading = _readings[place] = _Reading.begin(place)
    try:
        found = reading.wait()
    except OSError as error:
        return _unknown(place, error)
    return found if reading.is_current() else _unknown(place, "files changed since this engine began to load them")


def _unknown(place: Path, why: Any) -> str:
    logger.warning(
        "CxlConnector cannot tell which weights of %s are loaded (%s): this engine shares blocks with itself alone until it starts again",
        place,
        why,
    )
    return f"unknown {secrets.token_hex(16)}"
