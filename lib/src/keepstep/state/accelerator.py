"""Where the bytes of a tensor lie: in memory of its own, of the host or of an accelerator. The one
place that orders work on an accelerator: streams, events, pinned memory.

torch's generic interface (`torch.accelerator`, the module of a device type) serves all kinds of
devices, except for `pin`; ROCm is called "cuda", too. Each device has one stream for all copies of
this process's images, so copies into a slot run in the order in which they were queued. These
invariants must hold whenever the device runs its work (`tests/lib/test_accelerator.py` checks them
on a simulated device):

- No copy begins before the computing stream reaches the `save`, and none ends after `done`.
- A slot is erased in stream order, before its first byte changes; by the host only after
  `synchronize`: until then, the step in it may be the newest one that all ranks have in common.
- Whatever changes a tensor waits for its copy: buffers by stream order, everything else by the
  fence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep import processes
from keepstep.errors import UsageError

log = logging.getLogger("keepstep")

_POLL_S, _LONGEST_S = 0.0005, 0.002
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


def owns_full_storage(tensor: Tensor) -> bool:
    """Whether all elements lie in memory of the tensor's own.

    They do not for a wrapper around other tensors, or if the storage was made smaller.
    """
    count = tensor.numel()
    if not count:
        return True
    last = tensor.storage_offset()
    if tensor.is_contiguous():
        last += count - 1
    else:
        last += sum((a - 1) * b for a, b in zip(tensor.shape, tensor.stride(), strict=True))
    enough = (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    return enough and tensor.data_ptr() != 0


def check_tensor_has_storage(tensor: Tensor, name: str) -> None:
    """Raise UsageError, naming the tensor, if it has no memory: reading it would end the
    process."""
    if not owns_full_storage(tensor):
        raise UsageError(
            f"{name}: this tensor has no memory of its own for its {tensor.numel()} elements (a"
            " zero tensor, or its storage was resized); keep a clone() of its values"
        )


def accelerator_kind() -> str:
    """The type of the accelerator that torch has here, for example "cuda"; "" if there is none."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def torch_module(kind: str) -> Any:
    """`torch.cuda`, `torch.xpu` and so on. Raises RuntimeError for a kind unknown to torch."""
    return torch.get_device_module(kind)


def accelerator_in_use() -> str:
    """Like `accelerator_kind`, but "" until this process has used the accelerator: the query must
    not initialize a device."""
    found = accelerator_kind()
    return found if found and torch_module(found).is_initialized() else ""


def check_device(device: torch.device, name: str) -> None:
    """Raise UsageError, naming the tensor, if it is on a device from which nothing can be kept."""
    if device.type != "cpu" and (why := _why_not(device.type)):
        raise UsageError(
            f"{name}: tensors on {device.type!r} cannot be kept: {why}; train on CUDA, ROCm or XPU,"
            " or keep copies on the CPU (a dict of tensor.cpu(), made before each save)"
        )


