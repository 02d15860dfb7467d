"""From a taken state to an image in a slot: what is copied now, what is copied later, and how later
copies are guarded.

Before `SnapshotMaker.begin` returns, it copies what the forward pass or Python may change: buffers,
tensors in plain dicts, values, random states. If `lazy`, it leaves parameters and optimizer state,
which only an optimizer step changes, to the save thread. The image (`PendingImage`) is *judged*
once, when it is certain whether the tensors stayed unchanged until they were copied. Then it is
sealed, or discarded.

Judging compares version counters, addresses and fingerprints with those at `save`, and the bytes of
the image with the fingerprint of `save`. The training thread must not be inside an operation at
that moment, because an in-place kernel that still runs has not moved its version counter yet. There
are two safe moments:

- The training thread judges the image itself (the fence).
- The training thread was seen to execute Python after the copy was done, so whatever ran when the
  copy ended has returned. This allows an image to be sealed in the middle of the next forward pass,
  and a kill then loses only the step in flight.

Of an image of an accelerator, the fence waits for the copies, and then only begins the judgement:
the device compares the fingerprints when it comes to the fence, and the save thread reads the
result. So the training thread does not wait until the device has come there.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keepstep import processes
from keepstep.client import copying
from keepstep.client.session import OneTimeEvent
from keepstep.client.slot import GrantedSlot, SlotMapping
from keepstep.image import ControlPage, Layout
from keepstep.save.frozen_parameters import BaseFilling, FrozenBase
from keepstep.save.mutation_guard import (
    SAMPLES,
    CopyLot,
    Fingerprint,
    MutationGuard,
    WatchedTensors,
    can_detect_changes,
    view_complex_as_doubles,
)
from keepstep.state import accelerator
from keepstep.state.taken_state import TakenState, TensorLeaf
from keepstep.steps import Epoch

_SAME, _DIFFERS = 1, 2
"""What a device tells of a comparison; 0 is nothing yet."""


class ImageOutcome(enum.Enum):
    """The outcome of an image."""

    OPEN = "open"
    VALID = "valid"
    MUTATED = "mutated"
    STAGED = "staged"
    LOST = "lost"


@dataclass(eq=False)
class PendingImage:
    """One image on its way; see the module.

    `control`: the control page that seals it. `transfers`: builds the remaining copies; called on
    the save thread. `done`: per accelerator, the event after its queued copies; `flags`: what
    tells the save thread of it; `reads`: what they read, which is not freed until then. `late`:
    writes into the slot that must wait for them. `samples`: those
    of the guard, in host memory once the copies are done. `thread`: the thread that trains.
    `fenced`: of an image of an accelerator, whether its copies are done and the devices were asked
    to compare. `filling`: the base that is copied beside it, if it is the first to refer to it.
    `base`: the one to which it refers. `apart`: whether that has changed on a device until the
    save, as that will know.
    """

    slot: GrantedSlot
    control: ControlPage
    guard: MutationGuard | None
    transfers: Callable[[], copying.Transfers] | None = None
    late: list[Callable[[], object]] = field(default_factory=list)
    done: dict[torch.device, torch.Event] = field(default_factory=dict)
    flags: dict[torch.device, Tensor] = field(default_factory=dict)
    base: FrozenBase | None = None
    apart: tuple[Tensor, ...] = ()
    filling: BaseFilling | None = None
    filling_samples: list[Tensor] = field(default_factory=list)
    reads: tuple[CopyLot, ...] = ()
    samples: list[Tensor] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    copied: OneTimeEvent = field(default_factory=OneTimeEvent)
    fenced: OneTimeEvent = field(default_factory=OneTimeEvent)
    judged: OneTimeEvent = field(default_factory=OneTimeEvent)
    verdict: ImageOutcome = ImageOutcome.OPEN
    culprit: str = ""
    reason: str = ""
    sealed: bool = False
    counted: bool = False
    copy_s: float = 0.0
    blocked_s: float = 0.0
    _compared: dict[torch.device, torch.Event] = field(default_factory=dict)
    _differences: list[Tensor] = field(default_factory=list)
    _torn: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        """The step's number, in the epoch of `control`."""
        return self.control.step

    @property
    def is_judged_on_device(self) -> bool:
        """Whether an accelerator judges, when it comes to the fence, and not the host."""
        return bool(self.done) and self.guard is not None

    @property
    def is_settled(self) -> bool:
        """Whether the image is sealed, or certain never to be."""
        done = self.copied.is_set() and self.judged.is_set()
        return done and (self.sealed or self.verdict is not ImageOutcome.VALID)

    def copy(self) -> None:
        """Move the bytes (training thread)."""
        self._copy(self._await_devices)

    def _await_devices(self) -> bool:
        for event in self.done.values():
            event.synchronize()
        return True

    def copy_in_save_thread(self, give_up: Callable[[], bool]) -> None:
        """Move the bytes (save thread). After `give_up`, what devices copy is left as it is."""
        await_flag = accelerator.current_accelerator().await_flag
        self._copy(lambda: all(await_flag(tensor, give_up) for tensor in self.flags.values()))

    def _copy(self, devices_are_done: Callable[[], bool]) -> None:
        started = time.perf_counter()
        mapping = self.slot.mapping
        if self.transfers is not None:
            # Spread over threads even if all cores are busy: a computation on all cores is as late
            # as its latest thread, so taking one whole core costs twice as much as taking half of
            # two.
            self._run(self.transfers)
        if (filling := self.filling) is not None:
            self._run(filling.transfers)
        if not devices_are_done():  # the slot may still hold another image
            return
        with processes.no_fork():
            for write in self.late:
                write()
            if filling is not None:
                self._torn = filling.guard.find_torn_tensor(filling.mapping, self.filling_samples)
            if (guard := self.guard) is not None:
                self._torn = self._torn or guard.find_torn_tensor(mapping, self.samples)
        self.copy_s += time.perf_counter() - started
        self.copied.set()

    def _run(self, transfers: Callable[[], copying.Transfers]) -> None:
        with processes.no_fork():
            prepared = transfers()
        copying.run_transfers(prepared, threads=copying.default_threads())

    def fence(self) -> None:
        """Return when the devices have made their copies; begin to compare fingerprints. The later
        work of this thread's streams waits for that."""
        guard = self.guard
        if guard is None:  # the save thread has given the image up
            return
        device = accelerator.current_accelerator()
        if not self.fenced.is_set():
            self._await_devices()
            guards, self._differences = self._guards(), []
            self.culprit = next(filter(None, (guard.find_moved_tensor() for guard in guards)), "")
            if not self.culprit:
                differences = [
                    differs for guard in guards for differs in guard.compare_fingerprints()
                ]
                for differs in (*self.apart, *differences):
                    if device.device_of(differs) is not None:
                        self._differences.append(
                            device.enqueue_host_flag(differs.to(torch.uint8) + _SAME)
                        )
                    elif differs:
                        self.culprit = "?"
            for place in self.done:
                self._compared[place] = device.get_compute_stream(place).record_event()
            self.fenced.set()
        for place, event in self._compared.items():
            device.get_compute_stream(place).wait_event(event)

    def decide_outcome(self) -> None:
        """Decide, once, whether the tensors stayed unchanged. See the module for when this is
        sound."""
        guards = self._guards()

        def culprit() -> str:
            found = next(filter(None, (guard.find_changed_tensor() for guard in guards)), "")
            return found or ("?" if any(map(bool, self.apart)) else "")

        self._decide(culprit)

    def _guards(self) -> list[MutationGuard]:
        filling = self.filling
        guards = (self.guard, None if filling is None else filling.guard)
        return [guard for guard in guards if guard is not None]

    def _decide(self, culprit: Callable[[], str]) -> None:
        with processes.no_fork(), self._lock:
            if self.verdict is ImageOutcome.OPEN:
                self.culprit = self._torn or culprit()
                self.verdict = ImageOutcome.MUTATED if self.culprit else ImageOutcome.VALID
                if self.culprit and self.base is not None:
                    self.base.doubted = True
        self.judged.set()

    def judge_after_progress(self, give_up: Callable[[], bool]) -> None:
        """Judge as soon as the training thread has been seen to make progress (save thread)."""
        if self.guard is None and self.filling is None:
            self.decide_outcome()
            return
        if self.done:
            # a write through `.data` may still be queued on the device: only the fence can tell
            while not (self.fenced.wait(1.0) or self.judged.is_set() or give_up()):
                pass
            if self.fenced.is_set():
                self._judge_fenced(give_up)
            return
        before, pause_s = _position(self.thread), 0.0005
        while not self.judged.wait(pause_s) and not give_up():
            # a thread that has ended has no position
            if not before or _position(self.thread) != before:
                self.decide_outcome()
            pause_s = min(pause_s * 1.5, 0.01)

    def _judge_fenced(self, give_up: Callable[[], bool]) -> None:
        """Judge by what the devices found when they came to the fence."""
        versions = [
            accelerator.current_accelerator().await_flag(difference, give_up)
            for difference in self._differences
        ]
        if 0 not in versions:  # else it was given up
            self._decide(lambda: self.culprit or ("?" if _DIFFERS in versions else ""))

    def seal(self) -> None:
        """Write the control page: from here on, the image is complete."""
        if self.filling is not None:
            self.filling.seal()
        self.slot.mapping.seal(self.control)
        self.sealed = True

    def loss_text(self) -> str:
        """The reason of the loss as text, for the log and the sidecar's counters."""
        if self.verdict is ImageOutcome.LOST:
            return self.reason or "it could not be copied"
        culprit = self.culprit if self.culprit not in ("", "?") else "a tensor"
        return (
            f"{culprit} changed before it was copied, outside an optimizer step; wrap such code in"
            " `with checkpointer.mutating():`. The next save copies eagerly"
        )

    def finish_with_outcome(self, verdict: ImageOutcome, reason: str = "") -> None:
        """End this image with any verdict, and let go of all tensors."""
        self.verdict, self.reason = verdict, reason or self.reason
        self.guard = self.filling = self.base = None
        self.apart = ()
        self.transfers, self.late, self._differences = None, [], []
        self._let_go()
        self.judged.set()

    def is_reading_storage(self, storage: torch.UntypedStorage) -> bool:
        """Whether a copy, or the comparison after it, may still read this memory."""
        return not self.judged.is_set() and any(lot.uses_storage(storage) for lot in self.reads)

    def _let_go(self) -> None:
        """Memory that a device still reads, of an image that was given up, waits for its stream."""
        device = accelerator.current_accelerator()
        with processes.no_fork():
            if not all(map(bool, self.flags.values())):
                for tensor in (tensor for lot in self.reads for tensor in lot.tensors):
                    place = device.device_of(tensor)
                    if place is not None:
                        device.keep(tensor, device.get_copy_stream(place))
            self.reads = ()


