"""A simulated accelerator behind the seam, and threads that take turns: every order by one choice.

Memory of the device is CPU memory that is marked; in the thread that trains, torch operations on it
are caught below autograd (version counters move when they are launched, as on a GPU) and queued on
the current stream of the tensors' device. When they run is for `choose` to say: late, early, the
streams interleaved, larger tensors half by half. Copies from a device to the host run on the
*source's* device, in what is its current stream there, and what torch does to their target
afterwards (`conj_physical_`) it does at once, as CUDA's do (pytorch#146286).

Of the two threads, the one that trains and the one that saves, one runs at a time. They take
turns where one waits, and where it calls a stream or an event. Time passes when nothing else can
run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from keepstep.state.accelerator import Accelerator, CopyBatch

Choose = Callable[[int], int]


class Stuck(Exception):
    """All wait for each other."""


class Event:
    """Done once the stream that it was recorded in came to it."""

    def __init__(self, device: Device) -> None:
        self._device, self.done = device, False

    def synchronize(self) -> None:
        self._device.turns.wait_for(lambda: self.done, None)


class Stream:
    """Runs in order what is queued, as far as it waits for no event."""

    def __init__(self, device: Device, place: torch.device) -> None:
        self._device, self.place = device, place
        self.queue: deque[Callable[[], None] | Event] = deque()
        device.streams.append(self)

    def add(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    @property
    def can_run(self) -> bool:
        return bool(self.queue) and not (
            isinstance(self.queue[0], Event) and not self.queue[0].done
        )

    def run(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, Event):
            head()

    def record_event(self) -> Event:
        event = Event(self._device)
        self.add(lambda: setattr(event, "done", True))
        self._device.turns.pause()
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)
        self._device.turns.pause()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Device(TorchDispatchMode):
    """All streams and all memory of all devices; what this thread does in it is queued."""

    def __init__(self, choose: Choose, watch: Callable[[], None], pace: str = "any") -> None:
        super().__init__()
        self.choose, self.watch, self.pace = choose, watch, pace
        self.streams: list[Stream] = []
        self.turns = Turns(self)
        self._memory: dict[int, tuple[torch.device, torch.UntypedStorage]] = {}
        self._kept: dict[int, set[Stream]] = {}
        self._computing: dict[torch.device, Stream] = {}
        self.copies_left: int | None = None
        """Copies to the host that are queued before one fails; None: none does."""
        self.pinned: dict[int, int] = {}
        """The sizes of pinned parts of host memory, by address."""
        self.holds: Callable[[torch.UntypedStorage], bool] = lambda _: False
        """Whether something refers to memory that the script has let go of."""

    # --- memory ------------------------------------------------------------------------------

    def made(self, tensor: Tensor, place: torch.device) -> Tensor:
        """The same tensor: its memory is the device's from now on."""
        storage = tensor.untyped_storage()
        self._memory[storage.data_ptr()] = place, storage
        return tensor

    def place(self, tensor: Tensor) -> torch.device | None:
        found = self._memory.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found[0]

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self._kept.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream)

    def free(self, tensor: Tensor) -> None:
        """The script's last reference goes. Unless there are others, other data is in its memory
        from here on, as seen by the computing stream: the allocator gives it away at once, but for
        streams that it was kept for."""
        place = self.place(tensor)
        assert place is not None
        if self.holds(tensor.untyped_storage()):
            return
        computing = self.computing(place)
        for stream in self._kept.pop(tensor.untyped_storage().data_ptr(), ()):
            computing.wait_stream(stream)
        computing.add(lambda: tensor.data.fill_(-99))

    # --- streams -----------------------------------------------------------------------------

    def computing(self, place: torch.device) -> Stream:
        if place not in self._computing:
            self._computing[place] = Stream(self, place)
        return self._computing[place]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.computing(stream.place)
        self._computing[stream.place] = stream
        try:
            yield
        finally:
            self._computing[stream.place] = before

    @property
    def can_run(self) -> bool:
        return any(stream.can_run for stream in self.streams)

    def step(self) -> None:
        """Run one thing of a stream that can."""
        able = [stream for stream in self.streams if stream.can_run]
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch._C._AutoDispatchBelowADInplaceOrView(),
        ):
            able[self.choose(len(able))].run()
            self.watch()

    def _finish(self, stream: Stream) -> None:
        """An operation has a result for the host, which has locks and waits; streams need none."""
        event = Event(self)
        stream.add(lambda: setattr(event, "done", True))
        while not event.done:
            if not self.can_run:
                raise Stuck("a stream waits for what never comes")
            self.step()

    def run_some(self) -> None:
        """What may happen at any time."""
        while self.pace != "late" and self.can_run and (self.pace == "early" or self.choose(2)):
            self.step()

    # --- operations --------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {place for tensor in tensors if (place := self.place(tensor)) is not None}
        if not places or func.is_view:
            return func(*args, **kwargs)
        self.run_some()
        name = func.overloadpacket.__name__
        if name in ("copy_", "_foreach_copy_"):
            into, source = (args[0], args[1]) if name != "copy_" else ([args[0]], [args[1]])
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            for target, tensor in zip(into, source, strict=True):
                self._copy(target, tensor, blocking=blocking)
            return args[0] if name == "copy_" else None
        assert len(places) == 1, f"{func} of tensors on {places}"
        place = places.pop()
        if name in ("equal", "_local_scalar_dense", "nonzero"):
            self._finish(self.computing(place))
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            for part in _halves(args):
                self.computing(place).add(lambda part=part: func(*part, **kwargs))
            return args[0]
        out = func(*args, **kwargs)  # of its shape; the values come when it runs
        self.made(out, place).fill_(-77)
        self.computing(place).add(lambda: out.copy_(func(*args, **kwargs)))
        return out

    def _copy(self, target: Tensor, source: Tensor, *, blocking: bool) -> None:
        place = self.place(source) or self.place(target)
        assert place is not None
        stream = self.computing(place)
        if self.place(source) is None:
            source = source.clone()
        if self.place(target) is None:
            if self.copies_left is not None:
                self.copies_left -= 1
                if self.copies_left < 0:
                    self.copies_left = None
                    raise RuntimeError("injected: no memory for a copy")
            # bytes alone come late; what is to be done with them is done now, to what was there
            if source.is_conj() != target.is_conj():
                target.conj_physical_()
                source = torch._conj(source)
        for to, part in _halves((target, source)):
            stream.add(lambda to=to, part=part: to.copy_(part))
        if blocking:
            self._finish(stream)

    def copy_bytes(self, place: torch.device, target: int, source: int, size: int) -> None:
        """Queue a copy by addresses, which must lie inside what there is."""
        inside = any(
            begin <= source < source + size <= begin + storage.nbytes()
            for begin, (where, storage) in self._memory.items()
            if where == place
        )
        assert inside, f"{size} bytes at {source:#x} are not memory of {place}"
        assert any(
            begin <= target < target + size <= begin + many for begin, many in self.pinned.items()
        ), f"{size} bytes at {target:#x} are not pinned"
        cut = size // 2
        for at, many in ((0, cut), (cut, size - cut)):
            part = functools.partial(ctypes.memmove, target + at, source + at, many)
            self.computing(place).add(lambda part=part: part() and None)