@functools.cache
def _why_not(kind_of_tensor: str) -> str:
    """Why tensors of this kind cannot be kept.

    Empty for an accelerator that has what concurrent copies need: streams, events, and host memory
    that can be pinned.
    """
    if kind_of_tensor == "mps":
        return "it has one stream, and no host memory that another process shares can be pinned"
    if kind_of_tensor != accelerator_kind():
        return f"torch's accelerator here is {accelerator_kind() or 'none'}"
    try:
        torch.Stream(kind_of_tensor)
        torch.Event(kind_of_tensor)
        torch.empty(1, pin_memory=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"torch has no streams, events or pinned memory for it ({error})"
    return ""


# --- names of devices in the header of an image ---------------------------------------------


def device_name(device: torch.device) -> str:
    """The name of a device. The process's current device gets no number, because the number may be
    another one in the next life."""
    own = device.type != "cpu" and device.type == accelerator_kind()
    return (
        device.type
        if own and device.index == torch_module(device.type).current_device()
        else (str(device))
    )


def parse_device_name(name: str | None) -> torch.device:
    """The inverse of `device_name`, as closely as this machine allows; the CPU if nothing
    is known."""
    here = accelerator_kind()
    if name is None or not here or name.partition(":")[0] != here:
        return torch.device("cpu")
    device = torch.device(name)
    if device.index is None or device.index >= torch_module(here).device_count():
        return torch.device(here, torch_module(here).current_device())
    return device


# --- generators --------------------------------------------------------------------------------


def generator_states() -> dict[str, list[bytes]]:
    """By kind, the generator states of every device that this process sees.

    A model may lie on several devices, each with a generator of its own. Empty if no accelerator is
    in use.
    """
    if not (found := accelerator_in_use()):
        return {}
    devices = torch_module(found)
    count = range(devices.device_count())
    return {found: [bytes(devices.get_rng_state(at).tolist()) for at in count]}


def set_generator(kind: str, state: torch.Tensor, at: int) -> None:
    """Set the generator of device `at`."""
    torch_module(kind).set_rng_state(state, at)


class Accelerator:
    """The accelerator that torch has, if any. Nothing here initializes one."""

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """The device that holds the tensor's bytes; None for host memory."""
        return None if tensor.is_cpu else tensor.device

    def current_device(self) -> int | None:
        """The number of this thread's device; None if this process uses no accelerator."""
        kind = accelerator_in_use()
        return int(torch_module(kind).current_device()) if kind else None

    def zeros(self, size_bytes: int, device: torch.device) -> Tensor:
        """Bytes on a device; they are zero once its computing stream has reached this call."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def get_compute_stream(self, device: torch.device) -> torch.Stream:
        """The stream in which this thread computes now."""
        return torch.accelerator.current_stream(device)

    def get_copy_stream(self, device: torch.device) -> torch.Stream:
        """The stream that copies from this device."""
        if device not in self._copying:
            self._copying[device] = self.create_stream(device)
        return self._copying[device]

    def create_stream(self, device: torch.device) -> torch.Stream:
        """A new stream."""
        return torch.Stream(device)

    @contextlib.contextmanager
    def use_stream(self, stream: torch.Stream) -> Iterator[None]:
        """While the context is open, what this thread queues on the stream's device goes to that
        stream."""
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

    def queue_repeated_copies(
        self, copies: DeviceToHostCopies, place: torch.device, *, pinned: bool
    ) -> None:
        """Queue copies from one device in the current stream, as `copy` does. `pinned`: whether the
        targets are pinned. Then what can be is given to the driver as one list of addresses, which
        takes the host a tenth of the time."""
        rest = copies.rest if pinned and self.copy_batch(copies.batch, place) else copies.all
        if rest[0]:
            torch._foreach_copy_(*rest, non_blocking=True)

    def copy_batch(self, batch: CopyBatch, place: torch.device) -> bool:
        """Queue plain copies in the current stream of a device. Returns False, with nothing queued
        that must not be queued again, if torch's runtime cannot."""
        if not len(batch.sizes):
            return True
        if place.type != "cuda" or (queue := _batch_call()) is None:
            return False
        return queue(batch, place.index or 0, torch.cuda.current_stream(place).cuda_stream)

    def enqueue_host_flag(self, value: Tensor) -> Tensor:
        """Memory of the host that is zero until the device's current stream has come to this call,
        and then holds the value, which is not zero. The host waits for nothing."""
        flag = self.pinned_zeros_like(value)
        flag.copy_(value, non_blocking=True)
        return flag

    def pinned_zeros_like(self, value: Tensor) -> Tensor:
        """Zeros in memory of the host into which a device copies while the host goes on."""
        return torch.zeros_like(value, device="cpu", pin_memory=True)

    def await_flag(self, flag: Tensor, give_up: Callable[[], bool]) -> int:
        """The flag's value once the device has written it; 0 after `give_up`. For threads beside
        the one that trains.

        It only reads memory. Most calls that ask a device, from any thread, break the capture of a
        graph that is under way, and `Event.synchronize` keeps a core busy.
        """
        began = time.monotonic()
        while True:
            with processes.no_fork():
                value = int(flag)
            if value or give_up():
                return value
            # each look takes the interpreter from the training thread
            time.sleep(min(_LONGEST_S, max(_POLL_S, (time.monotonic() - began) / 16)))

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Keep the tensor's memory from being reused before the stream has reached this call."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether this thread records a graph, so that nothing that it queues runs now."""
        kind = accelerator_in_use()
        ask = getattr(torch_module(kind), "is_current_stream_capturing", None) if kind else None
        return ask is not None and bool(ask())

    def wait_for_copies(self) -> None:
        """Return when every copy that was queued so far has ended."""
        for stream in self._copying.values():
            stream.synchronize()

    def synchronize(self) -> None:
        """Return when all work that was queued on this thread's device is done."""
        if accelerator_in_use():
            torch.accelerator.synchronize()

    def pin(self, address: int, size_bytes: int, device: int | None) -> bool:
        """Pin host memory, until `unpin`. Returns whether it is pinned now.

        If pinning fails, or torch has no call for it (all but CUDA and ROCm), copies are slower but
        correct. `device`: the device number to use, if the calling thread has no current device or
        another one.
        """
        if accelerator_in_use() != "cuda":
            return False
        # a thread without a current device of its own would use the first GPU
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
            if error:
                _forget_error()
                log.warning(
                    "keepstep: cudaHostRegister failed (%d); copies will be slow"
                    " [accelerator.register_failed]",
                    error,
                )
        return not error

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        # at interpreter exit, the CUDA context may already be gone
        with contextlib.suppress(RuntimeError):
            torch.cuda.cudart().cudaHostUnregister(address)


# --- many copies in one call of the CUDA runtime --------------------------------------------------


class CopyBatch(NamedTuple):
    """Copies of plain bytes, as the runtime reads them: addresses, and sizes in bytes."""

    targets: array[int]
    sources: array[int]
    sizes: array[int]


class DeviceToHostCopies:
    """Copies from tensors of one device into memory of the host that are queued again and again.
    All addresses must stay as they are.

    `all`: targets and sources. `batch`: those that are plain bytes on both sides. `rest`: the
    others.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.all = list(targets), list(sources)
        self.rest: tuple[list[Tensor], list[Tensor]] = [], []
        plain: list[tuple[Tensor, Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if _is_bytes(source) and target.is_contiguous() and target.dtype == source.dtype:
                plain.append((target, source))
            else:
                self.rest[0].append(target)
                self.rest[1].append(source)
        self.batch = CopyBatch(
            array("Q", [target.data_ptr() for target, _ in plain]),
            array("Q", [source.data_ptr() for _, source in plain]),
            array("Q", [source.nbytes for _, source in plain]),
        )


def _is_bytes(tensor: Tensor) -> bool:
    """Whether the tensor's bytes, as they lie, are its value."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.nbytes > 0
        and owns_full_storage(tensor)
    )


