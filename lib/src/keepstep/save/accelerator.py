"""The one place that orders work on an accelerator: streams, events, pinned memory.

torch's generic interface serves all kinds of devices (CUDA, ROCm, XPU and so on), except for `pin`.
Each device has one stream for all copies of this process's images, so copies into a slot run in the
order in which they were queued. These invariants must hold whenever the device runs its work
(`tests/lib/test_accelerator.py` checks them on a simulated device):

- No copy begins before the computing stream reaches the `save`, and none ends after `done`.
- A slot is erased in stream order, before its first byte changes.
- Whatever changes a tensor waits for its copy: buffers by stream order, everything else by the
  fence.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from keepstep.client.slot import SlotMapping
from keepstep.state import devices

log = logging.getLogger("keepstep")

_LOOK_S, _LONGEST_S = 0.0005, 0.002
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class Accelerator:
    """The accelerator that torch has, if any. Nothing here initializes one."""

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """The device that holds the tensor's bytes; None for host memory."""
        return None if tensor.is_cpu else tensor.device

    def current_device(self) -> int | None:
        """The number of this thread's device; None if this process uses no accelerator."""
        kind = devices.kind_in_use()
        return int(devices.module(kind).current_device()) if kind else None

    def zeros(self, size_bytes: int, device: torch.device) -> Tensor:
        """Bytes on a device; they are zero once its computing stream has reached this call."""
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
        """While the context is open, what this thread queues on the stream's device goes to that
        stream.
        """
        mine = torch.accelerator.current_stream()
        computing = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)  # also makes its device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(computing)
            torch.accelerator.set_stream(mine)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies from one device in the current stream.

        One call queues all copies, because a call costs the training thread more than a small
        tensor costs the bus. This call first conjugates, in device memory, a tensor that only a
        flag marks as conjugated. `copy_` would conjugate the target at once, before the bytes
        arrive (pytorch#146286).
        """
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def tell(self, value: Tensor) -> Tensor:
        """Memory of the host that is zero until the device's current stream has come to this call,
        and then holds the value, which is not zero. The host waits for nothing.
        """
        told = self.pinned_zeros_like(value)
        told.copy_(value, non_blocking=True)
        return told

    def pinned_zeros_like(self, value: Tensor) -> Tensor:
        """Zeros in memory of the host into which a device copies while the host goes on."""
        return torch.zeros_like(value, device="cpu", pin_memory=True)

    def await_told(self, told: Tensor, give_up: Callable[[], bool]) -> int:
        """What `tell` told; 0 after `give_up`. For threads beside the one that trains.

        It only reads memory. Most calls that ask a device, from any thread, break the capture of a
        graph that is under way, and `Event.synchronize` keeps a core busy.
        """
        began = time.monotonic()
        while not (value := int(told)) and not give_up():
            # each look takes the interpreter from the training thread
            time.sleep(min(_LONGEST_S, max(_LOOK_S, (time.monotonic() - began) / 16)))
        return value

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keep the tensor's memory from being reused before the stream has reached this call."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether this thread records a graph, so that nothing that it queues runs now."""
        kind = devices.kind_in_use()
        ask = getattr(devices.module(kind), "is_current_stream_capturing", None) if kind else None
        return ask is not None and bool(ask())

    def quiesce(self) -> None:
        """Return when every copy that was queued so far has ended."""
        for stream in self._copying.values():
            stream.synchronize()

    def synchronize(self) -> None:
        """Return when all work that was queued on this thread's device is done."""
        if devices.kind_in_use():
            torch.accelerator.synchronize()

    def erase(self, slot: SlotMapping) -> None:
        """Erase a slot from the host, for copies that the host waits for.

        The device must first finish its queued work: until then, the step in the slot may be the
        newest one that all ranks have in common.
        """
        self.synchronize()
        slot.erase()

    def pin(self, slot: SlotMapping, device: int | None = None) -> None:
        """Pin a slot's memory for as long as it is mapped.

        If pinning fails, or torch has no call for it (all but CUDA and ROCm), copies are slower but
        correct. `device`: the device number to use, if the calling thread has no current device or
        another one.
        """
        if slot.registered or devices.kind_in_use() != "cuda":
            return
        # a thread without a current device of its own would use the first GPU
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
    # at interpreter exit, the CUDA context may already be gone
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostUnregister(address)


_HERE = Accelerator()


def here() -> Accelerator:
    """The accelerator of this process."""
    return _HERE
