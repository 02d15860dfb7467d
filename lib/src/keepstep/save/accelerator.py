"""The one place where work on an accelerator is ordered: streams, events, memory pinned for it.

torch's generic interface serves all kinds (CUDA, ROCm, XPU and so on); what they do not have in
common is `pin`. On each device one stream of its own copies, for all images of this process, so
that copies into a slot run in the order in which they were queued. What must stay true, whatever
the device does when (`tests/lib/test_accelerator.py` runs it on a simulated one):

- no copy begins before the computing stream came to the `save`, nor ends after `done`;
- a slot is erased in stream order, before the first byte of it changes;
- what changes a tensor waits for its copy: buffers by stream order, all else by the fence.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepstep.client.slot import SlotMapping
from keepstep.state import devices

log = logging.getLogger("keepstep")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class Accelerator:
    """The accelerator that torch has, if any; nothing here initialises one."""

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Where its bytes are; None for memory of the host."""
        return None if tensor.is_cpu else tensor.device

    def current_device(self) -> int | None:
        """The number of this thread's device; None where this process uses none."""
        kind = devices.kind_in_use()
        return int(devices.module(kind).current_device()) if kind else None

    def zeros(self, size_bytes: int, device: torch.device) -> Tensor:
        """Bytes on a device, zero once its computing stream came here."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def computing(self, device: torch.device) -> torch.Stream:
        """The stream in which this thread computes now."""
        return torch.accelerator.current_stream(device)

    def copying(self, device: torch.device) -> torch.Stream:
        """The stream that copies from this device."""
        if device not in self._copying:
            self._copying[device] = torch.Stream(device)
        return self._copying[device]

    @contextlib.contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """What this thread queues in here on the stream's device goes to that stream."""
        mine = torch.accelerator.current_stream()
        computing = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)  # makes its device the current one, too
        try:
            yield
        finally:
            torch.accelerator.set_stream(computing)
            torch.accelerator.set_stream(mine)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies from one device in the stream that is on: one call for all, as each costs
        the training thread more than a small tensor does the bus. What is conjugated by a flag only
        is first so in memory of the device: `copy_` would conjugate the target at once, before the
        bytes came (pytorch#146286)."""
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Its memory is not used again before the stream came here."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether this thread records a graph: nothing that it queues runs now."""
        kind = devices.kind_in_use()
        ask = getattr(devices.module(kind), "is_current_stream_capturing", None) if kind else None
        return ask is not None and bool(ask())

    def quiesce(self) -> None:
        """Return when no copy that was queued so far runs any more."""
        for stream in self._copying.values():
            stream.synchronize()

    def synchronize(self) -> None:
        """Return when all that was queued on this thread's device is done."""
        if devices.kind_in_use():
            torch.accelerator.synchronize()

    def erase(self, slot: SlotMapping) -> None:
        """Erase a slot from the host, for copies that the host waits for: not before the device
        came here, as the step in it may be the newest that all ranks have in common until then."""
        self.synchronize()
        slot.erase()

    def pin(self, slot: SlotMapping, device: int | None = None) -> None:
        """Pin a slot's memory, as long as it is mapped. Without success, and where torch has no
        call for it (all but CUDA and ROCm), copies are slower, not wrong. `device`: whose thread
        asks, where that is another one than it works with."""
        if slot.registered or devices.kind_in_use() != "cuda":
            return
        # a thread that has no current device of its own would take the first GPU
        with torch.cuda.device(device):
            size = slot.layout.size_bytes
            error = int(torch.cuda.cudart().cudaHostRegister(slot.address, size, _PORTABLE))
        if error:
            log.warning(
                "slot %s: cudaHostRegister failed (%d); copies will be slow", slot.path, error
            )
            return
        slot.registered = True
        weakref.finalize(slot, _unpin, slot.address)


def _unpin(address: int) -> None:
    # at interpreter exit the CUDA context may be gone already
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostUnregister(address)


_HERE = Accelerator()


def here() -> Accelerator:
    """This process's."""
    return _HERE