def _position(thread: int) -> tuple[tuple[int, int], ...]:
    """Where a thread stands in its Python code; a change proves that it executed something.

    CPython 3.11 makes the object of a frame when somebody asks for it, and may collect garbage
    first. Then a finalizer may give up the GIL, the thread leaves that frame, and CPython writes to
    memory that is another frame's: the training would crash, or go on with other values.
    """
    position: list[tuple[int, int]] = []
    with processes.no_fork(), processes.pause_garbage_collection():
        frame = sys._current_frames().get(thread)
        while frame is not None and len(position) < 8:
            position.append((id(frame), frame.f_lasti))
            frame = frame.f_back
    return tuple(position)


class _Aside:
    """Values in memory of the host beside those of an accelerator: an optimizer's step counters.
    They are taken aside at `save`, because the slot may still hold another image."""

    def __init__(
        self,
        leaves: Sequence[TensorLeaf],
        fingerprint_over: Callable[[Sequence[TensorLeaf]], Fingerprint],
    ) -> None:
        # a fingerprint has all elements of small tensors, and reads those of many at once
        small = [
            leaf
            for leaf in leaves
            if can_detect_changes(leaf.tensor)
            and view_complex_as_doubles(leaf.tensor).numel() < 2 * SAMPLES
        ]
        self._small = fingerprint_over(small)
        names = {leaf.name for leaf in small}
        rest = [leaf for leaf in leaves if leaf.name not in names]
        self._rest = CopyLot(rest, [leaf.tensor for leaf in rest])

    def take(self) -> Callable[[SlotMapping], None]:
        """Take the values. Returns what writes them into a slot."""
        samples = self._small.sample_tensors()
        with torch.no_grad():
            clones = [tensor.clone() for tensor in self._rest.tensors]

        def write(mapping: SlotMapping) -> None:
            self._small.write_samples(mapping.memory, samples)
            with torch.no_grad():
                for place, value in zip(self._rest.places_in(mapping), clones, strict=True):
                    place.copy_(value)

        return write