def _halves(args: Sequence[Any]) -> list[list[Any]]:
    """Arguments for one half and for the other, where all tensors have one shape."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    size = tensors[0].shape[0] if tensors[0].dim() else 0
    if size < 2 or any(tensor.shape != tensors[0].shape for tensor in tensors):
        # over the memory of now: the script may give a tensor other memory before this runs
        return [[arg.detach() if isinstance(arg, Tensor) else arg for arg in args]]
    cut = size // 2
    return [
        [arg.narrow(0, begin, count) if isinstance(arg, Tensor) else arg for arg in args]
        for begin, count in ((0, cut), (cut, size - cut))
    ]


class Simulated(Accelerator):
    """The seam, over a `Device`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def device_of(self, tensor: Tensor) -> torch.device | None:
        return self.device.place(tensor)

    def current_device(self) -> int | None:
        return 0

    def zeros(self, size_bytes: int, place: torch.device) -> Tensor:
        zeros = self.device.made(torch.full((size_bytes,), 7, dtype=torch.uint8), place)
        return zeros.zero_()

    def get_compute_stream(self, place: torch.device) -> Any:
        return self.device.computing(place)

    def get_copy_stream(self, place: torch.device) -> Any:
        if place not in self._copying:
            self._copying[place] = Stream(self.device, place)
        return self._copying[place]

    def use_stream(self, stream: Any) -> Any:
        return self.device.on(stream)

    def pinned_zeros_like(self, value: Tensor) -> Tensor:
        with _disable_current_modes():
            return torch.zeros(value.shape, dtype=value.dtype)

    def await_flag(self, flag: Tensor, give_up: Callable[[], bool]) -> int:
        self.device.turns.wait_for(lambda: bool(flag) or give_up(), None)
        return int(flag)

    def copy_batch(self, batch: CopyBatch, place: torch.device) -> bool:
        """A driver may have no such call, or fail in the middle of it."""
        self.device.run_some()
        for target, source, size in zip(*batch, strict=True):
            if self.device.copies_left is not None:
                self.device.copies_left -= 1
            if (self.device.copies_left or 0) < 0 or not self.device.choose(16):
                return False
            self.device.copy_bytes(place, target, source, size)
        return True

    def keep(self, tensor: Tensor, stream: Any) -> None:
        self.device.keep(tensor, stream)

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        for stream in list(self.device.streams):
            stream.synchronize()

    def pin(self, address: int, size_bytes: int, device: int | None) -> bool:
        """As torch on a device without such a call, every now and then."""
        if self.device.choose(4):
            self.device.pinned[address] = size_bytes
        return address in self.device.pinned

    def unpin(self, address: int) -> None:
        self.device.pinned.pop(address, None)