class _Location(ctypes.Structure):
    """`cudaMemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_ON_DEVICE, _IN_HOST = 1, 2  # cudaMemLocationType
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_NO_FAIL_INDEX = 13
"""The first CUDA version whose `cudaMemcpyBatchAsync` takes no `failIdx`."""


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; None for another kind of torch."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}", os.RTLD_NOLOAD) if major else None
    except OSError:
        return None


@functools.cache
def _batch_call() -> BatchCopyCall | None:
    """`cudaMemcpyBatchAsync` of that runtime; None if it has none (before CUDA 12.8)."""
    runtime = _runtime()
    if runtime is None or not hasattr(runtime, "cudaMemcpyBatchAsync"):
        log.debug("keepstep: no cudaMemcpyBatchAsync here: copies are queued one by one")
        return None
    return BatchCopyCall(runtime, major=int(str(torch.version.cuda).partition(".")[0]))


class BatchCopyCall:
    """`cudaMemcpyBatchAsync` of a runtime. Once it has failed, it is not called again: the driver
    may be older than the runtime."""

    def __init__(self, runtime: Any, *, major: int) -> None:
        """`major`: the runtime's version."""
        self._runtime, self._major, self._works = runtime, major, True

    def __call__(self, batch: CopyBatch, device: int, stream: int) -> bool:
        """Queue the copies in the stream with this handle; False if they must be queued otherwise.

        Copies that were queued before a failure may be queued again: they come after, in the same
        stream.
        """
        if not self._works:
            return False
        attributes = _Attributes(
            _STREAM_ORDER, _Location(_ON_DEVICE, device), _Location(_IN_HOST, 0), 0
        )
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        lists = [ctypes.c_void_p(addresses.buffer_info()[0]) for addresses in batch]
        error = self._runtime.cudaMemcpyBatchAsync(
            *lists,
            ctypes.c_size_t(len(batch.sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *([ctypes.byref(failed)] if self._major < _NO_FAIL_INDEX else []),
            ctypes.c_void_p(stream),
        )
        if error:
            self._works = False
            self._runtime.cudaGetLastError()
            log.debug("keepstep: cudaMemcpyBatchAsync failed (%d): not called again", error)
        return not error


def _forget_error() -> None:
    """After a call that failed: torch would raise its error in whatever this thread does next."""
    if (runtime := _runtime()) is not None:
        runtime.cudaGetLastError()


_HERE = Accelerator()


def current_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return _HERE
