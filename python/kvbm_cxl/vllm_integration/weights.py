# SPDX-License-Identifier: Apache-2.0
"""Whether the weights in memory are still those that the engine started with.

vLLM replaces weights in place: `reload_weights`, the weight-transfer API of RL loops, sleep level 2 with a reload, methods of a worker
extension. It tells a connector of none of them, and its default reset of the prefix cache does not reach the connector. So the scheduler's
side watches (`engine_watch`) for anything that may have changed weights, and has every worker take a fingerprint of its weights at the
start of the next step, before anything of the pool is looked up or published. Equal fingerprints: sharing continues as before. Another
one becomes part of every key. No fingerprint: this engine's keys become random, so that it shares no block.

The fingerprint has every byte of every tensor that the model holds, packed or plain (`held_tensors`). On a GPU its kernels sum up the
bytes, so that only sums come to the host. A weight that cannot be read means that there is no fingerprint.
"""

import hashlib
import inspect
import os
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from .held_tensors import DIGEST_ATTRIBUTE, OpaqueWeight, Walk
from .log import logger
from .stats import Tally

if TYPE_CHECKING:
    import torch

# Workers answer in the next step. Where no answer arrives, the engine shares nothing until one does, instead of holding up requests.
_PATIENCE_S = 30.0
_MAX_THREADS = 16
# Words that a GPU sums up at a time, in 8 bytes each: memory in addition to weights and KV cache. Odd numbers without a pattern.
_PIECE_WORDS = 4 << 20
_SPREAD, _STEP = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D
UNKNOWN = b""
"""Fingerprint of weights that cannot be looked at."""


def fingerprint(model: "torch.nn.Module", without: Iterable[str] = ()) -> bytes:
    """A digest (16 bytes) of all tensors that a model holds, but for those named in `without`. Raises `RuntimeError` and others where one
    cannot be read."""
    return _whole(digests(model), without)


def _whole(found: Mapping[str, bytes], without: Iterable[str]) -> bytes:
    left_out, total = frozenset(without), hashlib.sha256()
    for name in sorted(found.keys() - left_out):
        total.update(name.encode() + b"\0" + found[name])
    return total.digest()[:16]


def unnamed_tensors(model: "torch.nn.Module") -> set[str]:
    """Where a model holds tensors that are not in its state: packed weights, and other tensors."""
    named = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return {path for path, tensor in Walk().tensors(model) if id(tensor) not in named}


def digests(model: "torch.nn.Module", only: Container[str] | None = None) -> dict[str, bytes]:
    """A digest of each tensor that a model holds, by where it is held. `only`: of these."""
    held = {path: tensor for path, tensor in Walk().tensors(model) if only is None or path in only}
    found = {path: tensor for path, tensor in held.items() if isinstance(tensor, bytes)}
    hosts = [path for path, tensor in held.items() if path not in found and tensor.device.type == "cpu"]
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS), "kvbm-cxl-weights") as pool:
        found.update(zip(hosts, pool.map(lambda path: tensor_digest(held[path]), hosts)))
    sums = {path: _sums(held[path]) for path in held.keys() - found.keys()}
    return found | {path: tensor_digest(held[path], by_sums) for path, by_sums in _on_host(sums).items()}


def tensor_digest(tensor: "torch.Tensor", by_sums: bytes | None = None) -> bytes:
    """A digest of a tensor's type, shape, and bytes; `by_sums` stands for the bytes."""
    total = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}\0".encode())
    total.update(_memory(tensor).numpy() if by_sums is None else by_sums)
    return total.digest()


def _memory(tensor: "torch.Tensor") -> "torch.Tensor":
    """The bytes of a tensor as they lie in memory, whatever its strides and its type. Raises `OpaqueWeight` for one without memory."""
    import torch

    tensor = tensor.detach()
    # What a tensor of a class of its own is made of are its attributes, which are held as well.
    if tensor.numel() == 0 or hasattr(tensor, "__tensor_flatten__"):
        return torch.empty(0, dtype=torch.uint8)
    item_bytes, storage = tensor.element_size(), tensor.untyped_storage()
    start = tensor.storage_offset() * item_bytes
    stop = start + (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))) * item_bytes
    if tensor.is_meta or storage.nbytes() < stop or not storage.data_ptr():
        raise OpaqueWeight(f"a tensor of shape {tuple(tensor.shape)} has no memory")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)[start:stop]


