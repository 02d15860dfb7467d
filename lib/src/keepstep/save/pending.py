"""One image on its way from live tensors into a slot.

The training thread makes it at `save`, and the agent thread copies it. It is *judged* once, when it
is certain whether the tensors stayed unchanged until they were copied. Then it is sealed, or
discarded.

Judging compares version counters, addresses and fingerprints with those at `save`. The training
thread must not be inside an operation at that moment, because an in-place kernel that still runs
has not moved its version counter yet. There are two safe moments:

- The training thread judges the image itself (the fence).
- The training thread was seen to execute Python after the copy was done, so whatever ran when the
  copy ended has returned. This allows an image to be sealed in the middle of the next forward pass,
  and a kill then loses only the step in flight.

Of an image of an accelerator, the fence only begins the judgement: the device compares the
fingerprints when it comes to the fence, and the agent thread reads the result. So the training
thread waits for no device.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.client.slot import Slot
from keepstep.client.wakeups import Gate
from keepstep.image import ControlPage
from keepstep.save import accelerator
from keepstep.state.leaves import TensorLeaf


class Verdict(enum.Enum):
    """The outcome of an image."""

    OPEN = "open"
    VALID = "valid"
    MUTATED = "mutated"
    STAGED = "staged"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Guard:
    """What must be the same before and after a lazy copy."""

    leaves: tuple[TensorLeaf, ...]
    versions: tuple[int, ...]
    pointers: tuple[int, ...]
    fingerprint: Fingerprint
    samples: list[torch.Tensor]

    @classmethod
    def take(cls, leaves: Sequence[TensorLeaf], fingerprint: Fingerprint) -> Guard:
        """Remember the leaves as they are now."""
        return cls(
            tuple(leaves),
            tuple(leaf.tensor._version for leaf in leaves),
            tuple(leaf.tensor.data_ptr() for leaf in leaves),
            fingerprint,
            fingerprint.take(),
        )

    def changed(self) -> str:
        """The name of a tensor that changed, `?` when only a fingerprint did, or ''."""
        return self.moved() or ("?" if any(self.differences()) else "")

    def moved(self) -> str:
        """The name of a tensor whose version or address changed, or ''. Waits for no device."""
        for leaf, version, pointer in zip(self.leaves, self.versions, self.pointers, strict=True):
            if leaf.tensor._version != version or leaf.tensor.data_ptr() != pointer:
                return leaf.name
        return ""

    def differences(self) -> list[Tensor]:
        """Whether the fingerprints differ: a truth value per group, where its samples are."""
        now = self.fingerprint.take()
        return [torch.ne(one, other).any() for one, other in zip(now, self.samples, strict=True)]


@dataclass(eq=False)
class Pending:
    """One image on its way; see the module.

    `control`: the control page that seals it. `transfers`: builds the remaining copies; called on
    the agent thread. `done`: per accelerator, the event after its queued copies. `late`: writes
    into the slot that must wait for these events. `announced`: the slot says how far the copy is,
    for whoever writes it meanwhile. `thread`: the thread that trains. `fenced`: of an image of an
    accelerator, whether everything that changes the tensors waits for its copy.
    """

    slot: Slot
    control: ControlPage
    guard: Guard | None
    transfers: Callable[[], copying.Transfers] | None = None
    late: list[Callable[[], object]] = field(default_factory=list)
    done: dict[torch.device, torch.Event] = field(default_factory=dict)
    announced: bool = False
    thread: int = field(default_factory=threading.get_ident)
    copied: Gate = field(default_factory=Gate)
    fenced: Gate = field(default_factory=Gate)
    judged: Gate = field(default_factory=Gate)
    verdict: Verdict = Verdict.OPEN
    culprit: str = ""
    reason: str = ""
    sealed: bool = False
    counted: bool = False
    copy_s: float = 0.0
    blocked_s: float = 0.0
    _differences: list[tuple[Tensor, torch.Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        """The step's number, in the epoch of `control`."""
        return self.control.step

    @property
    def waits_on_device(self) -> bool:
        """Whether the fence lets an accelerator wait for the copies, and not the host."""
        return bool(self.done) and self.guard is not None

    @property
    def can_be_reported(self) -> bool:
        """Whether the image is sealed, or certain never to be."""
        done = self.copied.is_set() and self.judged.is_set()
        return done and (self.sealed or self.verdict is not Verdict.VALID)

    def copy(self) -> None:
        """Move the bytes (agent thread)."""
        started = time.perf_counter()
        mapping = self.slot.mapping
        if self.transfers is not None:
            # Spread over threads even if all cores are busy: a computation on all cores is as late
            # as its latest thread, so taking one whole core costs twice as much as taking half of
            # two.
            arrived = mapping.arrived if self.announced else None
            copying.run(self.transfers(), threads=copying.default_threads(), arrived=arrived)
        for event in self.done.values():
            accelerator.here().await_event(event)
        for write in self.late:
            write()
        if self.announced:
            mapping.all_arrived()
        self.copy_s += time.perf_counter() - started
        self.copied.set()

    def fence(self) -> None:
        """Let the devices' further work wait for the copies, and compare fingerprints then."""
        guard = self.guard
        if guard is None:  # the agent thread has given the image up
            return
        device = accelerator.here()
        for place, event in self.done.items():
            device.computing(place).wait_event(event)
        self.culprit, self._differences = guard.moved(), []
        if not self.culprit:
            for one in guard.differences():
                on = device.device_of(one)
                if on is not None:
                    self._differences.append(device.told(one, on))
                elif one:
                    self.culprit = "?"
        self.fenced.set()

    def judge(self) -> None:
        """Decide, once, whether the tensors stayed unchanged. See the module for when this is
        sound.
        """
        with self._lock:
            if self.verdict is Verdict.OPEN:
                guard = self.guard
                self.culprit = guard.changed() if guard is not None else ""
                self.verdict = Verdict.MUTATED if self.culprit else Verdict.VALID
        self.judged.set()

    def judge_after_progress(self, give_up: Callable[[], bool]) -> None:
        """Judge as soon as the training thread has been seen to make progress (agent thread)."""
        if self.guard is None:
            self.judge()
            return
        if self.done:
            # a write through `.data` may still be queued on the device: only the fence can tell
            while not self.fenced.wait(1.0) and not give_up():
                pass
            if self.fenced.is_set():
                self._judge_fenced()
            return
        before, pause_s = _position(self.thread), 0.0005
        while not self.judged.wait(pause_s) and not give_up():
            # a thread that has ended has no position
            if not before or _position(self.thread) != before:
                self.judge()
            pause_s = min(pause_s * 1.5, 0.01)

    def _judge_fenced(self) -> None:
        """Wait until the devices have come to the fence, and judge by what they found."""
        for differs, event in self._differences:
            accelerator.here().await_event(event)
            if differs:
                self.culprit = "?"
        with self._lock:
            if self.verdict is Verdict.OPEN:
                self.verdict = Verdict.MUTATED if self.culprit else Verdict.VALID
        self.judged.set()

    def seal(self) -> None:
        """Write the control page: from here on, the image is complete."""
        self.slot.mapping.seal(self.control)
        self.sealed = True

    def why_lost(self) -> str:
        """The reason of the loss as text, for the log and the sidecar's counters."""
        if self.verdict is Verdict.LOST:
            return self.reason or "it could not be copied"
        culprit = self.culprit if self.culprit not in ("", "?") else "a tensor"
        return (
            f"{culprit} changed before it was copied, outside an optimizer step; wrap such code in"
            " `with checkpointer.mutating():`. The next save copies eagerly"
        )

    def finish(self, verdict: Verdict, reason: str = "") -> None:
        """End this image with any verdict, and let go of all tensors."""
        self.verdict, self.reason = verdict, reason or self.reason
        self.guard = None
        self.transfers, self.late, self._differences = None, [], []
        self.judged.set()


