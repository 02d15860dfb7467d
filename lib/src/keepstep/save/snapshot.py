"""From a taken state to an image in a slot: what is copied now, what later, and under which guard.

Copied before `begin` returns: buffers, plain dict tensors, values, random states; whatever the
forward pass or Python may change. Left for the agent thread if `lazy`: parameters and optimizer
state, which only an optimizer step changes.
"""

from __future__ import annotations

import functools
import time

import torch

from keepstep.client import copying
from keepstep.client.slot import Slot, SlotMapping
from keepstep.image import ControlPage, Layout
from keepstep.save.pending import Fingerprint, Guard, Pending
from keepstep.state.leaves import Taken, TensorLeaf
from keepstep.state.memory import check_memory
from keepstep.steps import Epoch


class Snapshots:
    """Makes images of one layout."""

    def __init__(self, layout: Layout, taken: Taken, *, run: str) -> None:
        self.layout = layout
        self._run = run
        self._signature = taken.signature()
        self._fingerprint: tuple[tuple[int, ...], Fingerprint] | None = None
        self._zero_pages: dict[torch.device, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def fits(self, taken: Taken, extras_bytes: int) -> bool:
        """Whether this layout can hold the state."""
        return (
            extras_bytes <= self.layout.extras_capacity_bytes
            and taken.signature() == self._signature
        )

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
        """Erase the slot, write what must be written now, and say what is left to copy."""
        mapping = slot.mapping
        assert mapping.layout.id == self.layout.id, "a slot of another layout"
        later = [leaf for leaf in taken.tensors if lazy and leaf.lazy and _may_wait(leaf.tensor)]
        names = {leaf.name for leaf in later}
        now = [leaf for leaf in taken.tensors if leaf.name not in names]
        control = ControlPage.staged(
            self.layout,
            run=self._run,
            epoch=epoch,
            step=step,
            extras_bytes=len(extras),
            staged_at=time.time(),
        )
        guard = Guard.take(later, self._fingerprint_of(later)) if later else None
        pending = Pending(slot, control, guard)
        device = next((leaf.tensor.device for leaf in taken.tensors if leaf.tensor.is_cuda), None)
        if device is None:
            mapping.erase()
            mapping.write_extras(extras)
            copying.run(self._transfers(mapping, now), threads=copying.default_threads())
            pending.transfers = functools.partial(self._transfers, mapping, later)
        else:
            self._begin_cuda(pending, device, now, later, extras)
        return pending

    def _begin_cuda(
        self,
        pending: Pending,
        device: torch.device,
        now: list[TensorLeaf],
        later: list[TensorLeaf],
        extras: bytes,
    ) -> None:
        """Queue all copies on a side stream; the CPU waits for none of them.

        The slot may still hold the newest step that all ranks have in common, until this step's
        gradients were exchanged. That exchange is queued on the compute stream, so the slot is
        erased in stream order too, and bytes from the CPU follow only when the stream got there.
        """
        mapping = pending.slot.mapping
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        compute = torch.cuda.current_stream(device)
        stream.wait_stream(compute)
        begin = self.layout.control_begin
        control = torch.frombuffer(mapping.memory, dtype=torch.uint8, offset=begin)
        zero = self._zero_pages.get(device)
        if zero is None:
            zero = self._zero_pages[device] = torch.zeros_like(control, device=device)
            stream.wait_stream(compute)
        pending.late.append(functools.partial(mapping.write_extras, extras))
        with torch.cuda.stream(stream), torch.no_grad():
            control.copy_(zero, non_blocking=True)
            self._queue(pending, stream, now)
            # the next forward pass changes buffers in the compute stream: it waits for these few
            compute.wait_stream(stream)
            self._queue(pending, stream, later)
            event = torch.cuda.Event()
            event.record(stream)
        pending.cuda_done = event

    def _queue(self, pending: Pending, stream: torch.cuda.Stream, leaves: list[TensorLeaf]) -> None:
        for leaf in leaves:
            target = pending.slot.mapping.view(self.layout.entries[leaf.name])
            if leaf.tensor.is_cuda:
                target.copy_(leaf.tensor, non_blocking=True)
                leaf.tensor.record_stream(stream)
            else:
                # small (an optimizer's step counters): cloned now, written when the GPU got there
                pending.late.append(functools.partial(target.copy_, leaf.tensor.clone()))

    def _fingerprint_of(self, leaves: list[TensorLeaf]) -> Fingerprint:
        pointers = tuple(leaf.tensor.data_ptr() for leaf in leaves)
        if self._fingerprint is None or self._fingerprint[0] != pointers:
            self._fingerprint = pointers, Fingerprint([leaf.tensor for leaf in leaves])
        return self._fingerprint[1]

    def _transfers(self, mapping: SlotMapping, leaves: list[TensorLeaf]) -> copying.Transfers:
        moves, copies = [], []
        for leaf in leaves:
            entry = self.layout.entries[leaf.name]
            check_memory(leaf.tensor, leaf.name)
            if copying.is_plain(leaf.tensor):
                target = mapping.address + entry.begin
                size = entry.end - entry.begin
                moves.append(copying.Move(target, leaf.tensor.data_ptr(), size))
            else:
                copies.append(copying.Copy(mapping.view(entry), leaf.tensor))
        return copying.Transfers(moves, copies)


def _may_wait(tensor: torch.Tensor) -> bool:
    """Whether changes of this tensor can be seen afterwards: dense, in whatever order."""
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