def _sums(tensor: "torch.Tensor") -> "torch.Tensor":
    """Two sums of a tensor's bytes modulo 2^64, computed where it lies: one of its words, in which any change of one word shows, and one of
    words multiplied by odd numbers that depend on their places."""
    import torch

    memory = _memory(tensor)
    # Words begin where words can; the sums are then those of equal bytes anywhere.
    memory = memory.clone() if memory.storage_offset() % 4 else memory
    total = torch.zeros(2, dtype=torch.int64, device=memory.device)
    words = memory.numel() // 4 * 4
    for part in (memory[:words].view(torch.int32), memory[words:]):
        for piece in part.split(_PIECE_WORDS):
            factors = torch.arange(1, piece.numel() + 1, dtype=torch.int64, device=memory.device).mul_(_SPREAD).bitwise_or_(1)
            wide = piece.to(torch.int64)
            total = total * _STEP + torch.stack((wide.sum(), wide.mul(factors).sum()))
    return total


def _on_host(sums: Mapping[str, "torch.Tensor"]) -> dict[str, bytes]:
    """All sums of a device, by one copy."""
    import torch

    if not sums:
        return {}
    first = next(iter(sums.values())).device
    rows = torch.stack([each.to(first) for each in sums.values()]).cpu().numpy()
    return {path: row.tobytes() for path, row in zip(sums, rows)}


def watch_packing() -> None:
    """From now on each weight that vLLM's CPU build packs into memory of oneDNN, which cannot be read back, leaves its digest."""
    from vllm import _custom_ops

    for name in ("create_onednn_mm", "create_onednn_scaled_mm"):
        pack = getattr(_custom_ops, name, None)
        if pack is not None and not hasattr(pack, DIGEST_ATTRIBUTE):
            setattr(_custom_ops, name, _leaving_digest(pack))


def _leaving_digest(pack: Any) -> Any:
    @wraps(pack)
    def pack_and_digest(*arguments: Any, **named: Any) -> Any:
        handler, total = pack(*arguments, **named), hashlib.sha256()
        for each in (*arguments, *(value for _, value in sorted(named.items()))):
            total.update(tensor_digest(each) if hasattr(each, "untyped_storage") else repr(each).encode())
        setattr(handler, DIGEST_ATTRIBUTE, total.digest())
        return handler

    setattr(pack_and_digest, DIGEST_ATTRIBUTE, True)
    return pack_and_digest


def worker_of_this_call() -> Any | None:
    """vLLM's worker in whose call this one is: it has the model and the adapters, and hands no connector a way to them. None elsewhere."""
    from vllm.v1.worker.worker_base import WorkerBase

    return caller_of(WorkerBase)


def caller_of(kind: type) -> Any | None:
    """The nearest object of class `kind` among the callers that are methods."""
    frame = inspect.currentframe()
    try:
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, kind):
                return caller
            frame = frame.f_back
    finally:
        del frame
    return None


@dataclass
class WeightsInMemory:
    """A worker's side: answers inquiries."""

    worker: Any | None
    """vLLM's worker; None where it was not found."""
    tally: Tally
    latest: bytes = UNKNOWN
    _answered: int = 0
    _unnamed: dict[str, bytes] | None = None
    """Digests of tensors that are not in the model's state, from before vLLM computed anything with it."""
    _filled: set[str] = field(default_factory=set)
    """Those of them that computing fills: they are no weights."""

    def before_warm_up(self) -> None:
        """The model is loaded, and vLLM is about to compute with it for the first time."""
        if self.worker is not None:
            self._unnamed = self._read(lambda model: digests(model, unnamed_tensors(model)))

    def look(self) -> bytes:
        """The fingerprint now, `UNKNOWN` where it cannot be taken. The first one comes after warming up, and before any request."""
        started_s = time.perf_counter()
        found = self._read(digests) if self.worker is not None else None
        if found and self._unnamed is not None:
            before, now = self._unnamed, self._read(unnamed_tensors) or ()
            self._filled = {path for path in now if before.get(path) != found.get(path)}
        self._unnamed = None
        self.latest = UNKNOWN if found is None else _whole(found, self._filled)
        self.tally.time("fingerprint_seconds", time.perf_counter() - started_s)
        return self.latest

    def _read(self, take: "Callable[[torch.nn.Module], Any]") -> Any | None:
        try:
            return take(self.worker.get_model())
        except Exception as error:  # Whatever a model is made of: without a fingerprint nothing is shared after a change.
            logger.warning("CxlConnector: no fingerprint of the weights in memory: %s: %s", type(error).__name__, error)
            return None

    def answer(self, inquiry: int) -> bool:
        """Takes a new fingerprint for an inquiry that is new. True: it is another one than before, or there is none."""
        if inquiry <= self._answered:
            return False
        self._answered, before = inquiry, self.latest
        return self.look() != before or self.latest == UNKNOWN

    def has_answered(self, inquiry: int) -> bool:
        return 0 < inquiry <= self._answered