def _position(thread: int) -> tuple[tuple[int, int], ...]:
    """Where a thread stands in its Python code; a change proves that it executed something."""
    frame = sys._current_frames().get(thread)
    position: list[tuple[int, int]] = []
    while frame is not None and len(position) < 8:
        position.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(position)


# --- fingerprint -----------------------------------------------------------------------------
#
# Detects that a tensor changed although its version counter did not (`tensor.data.add_(1)`).
#
# Lazy copying is safe only while nothing writes to the tensors. In-place operations move autograd's
# version counter, but writes through `.data` do not. So a few elements of every tensor are compared
# as well: at regular strides from the first, at least 16 per tensor (all of a smaller one) and one
# in every 256 KiB. Any dense update changes them. A sparse write past the counter (through `.data`,
# numpy, another process) between save and fence may go unnoticed; the docs say to wrap such code in
# `checkpointer.mutating()`.


_SAMPLES = 16
_STRIDE_BYTES = 256 << 10
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Sample positions of a set of dense tensors; `take` reads them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Prepare the views; copies nothing. Tensors must be dense and non-overlapping."""
        device_of = accelerator.here().device_of
        groups: dict[tuple[torch.device | None, int], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            size = tensor.element_size()
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            if size not in _BITS:  # complex128: two doubles
                flat = torch.view_as_real(flat).view(-1)
                size = 8
            stride = max(1, min(flat.numel() // _SAMPLES, _STRIDE_BYTES // size))
            groups.setdefault((device_of(tensor), size), []).append(
                flat.view(_BITS[size])[::stride]
            )
        self._groups = list(groups.values())

    def take(self) -> list[Tensor]:
        """The current samples: one small tensor per device and element size."""
        return [torch.cat(group) for group in self._groups]
