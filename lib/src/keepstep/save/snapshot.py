"""From a taken state to an image in a slot: what is copied now, what is copied later, and how later
copies are guarded.

Before `begin` returns, it copies what the forward pass or Python may change: buffers, tensors in
plain dicts, values, random states. If `lazy`, it leaves parameters and optimizer state, which only
an optimizer step changes, to the agent thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from keepstep.client import copying
from keepstep.client.slot import Slot, SlotMapping
from keepstep.image import ControlPage, Layout
from keepstep.save import accelerator
from keepstep.save.pending import Fingerprint, Guard, Pending
from keepstep.state.leaves import Taken, TensorLeaf
from keepstep.state.memory import check_memory
from keepstep.steps import Epoch


class _Divided:
    """The leaves of a state by when they are copied (`now`, or `later` if `lazy`). Those of each
    accelerator again: `urgent` are copied before the next forward pass, `patient` beside it.
    """

    def __init__(self, tensors: tuple[TensorLeaf, ...], *, lazy: bool) -> None:
        self.now: list[TensorLeaf] = []
        self.later: list[TensorLeaf] = []
        self.urgent: dict[torch.device, list[TensorLeaf]] = {}
        self.patient: dict[torch.device, list[TensorLeaf]] = {}
        self._in_host_memory: list[TensorLeaf] = []
        device_of = accelerator.here().device_of
        for leaf in tensors:
            waits = lazy and leaf.lazy and may_wait(leaf.tensor)
            (self.later if waits else self.now).append(leaf)
            place = device_of(leaf.tensor)
            if place is None:
                self._in_host_memory.append(leaf)
            else:
                (self.patient if waits else self.urgent).setdefault(place, []).append(leaf)

    def host_values(self) -> dict[str, torch.Tensor]:
        """The values that host memory holds now. Beside those of an accelerator they are small: an
        optimizer's step counters.
        """
        return {leaf.name: leaf.tensor.clone() for leaf in self._in_host_memory}


class Snapshots:
    """Makes images of one layout."""

    def __init__(self, layout: Layout, taken: Taken, *, run: str) -> None:
        self.layout = layout
        self._run = run
        self._signature = taken.signature()
        self._fingerprint: tuple[tuple[int, ...], Fingerprint] | None = None
        self._zero_pages: dict[torch.device, torch.Tensor] = {}
        self._ones: dict[torch.device, torch.Tensor] = {}

    def fits(self, taken: Taken, extras_bytes: int) -> bool:
        """Whether this layout can hold the state."""
        if extras_bytes > self.layout.extras_capacity_bytes:
            return False
        if taken.cache.get("fits") is not self and taken.signature() == self._signature:
            taken.cache["fits"] = self
        return taken.cache.get("fits") is self

    def begin(
        self,
        slot: Slot,
        taken: Taken,
        extras: bytes,
        *,
        step: int,
        epoch: Epoch,
        lazy: bool,
    ) -> Pending:
        """Erase the slot and copy what must be copied now. The image that is returned knows what is
        left to copy.
        """
        mapping = slot.mapping
        assert mapping.layout.id == self.layout.id, "a slot of another layout"
        divided = taken.cache.get(("divided", lazy))
        if divided is None:
            divided = taken.cache["divided", lazy] = _Divided(taken.tensors, lazy=lazy)
        later = divided.later
        control = ControlPage.staged(
            self.layout,
            run=self._run,
            epoch=epoch,
            step=step,
            extras_bytes=len(extras),
            staged_at=time.time(),
        )
        guard = Guard.take(later, self._fingerprint_of(later)) if later else None
        pending = Pending(slot, control, guard, samples=list(guard.samples) if guard else [])
        if divided.urgent or divided.patient:
            self._queue(pending, divided, extras)
        else:
            mapping.erase()
            mapping.write_extras(extras)
            now = [leaf.tensor for leaf in divided.now]
            transfers = self._transfers(mapping, divided.now, now)
            copying.run(transfers, threads=copying.default_threads())
            held = guard.fingerprint.aliases if guard is not None else []
            pending.transfers = functools.partial(self._transfers, mapping, later, held)
        return pending

    def _queue(self, pending: Pending, divided: _Divided, extras: bytes) -> None:
        """Queue all copies on side streams; the CPU waits for none of them.

        Until the gradients of this step are exchanged, the slot may still hold the newest step that
        all ranks have in common. The exchange is queued on a computing stream, so the slot must be
        erased in stream order too: one device erases it once all devices have reached this point.
        Bytes from the CPU are written only when the copies are done.
        """
        device, mapping = accelerator.here(), pending.slot.mapping
        pending.late.append(functools.partial(mapping.write_extras, extras))
        pending.late.append(functools.partial(self._write, mapping, divided.host_values()))
        urgent, patient = divided.urgent, divided.patient
        places = list(urgent | patient)
        first = device.copying(places[0])
        for place in places:
            first.wait_stream(device.computing(place))
        self._erase(mapping, places[0], first)
        for place in places[1:]:
            device.copying(place).wait_stream(first)
        for place in places:
            self._copy(mapping, place, urgent.get(place, []))
            # the next forward pass changes buffers in the computing stream, which waits for these
            # few copies
            device.computing(place).wait_stream(device.copying(place))
        for place in places:
            self._copy(mapping, place, patient.get(place, []))
            self._bring_samples(pending, place)
            pending.done[place] = device.copying(place).record_event()
            with device.on(device.copying(place)):
                if place not in self._ones:
                    self._ones[place] = device.zeros(1, place) + 1
                pending.told[place] = device.tell(self._ones[place])

    def _bring_samples(self, pending: Pending, place: torch.device) -> None:
        """Queue copies of what the fingerprint read on a device, for the agent thread."""
        device, stream = accelerator.here(), accelerator.here().copying(place)
        for at, samples in enumerate(pending.samples):
            if device.device_of(samples) != place:
                continue
            with device.on(stream):
                pending.samples[at] = device.pinned_zeros_like(samples)
                pending.samples[at].copy_(samples, non_blocking=True)
                device.keep(samples, stream)

    def _write(self, mapping: SlotMapping, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            mapping.view(self.layout.entries[name]).copy_(value)

    def _erase(self, mapping: SlotMapping, place: torch.device, stream: torch.Stream) -> None:
        device, begin = accelerator.here(), self.layout.control_begin
        control = torch.frombuffer(mapping.memory, dtype=torch.uint8, offset=begin)
        if place not in self._zero_pages:
            self._zero_pages[place] = device.zeros(len(control), place)
            stream.wait_stream(device.computing(place))
        with device.on(stream):
            device.copy([control], [self._zero_pages[place]])

    def _copy(self, mapping: SlotMapping, place: torch.device, leaves: list[TensorLeaf]) -> None:
        if not leaves:
            return
        device = accelerator.here()
        stream = device.copying(place)
        with device.on(stream), torch.no_grad():
            targets = [mapping.view(self.layout.entries[leaf.name]) for leaf in leaves]
            device.copy(targets, [leaf.tensor for leaf in leaves])
            for leaf in leaves:
                device.keep(leaf.tensor, stream)

    def guard_of_all(self, taken: Taken) -> Guard | None:
        """A guard of all tensors; None if changes of one of them cannot be detected."""
        if not all(may_wait(leaf.tensor) for leaf in taken.tensors):
            return None
        fingerprint = taken.cache.get("all")
        if fingerprint is None:
            fingerprint = taken.cache["all"] = self._fingerprint_over(taken.tensors)
        return Guard.take(taken.tensors, fingerprint)

    def _fingerprint_of(self, leaves: list[TensorLeaf]) -> Fingerprint:
        pointers = tuple(leaf.tensor.data_ptr() for leaf in leaves)
        if self._fingerprint is None or self._fingerprint[0] != pointers:
            self._fingerprint = pointers, self._fingerprint_over(leaves)
        return self._fingerprint[1]

    def _fingerprint_over(self, leaves: Sequence[TensorLeaf]) -> Fingerprint:
        begins = [self.layout.entries[leaf.name].begin for leaf in leaves]
        return Fingerprint([leaf.tensor for leaf in leaves], begins)

    def _transfers(
        self, mapping: SlotMapping, leaves: list[TensorLeaf], tensors: list[torch.Tensor]
    ) -> copying.Transfers:
        """Copies of the leaves' `tensors` into their places."""
        moves, copies = [], []
        for leaf, tensor in zip(leaves, tensors, strict=True):
            entry = self.layout.entries[leaf.name]
            if copying.is_plain(tensor):
                target = mapping.address + entry.begin
                size = entry.end - entry.begin
                moves.append(copying.Move(target, tensor.data_ptr(), size))
            else:
                check_memory(tensor, leaf.name)
                copies.append(copying.Copy(mapping.view(entry), tensor))
        return copying.Transfers(moves, copies, holds=tensors)


def may_wait(tensor: torch.Tensor) -> bool:
    """Whether later changes of this tensor can be detected: it must be dense, in any order of
    dimensions.
    """
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