@dataclass
class Era:
    """The scheduler's side: what the fingerprints of all workers make of this engine's keys."""

    tally: Tally
    name: bytes = b""
    """Part of every key; empty with the weights of the start."""
    _start: bytes = UNKNOWN
    _ranks: int = 0
    _inquiry: int = 0
    _pending: bool = False
    _given_up: bool = False
    _asked_s: float = 0.0
    _why: str = ""
    _answers: dict[int, bytes] = field(default_factory=dict)
    _computed: bool = False
    """vLLM's own prefix cache may hold blocks."""
    _may_mix: bool = False
    _mixed: bool = False
    is_isolated: bool = False
    """The engine shares no block with others until it is started again."""

    def handshake(self, fingerprints: Iterable[bytes]) -> None:
        """The fingerprints of all workers at start, in the order of their ranks."""
        all_ranks = list(fingerprints)
        self._ranks, self._start = len(all_ranks), combine(all_ranks)

    @property
    def is_known(self) -> bool:
        """Whether it is certain which weights the engine has. Until then nothing is looked up or published."""
        if self._pending and self._asked_s and time.monotonic() - self._asked_s > _PATIENCE_S:
            self._conclude(UNKNOWN)
            self._given_up = True
        return not self._pending

    @property
    def publishes(self) -> bool:
        """False while vLLM's own prefix cache may hold blocks of other weights, which new blocks would build upon."""
        return self.is_known and not self._mixed

    def suspect(self, why: str) -> None:
        """Weights may have changed. `why`: what hints at it, for the log."""
        if not self._ranks:
            return  # Nothing is shared before the workers are known.
        self._inquiry += 1
        self._pending, self._given_up, self._asked_s, self._why = True, False, 0.0, why
        self._answers.clear()
        self._may_mix |= self._computed

    def local_reset(self) -> None:
        """vLLM emptied its own prefix cache."""
        self._computed = self._may_mix = self._mixed = False

    def step(self, computes: bool) -> int:
        """A step was scheduled. Returns the inquiry that the workers are to answer, 0 for none."""
        self._computed |= computes
        if not self._pending:
            return 0
        self._asked_s = self._asked_s or time.monotonic()
        return self._inquiry

    def answers(self, inquiry: int, by_rank: Mapping[int, bytes]) -> bool:
        """Fingerprints of workers. True: the weights are others than before, so that no block of before may be published."""
        is_late = inquiry == self._inquiry and self._given_up
        if inquiry != self._inquiry or not (self._pending or is_late):
            return False
        self._answers.update(by_rank)
        if len(self._answers) < self._ranks:
            return False
        return self._conclude(combine([self._answers[rank] for rank in sorted(self._answers)]))

    def isolate(self) -> bool:
        """The pool's blocks are not those of this engine: its keys become random, and stay so. True: they were not before."""
        if self.is_isolated:
            return False
        self.is_isolated, self._start, self.name = True, UNKNOWN, secrets.token_bytes(16)
        self._mixed |= self._computed
        self.tally.gauge("isolated", 1)
        return True

    def _conclude(self, now: bytes) -> bool:
        before, self._pending, self._given_up = self.name, False, False
        if now == UNKNOWN or self._start == UNKNOWN:
            self.name = secrets.token_bytes(16)
            self.tally.count("weights", "unknown")
            logger.warning(
                "CxlConnector: after %s it is unknown which weights this engine has (no fingerprint of them in memory): it shares no "
                "blocks with other engines, and finds none of its own from before",
                self._why,
            )
        else:
            self.name = b"" if now == self._start else now
            self.tally.count("weights", "unchanged" if self.name == before else "changed")
        changed = self.name != before
        if changed:
            self._mixed |= self._may_mix
            logger.warning(
                "CxlConnector: the weights have changed (noticed after %s): blocks of the earlier ones are not found any more%s",
                self._why,
                "; nothing is published until vLLM's own prefix cache is reset (reset_prefix_cache)" if self._mixed else "",
            )
        self._may_mix = False
        return changed


def combine(fingerprints: list[bytes]) -> bytes:
    """One fingerprint of those of all ranks."""
    if not fingerprints or UNKNOWN in fingerprints:
        return UNKNOWN
    return hashlib.sha256(b"".join(fingerprints)).digest()[:16]