class Turns:
    """Threads of which one runs at a time, and the device in between."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._running = threading.get_ident()
        self._waiting: dict[int, tuple[Callable[[], object], float | None]] = {}
        self._now = 0.0
        self._stuck = False

    def pause(self) -> None:
        """Others may go first."""
        self.wait_for(lambda: True, None)

    def wait_for(self, condition: Callable[[], object], timeout_s: float | None) -> bool:
        """As `Changes.wait_for`."""
        me = threading.get_ident()
        self._device.watch()
        with self._changed:
            deadline = None if timeout_s is None else self._now + timeout_s
            self._waiting[me] = condition, deadline
            if self._running == me:
                self._pass_on()
            self._changed.notify_all()
            while self._running != me and not self._stuck:
                assert self._changed.wait(60), "a thread kept its turn"
            del self._waiting[me]
            if self._stuck:
                raise Stuck(f"{threading.current_thread().name} waits for ever")
            return bool(condition())

    def joined(self, thread: threading.Thread) -> None:
        """Return once a thread that was started waits for its turn."""
        with self._changed:
            assert self._changed.wait_for(lambda: thread.ident in self._waiting, 60)

    def stop(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._stuck = True
            self._changed.notify_all()

    def leave(self) -> None:
        """This thread ends."""
        with self._changed:
            if self._running == threading.get_ident():
                self._pass_on()
                self._changed.notify_all()

    def _pass_on(self) -> None:
        while True:
            ready = [who for who, (condition, _) in self._waiting.items() if condition()]
            count = len(ready) + self._device.can_run
            if not count:
                break
            late = ready and self._device.pace == "late"
            at = self._device.choose(len(ready) if late else count)
            if at < len(ready):
                self._running = ready[at]
                return
            self._device.step()
        until = [(at, who) for who, (_, at) in self._waiting.items() if at is not None]
        if not until:
            self._stuck = True
            return
        self._now, self._running = min(until)
