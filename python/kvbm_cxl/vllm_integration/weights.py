# SPDX-License-Identifier: Apache-2.0
"""Whether the weights in memory are still those that the engine started with.

vLLM replaces weights in place: `reload_weights`, the weight-transfer API of RL loops, sleep level 2 with a reload, methods of a worker
extension. It tells a connector of none of them, and its default reset of the prefix cache does not reach the connector. So the scheduler's
side watches (`engine_watch`) for anything that may have changed weights, and has every worker take a fingerprint of its weights at the
start of the next step, before anything of the pool is looked up or published. Equal fingerprints: the pool goes on as before. Another
one becomes part of every key. None to be had: this engine's keys become random, so that it shares no block.

The fingerprint samples every tensor of the model: a bounded number of bytes, spread evenly. Training steps change numbers all over every
tensor, also where they change only one in ten thousand.
"""

import hashlib
import inspect
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .log import logger
from .stats import Tally

if TYPE_CHECKING:
    import torch

# Sampled in all, and the length of one sample. A model of more tensors than fit has one sample of each.
_BUDGET_BYTES, _SAMPLE_BYTES = 16 << 20, 4096
# Workers answer in the next step. Where no answer arrives, the engine shares nothing until one does, instead of holding up requests.
_PATIENCE_S = 30.0
UNKNOWN = b""
"""Fingerprint of weights that cannot be looked at."""


def fingerprint(model: "torch.nn.Module") -> bytes:
    """A digest (16 bytes) of samples of all parameters and persistent buffers. Raises `RuntimeError` and others for tensors without
    memory."""
    tensors = sorted(model.state_dict(keep_vars=True).items())
    share = _BUDGET_BYTES // max(len(tensors), 1)
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name}\0{tuple(tensor.shape)}{tensor.dtype}\0".encode())
        total.update(_sampled(tensor, share))
    return total.digest()[:16]


def _sampled(tensor: "torch.Tensor", share: int) -> bytes:
    import torch

    tensor = tensor.detach()
    if tensor.numel() == 0:
        return b""
    # Its bytes as they lie in memory, whatever its strides and its type.
    item_bytes = tensor.element_size()
    start = tensor.storage_offset() * item_bytes
    span = (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))) * item_bytes
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[start : start + span]
    count = max(share // _SAMPLE_BYTES, 1)
    if span > count * _SAMPLE_BYTES:
        last = span - _SAMPLE_BYTES
        places = [last * index // max(count - 1, 1) for index in range(count)]
        memory = torch.cat([memory[place : place + _SAMPLE_BYTES] for place in places])
    return memory.cpu().numpy().tobytes()


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

    def look(self) -> bytes:
        """The fingerprint now, `UNKNOWN` where it cannot be taken."""
        started_s = time.perf_counter()
        try:
            self.latest = UNKNOWN if self.worker is None else fingerprint(self.worker.get_model())
        except Exception as error:  # Whatever a model is made of: without a fingerprint nothing is shared after a change.
            logger.warning("CxlConnector: no fingerprint of the weights in memory: %s: %s", type(error).__name__, error)
            self.latest = UNKNOWN
        self.tally.time("fingerprint_seconds", time.perf_counter() - started_s)
        return self.latest

    def answer(self, inquiry: int) -> bool:
        """Takes a new fingerprint for an inquiry that is new. True: it is another one than before, or there is none."""
        if inquiry <= self._answered:
            return False
        self._answered, before = inquiry, self.latest
        return self.look() != before or self.latest == UNKNOWN

    def answered(self, inquiry: int) -> bool:
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
        self._ranks, self._start = len(all_ranks), combined(all_ranks)

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
        return self._conclude(combined([self._answers[rank] for rank in sorted(self._answers)]))

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


def combined(fingerprints: list[bytes]) -> bytes:
    """One fingerprint of those of all ranks."""
    if not fingerprints or UNKNOWN in fingerprints:
        return UNKNOWN
    return hashlib.sha256(b"".join(fingerprints)).digest()[:16]