class _Divided:
    """The leaves of a state by when they are copied: `now`, or `later` if `lazy`, which
    `fingerprint` guards. Those of each accelerator again: `urgent` are copied before the next
    forward pass, `patient` beside it; and then `aside`."""

    def __init__(
        self,
        leaves: tuple[TensorLeaf, ...],
        fingerprint_of: Callable[[Sequence[TensorLeaf]], Fingerprint],
        fingerprint_over: Callable[[Sequence[TensorLeaf]], Fingerprint],
        *,
        lazy: bool,
    ) -> None:
        now: list[TensorLeaf] = []
        later: list[TensorLeaf] = []
        host: list[TensorLeaf] = []
        urgent: dict[torch.device, list[TensorLeaf]] = {}
        patient: dict[torch.device, list[TensorLeaf]] = {}
        device_of = accelerator.current_accelerator().device_of
        for leaf in leaves:
            waits = lazy and leaf.lazy and can_detect_changes(leaf.tensor)
            (later if waits else now).append(leaf)
            place = device_of(leaf.tensor)
            if place is None:
                host.append(leaf)
            else:
                (patient if waits else urgent).setdefault(place, []).append(leaf)
        self.fingerprint = fingerprint_of(later) if later else None
        self.watched = WatchedTensors(later, self.fingerprint)
        self.now = CopyLot(now, [leaf.tensor for leaf in now])
        self.later = CopyLot(later, self.fingerprint.aliases if self.fingerprint else [])
        self.aside = _Aside(host, fingerprint_over) if host and (urgent or patient) else None
        self.urgent = {place: _lot(some) for place, some in urgent.items()}
        self.patient = {place: _lot(some) for place, some in patient.items()}

    def guard(self) -> MutationGuard | None:
        """A guard of what is copied later, as it is now."""
        return MutationGuard.take(self.watched, self.fingerprint) if self.fingerprint else None


def _lot(leaves: Sequence[TensorLeaf]) -> CopyLot:
    return CopyLot(leaves, [leaf.tensor.detach() for leaf in leaves])


class SnapshotMaker:
    """Makes images of one layout, which refer to `base` if there is one."""

    def __init__(
        self, layout: Layout, taken: TakenState, *, run: str, base: FrozenBase | None = None
    ) -> None:
        self.layout, self.base = layout, base
        self.joined = layout.merge_with_base(None if base is None else base.layout)
        self._run = run
        self._signature = taken.signature()
        self._fingerprint: tuple[list[int], Fingerprint] | None = None
        self._zero_pages: dict[torch.device, torch.Tensor] = {}
        self._ones: dict[torch.device, torch.Tensor] = {}

    def fits_state(self, taken: TakenState, extras_bytes: int) -> bool:
        """Whether this layout can hold the state."""
        if extras_bytes > self.layout.extras_capacity_bytes:
            return False
        if taken.cache.get("fits") is not self and taken.signature() == self._signature:
            taken.cache["fits"] = self
        return taken.cache.get("fits") is self

    def begin(
        self,
        slot: GrantedSlot,
        taken: TakenState,
        extras: bytes,
        *,
        step: int,
        epoch: Epoch,
        lazy: bool,
    ) -> PendingImage:
        """Erase the slot and copy what must be copied now. The image that is returned knows what is
        left to copy."""
        mapping = slot.mapping
        assert mapping.layout.id == self.layout.id, "a slot of another layout"
        divided = self._divided(taken, lazy=lazy)
        filling = self._filling(slot, epoch, step)
        control = ControlPage.staged(
            self.layout,
            run=self._run,
            epoch=epoch,
            step=step,
            extras_bytes=len(extras),
            staged_at=time.time(),
            base=filling.ref if filling else self.base.ref if self.base else None,
        )
        guard = divided.guard()
        samples = list(guard.samples) if guard else []
        pending = PendingImage(
            slot, control, guard, samples=samples, filling=filling, base=self.base
        )
        if self.base is not None:
            pending.apart = self.base.apart
        if filling is not None:
            pending.filling_samples = list(filling.guard.samples)
        devices = divided.urgent or divided.patient
        if devices or (filling is not None and filling.base.copy_lots.keys() - {None}):
            self._queue(pending, divided, extras)
        else:
            mapping.erase()
            mapping.write_extras(extras)
            copying.run_transfers(
                divided.now.prepare_host_copies(mapping), threads=copying.default_threads()
            )
            pending.transfers = functools.partial(divided.later.prepare_host_copies, mapping)
            pending.reads = (divided.later, *(filling.base.copy_lots.values() if filling else ()))
        return pending

    def _filling(self, slot: GrantedSlot, epoch: Epoch, step: int) -> BaseFilling | None:
        """What fills the base, unless it is filled."""
        if self.base is None:
            return None
        assert slot.base is not None, "a slot without the base of its layout"
        if self.base.is_sealed_in_slot(slot.base):
            return None
        return self.base.fill(slot.base, run=self._run, epoch=epoch, step=step)

    def _divided(self, taken: TakenState, *, lazy: bool) -> _Divided:
        # the layout says where a tensor's samples are in an image
        key = "divided", lazy, self.layout.id
        divided: _Divided | None = taken.cache.get(key)
        if divided is None:
            ways = self._fingerprint_of, self._fingerprint_over
            elsewhere = frozenset[str]() if self.base is None else self.base.names
            leaves = tuple(leaf for leaf in taken.tensors if leaf.name not in elsewhere)
            divided = _Divided(leaves, *ways, lazy=lazy)
            if not lazy:
                self._fingerprint = None  # it would hold memory that the tensors once had
            taken.cache[key] = divided
        return divided

    def _queue(self, pending: PendingImage, divided: _Divided, extras: bytes) -> None:
        """Queue all copies on side streams; the CPU waits for none of them.

        Until the gradients of this step are exchanged, the slot may still hold the newest step that
        all ranks have in common. The exchange is queued on a computing stream, so the slot must be
        erased in stream order too: one device erases it once all devices have reached this point.
        Bytes from the CPU are written only when the copies are done.
        """
        device, mapping = accelerator.current_accelerator(), pending.slot.mapping
        pending.late.append(functools.partial(mapping.write_extras, extras))
        if divided.aside is not None:
            pending.late.append(functools.partial(divided.aside.take(), mapping))
        urgent, patient = divided.urgent, divided.patient
        filling = pending.filling
        frozen = (
            {}
            if filling is None
            else {p: reused for p, reused in filling.base.copy_lots.items() if p}
        )
        places = list(urgent | patient | frozen)
        first = device.get_copy_stream(places[0])
        for place in places:
            first.wait_stream(device.get_compute_stream(place))
        self._erase(mapping, places[0], first)
        for place in places[1:]:
            device.get_copy_stream(place).wait_stream(first)
        pending.reads = (*urgent.values(), *patient.values(), *frozen.values())
        for place in places:
            self._copy(mapping, place, urgent.get(place))
            # the next forward pass changes buffers in the computing stream, which waits for these
            # few copies
            device.get_compute_stream(place).wait_stream(device.get_copy_stream(place))
        for place in places:
            self._copy(mapping, place, patient.get(place))
            if filling is not None:
                self._copy(filling.mapping, place, frozen.get(place))
            for samples in (pending.samples, pending.filling_samples):
                self._bring_samples(samples, place)
            pending.done[place] = device.get_copy_stream(place).record_event()
            with device.use_stream(device.get_copy_stream(place)):
                if place not in self._ones:
                    self._ones[place] = device.zeros(1, place) + 1
                pending.flags[place] = device.enqueue_host_flag(self._ones[place])

    def _bring_samples(self, all_samples: list[Tensor], place: torch.device) -> None:
        """Queue copies of what the fingerprint read on a device, for the save thread."""
        device, stream = (
            accelerator.current_accelerator(),
            accelerator.current_accelerator().get_copy_stream(place),
        )
        for at, samples in enumerate(all_samples):
            if device.device_of(samples) != place:
                continue
            with device.use_stream(stream):
                all_samples[at] = device.pinned_zeros_like(samples)
                all_samples[at].copy_(samples, non_blocking=True)
                device.keep(samples, stream)

    def _erase(self, mapping: SlotMapping, place: torch.device, stream: torch.Stream) -> None:
        device, begin = accelerator.current_accelerator(), self.layout.control_begin
        control = torch.frombuffer(mapping.memory, dtype=torch.uint8, offset=begin)
        if place not in self._zero_pages:
            self._zero_pages[place] = device.zeros(len(control), place)
            stream.wait_stream(device.get_compute_stream(place))
        with device.use_stream(stream):
            device.copy([control], [self._zero_pages[place]])

    def _copy(self, mapping: SlotMapping, place: torch.device, lot: CopyLot | None) -> None:
        if lot is not None:
            device = accelerator.current_accelerator()
            with device.use_stream(device.get_copy_stream(place)), torch.no_grad():
                device.queue_repeated_copies(
                    lot.prepare_device_copies(mapping), place, pinned=mapping.pinned
                )

    def guard_of_lazy(self, taken: TakenState) -> MutationGuard | None:
        """A guard of what a lazy copy would have left for later."""
        return self._divided(taken, lazy=True).guard()

    def guard_of_all(self, taken: TakenState) -> MutationGuard | None:
        """A guard of all tensors; None if changes of one of them cannot be detected."""
        if not all(can_detect_changes(leaf.tensor) for leaf in taken.tensors):
            return None
        fingerprint = taken.cache.get("all")
        if fingerprint is None:
            fingerprint = taken.cache["all"] = self._fingerprint_over(taken.tensors)
        return MutationGuard.take(WatchedTensors(taken.tensors), fingerprint)

    def _fingerprint_of(self, leaves: Sequence[TensorLeaf]) -> Fingerprint:
        addresses = [leaf.tensor.data_ptr() for leaf in leaves]
        if self._fingerprint is None or self._fingerprint[0] != addresses:
            self._fingerprint = addresses, self._fingerprint_over(leaves)
        return self._fingerprint[1]

    def _fingerprint_over(self, leaves: Sequence[TensorLeaf]) -> Fingerprint:
        begins = [self.joined.entries[leaf.name].begin for leaf in leaves]
        return Fingerprint([leaf.tensor for leaf in leaves], begins)
