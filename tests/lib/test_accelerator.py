"""Saves from an accelerator, whatever it does when: the code that ships, on a simulated device.

`Checkpointer.save`, `SnapshotMaker`, `PendingImage` and `SaveThread` with its thread run as they
are; the sidecar is a table of slots in this process. After each thing that a stream runs, and
wherever threads change places, the process might be killed: so then, and not only at the end,
whatever is sealed in a slot must be a whole image of its step, and no slot may have been erased
before its time.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import os
import random
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import keepstep
from keepstep import checkpointer as checkpointers
from keepstep.client import copying, session
from keepstep.client.slot import SlotMapping
from keepstep.errors import TornError, UsageError
from keepstep.image import Layout, TensorRole, TensorSpec
from keepstep.save import frozen_parameters
from keepstep.save.save_thread import SaveThread
from keepstep.state import accelerator, rng
from keepstep.steps import Epoch, EpochId
from keepstep.wire.trainer import LayoutAccepted, SlotGranted
from tests.lib.simulated import Device, Event, Simulated, Stream, Stuck

_PLACES = (torch.device("cuda", 0), torch.device("cuda", 1))


class Slots:
    """What a sidecar knows of the slots of one rank: the session and the client of an saver."""

    connected, lease_token, run, rank, path, archive, whole = True, "lease", "run", 0, "", False, ""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.mappings: dict[str, SlotMapping] = {}
        self.bases: dict[Any, SlotMapping] = {}
        self.base = ""
        self.images: dict[str, int] = {}
        self.generation = 0
        self.expected: dict[int, dict[str, bytes]] = {}
        self.taken: dict[str, int] = {}
        self.reached: dict[int, int] = {}
        self.staged: list[int] = []
        self.discarded: list[int] = []
        self.wrong: list[str] = []

    # --- what an saver calls -------------------------------------------------------------------

    def call(self, route: str, request: Any, _: object, **__: object) -> Any:
        if route == "/v1/layout":
            return self._lay_out(request)
        if route == "/v1/staged":
            self.images[request.slot] = request.step
            self.staged.append(request.step)
            mapping = self.mappings[request.slot]
            if mapping.control().step != request.step:
                self.wrong.append(f"step {request.step} is staged, and not sealed")
        elif route == "/v1/discard":
            self.discarded.append(request.step)
        elif route == "/v1/skipped":
            return {}
        return self._grant()

    def _lay_out(self, request: Any) -> LayoutAccepted:
        header = base64.b64decode(request.header)
        layout = Layout.parse(memoryview(header))
        self.mappings.clear()
        self.images.clear()
        for slot in "ab":
            path = self._directory / f"{slot}-{layout.id}"
            if not path.exists():
                path.write_bytes(header.ljust(layout.size_bytes, b"\0"))
            self.mappings[slot] = SlotMapping(str(path), layout)
        self._lay_out_base(request)
        return LayoutAccepted(layout=layout.id, slots=2, slot_bytes=layout.size_bytes)

    def _lay_out_base(self, request: Any) -> None:
        self.base = ""
        if not request.base:
            return
        header = base64.b64decode(request.base)
        layout = Layout.parse(memoryview(header))
        # filled already, or a new one
        number = len(self.bases) if request.base_step is None else request.base_step.step
        path = self._directory / f"base-{number}-{layout.id}"
        if request.base_step is None:
            path.write_bytes(header.ljust(layout.size_bytes, b"\0"))
        else:
            path = Path(self.bases[layout.id, number].path)
        self.base = str(path)
        self._mapped_base = SlotMapping(self.base, layout)

    def _grant(self) -> SlotGranted:
        slot = min(self.mappings, key=lambda mapping: self.images.get(mapping, -1))
        self.generation += 1
        path = self.mappings[slot].path
        return SlotGranted(slot=slot, path=path, generation=self.generation, base=self.base)

    def _base_of(self, mapping: SlotMapping) -> SlotMapping | None:
        """The sealed base to which a sealed image refers."""
        if (ref := mapping.control().base) is None:
            return None
        key = ref.layout, ref.step.step
        if key not in self.bases:
            self.bases[key] = self._mapped_base
        if not ref.matches_control_page(self.bases[key].control()):
            self.wrong.append(f"{ref} is no base that is sealed")
        return self.bases[key]

    def close(self, *_: object, **__: object) -> None:
        pass

    forbid_further_calls = release_lease = report_warning = close

    # --- what must be true at any moment -------------------------------------------------------

    def watch(self) -> None:
        for slot, mapping in self.mappings.items():
            try:
                step = mapping.control().step
            except TornError:
                step = None
            extras = mapping.layout.extras_begin
            if b"\x07" in bytes(mapping.memory[mapping.layout.control_begin :]):
                self.wrong.append("a slot is erased with what is not yet zero")
            if step is not None:
                held = bytes(mapping.memory[extras : extras + mapping.control().extras_bytes])
                values = held.partition(b',"metadata"')[0].removesuffix(b"}")
                if not values.endswith(b",%d]" % step):
                    self.wrong.append(f"step {step} is sealed with other values: {held!r}")
                base = self._base_of(mapping)
                for name, data in self.expected[step].items():
                    holder = mapping
                    if base is not None and name in base.layout.entries:
                        holder = base
                    entry = holder.layout.entries[name]
                    if holder.memory[entry.begin : entry.end] != data:
                        self.wrong.append(f"step {step} is sealed, and {name} is torn")
            elif slot in self.images and self.reached.get(self.taken[slot], 0) < len(_PLACES):
                self.wrong.append(
                    f"step {self.images[slot]} was erased before devices came to {self.taken[slot]}"
                )
            if step is None:
                self.images.pop(slot, None)


class Model(nn.Module):
    """Layers on both devices, one of them with strides of its own; a buffer each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            [torch.zeros(8), torch.zeros(16, 4).t(), torch.zeros(4), torch.zeros(())]
        )
        self.frozen = nn.ParameterList(
            [nn.Parameter(torch.zeros(64), requires_grad=False) for _ in range(3)]
        )
        for at in range(2):
            self.register_buffer(f"seen{at}", torch.zeros(4))


class Trainer:
    """A training script on simulated devices, beside the same on plain memory."""

    def __init__(self, slots: Slots, device: Device, *, lazy: bool = True) -> None:
        self.slots, self.device = slots, device
        self.step, self.gone = 0, False
        self.model, self.twin = Model(), Model()
        self.optimizers = [self._optimizer(model) for model in (self.model, self.twin)]
        for optimizer in self.optimizers:
            optimizer.step()  # makes its state
        wave = torch.tensor([1 + 2j, 3 - 4j]).conj()
        self.beside = {  # on the host
            "host": torch.zeros(3),
            "spins": torch.arange(25.0).to(torch.complex128),
            "rows": torch.arange(40.0).view(5, 8)[:, ::2],
            "many": torch.arange(100),
            "turned": torch.arange(12.0).view(3, 4).t(),
            "none": torch.zeros(0),
        }
        self.extra = {"on": torch.zeros(3), **self.beside, "wave": wave, "step": 0}
        state = [part["momentum_buffer"] for part in self.optimizers[0].state.values()]
        kept = [*self.model.parameters(), *self.model.buffers(), *state]
        for at, optimizer in enumerate([*kept, self.extra["on"], self.extra["wave"]]):
            device.made(optimizer, _PLACES[at % 2])
        for parameter in self.model.layers:
            device.made(parameter.grad, device.place(parameter))
        for at, optimizer in enumerate(state):
            device.made(optimizer, device.place(self.model.layers[at]))
        parts = {"model": self.model, "optimizer": self.optimizers[0], "extra": self.extra}
        self.checkpointer = keepstep.Checkpointer(parts, lazy=lazy, rng=False, frozen_once=True)
        self.checkpointer._epoch = Epoch(EpochId(1, "00c0ffee"), None)
        saver = self.saver = self.checkpointer._saver
        saver.session = saver._client = slots
        take = saver.await_slot

        def taken(**options: Any) -> Any:
            slot = take(**options)
            slots.taken[slot.grant.slot] = self.step
            return slot

        saver.await_slot = taken
        work = saver._work

        def turn() -> None:
            with contextlib.suppress(Stuck):
                work()
            self.gone = True
            device.turns.leave()

        saver._work = turn
        saver._ensure_thread()
        device.turns.joined(saver._thread)

    def _optimizer(self, model: Model) -> torch.optim.Optimizer:
        for parameter in model.layers:
            parameter.grad = torch.full_like(parameter, -1.0)
        return torch.optim.SGD(model.layers, lr=1.0, momentum=1.0, foreach=False)

    # --- what a script does --------------------------------------------------------------------

    def train(self) -> None:
        for model in (self.model, self.twin):
            for buffer in model.buffers():
                buffer.add_(1)
        self.extra["on"].add_(1)
        for tensor in self.beside.values():
            tensor.add_(1)
        for optimizer in self.optimizers:
            optimizer.step()

    def train_beside(self, before: Callable[[], None] = lambda: None) -> None:
        """The optimizer's step in streams of its own, which fork before what comes `before`."""
        sides = [Stream(self.device, place) for place in _PLACES]
        for side in sides:
            side.wait_stream(self.device.computing(side.place))
        before()
        with contextlib.ExitStack() as stack:
            for side in sides:
                stack.callback(self.device.computing(side.place).wait_stream, side)
                stack.enter_context(self.device.on(side))
            self.train()

    def train_in_forks(self) -> None:
        """The same, and the fence of another optimizer comes before it."""
        self.train_beside(functools.partial(self.checkpointer._fence, decided=False))

    def save(self) -> None:
        self.step += 1
        self.extra["step"] = self.step
        self.slots.expected[self.step] = self._expected()
        for place in _PLACES:
            self.device.computing(place).add(functools.partial(self._reached, self.step))
        self.checkpointer.save(self.step)

    def _reached(self, step: int) -> None:
        self.slots.reached[step] = self.slots.reached.get(step, 0) + 1

    def save_without_memory(self) -> None:
        """A copy fails when some were queued."""
        self.device.copies_left = self.device.choose(12)
        self.save()
        self.device.copies_left = None

    def save_interrupted(self) -> None:
        """A signal's handler raises when all copies were queued."""
        submit = self.saver.submit

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        self.saver.submit = interrupted
        with contextlib.suppress(KeyboardInterrupt):
            self.save()
        self.saver.submit = submit

    def change(self) -> None:
        """Behind everybody's back, between the samples of a fingerprint; version counters tell."""
        for model in (self.model, self.twin):
            with torch.no_grad():
                model.layers[1][1, 0].add_(1)

    def change_data(self) -> None:
        """The same, and no version counter tells."""
        for model in (self.model, self.twin):
            model.layers[0].data.add_(1)

    def change_frozen(self) -> None:
        """Something that needs no gradient, past the version counter."""
        for model in (self.model, self.twin):
            model.frozen[self.step % 3].data.add_(1)

    def change_little_frozen(self) -> None:
        """As `change_frozen`, between the samples of the fingerprint."""
        for model in (self.model, self.twin):
            model.frozen[self.step % 3].data[1:2].add_(1)

    def change_frozen_in_place(self) -> None:
        for model in (self.model, self.twin):
            with torch.no_grad():
                model.frozen[self.step % 3].add_(1)

    def unfreeze(self) -> None:
        for model in (self.model, self.twin):
            model.frozen[0].requires_grad_(True)

    def there_and_back(self) -> None:
        """Other weights are swapped in, past the version counters, and back."""
        for add in (1, -1):
            for model in (self.model, self.twin):
                for layer in model.layers:
                    layer.data.add_(add)
            self.wait()

    def offload(self) -> None:
        """Away from the device and back to where it was: other data was in its memory meanwhile."""
        layer = self.model.layers[2]
        place = self.device.place(layer)
        there = layer.data
        layer.data = self.device.made(there.clone(), place)
        self.device.free(there)
        there.copy_(layer.data)
        layer.data = there

    def move(self) -> None:
        """To other memory of the device; the former is given away at once, unless it is held."""
        for layer in self.model.layers:
            there = layer.data
            place = self.device.place(layer)
            layer.data = self.device.made(there.clone(), place)
            self.device.free(there)
        for state in self.optimizers[0].state.values():
            for name, there in state.items():
                if (place := self.device.place(there)) is not None:
                    state[name] = self.device.made(there.clone(), place)
                    self.device.free(there)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether the image on its way refers to this memory."""
        pending = self.saver.pending_image
        return pending is not None and any(lot.uses_storage(storage) for lot in pending.reads)

    def mutate(self) -> None:
        with self.checkpointer.mutating():
            self.change_data()

    def wait(self) -> None:
        self.device.turns.pause()

    def drain(self) -> None:
        assert self.saver.drain(timeout_s=30), "an image is on its way for ever"

    # --- what is right -------------------------------------------------------------------------

    def _expected(self) -> dict[str, bytes]:
        twin = keepstep.state.capture.capture_state(
            {"model": self.twin, "optimizer": self.optimizers[1], "extra": self.extra}
        )
        with torch.utils._python_dispatch._disable_current_modes():
            expected = {leaf.name: _bytes(leaf.tensor) for leaf in twin.tensors}
            # of these there is no twin
            expected["extra.on"] = expected["extra.host"]
            expected["extra.wave"] = _bytes(torch.tensor([1 - 2j, 3 + 4j]))
        return expected

    def end(self) -> None:
        """The training ends in the middle of whatever there is."""
        self.saver._begin_closing()
        self.device.turns.wait_for(lambda: self.gone, 600)
        assert self.gone, "the save thread does not end"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().numpy().tobytes()


EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "0")) or 30

ACTIONS = [
    *["train", "train", "train", "save", "save", "save", "wait", "train_beside", "drain", "mutate"],
    *["change", "change_data", "offload", "save_without_memory", "save_interrupted"],
    *["train_in_forks", "there_and_back"],
    *["change_frozen", "change_frozen_in_place", "unfreeze", "move"],
]


@contextlib.contextmanager
def training(*, pace: str = "any", seed: int = 0, lazy: bool = True) -> Iterator[Trainer]:
    """A trainer on a device whose schedule is `seed`'s; checks what was wrong at any moment."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        slots = Slots(Path(folder))
        device = Device(chance.randrange, slots.watch, pace)
        patch.setattr(accelerator, "_HERE", Simulated(device))
        patch.setattr(frozen_parameters, "_LEAST_BYTES", 1)
        patch.setattr(frozen_parameters, "_LEAST_SHARE", 0.0)
        patch.setattr(
            session.ConditionNotifier,
            "wait_for_condition",
            lambda _, condition, *, timeout_s: device.turns.wait_for(condition, timeout_s),
        )
        patch.setenv("KEEPSTEP_SOCKET", "/nowhere")
        trainer = Trainer(slots, device, lazy=lazy)
        device.holds = trainer.holds
        try:
            with device:
                yield trainer
            assert not slots.wrong, slots.wrong
        finally:
            device.turns.stop()
            trainer.saver._thread.join(60)
            trainer.checkpointer._end.detach()
            checkpointers._LIVE.discard(trainer.checkpointer)


@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=20),
    pace=st.sampled_from(["late", "any", "early"]),
    seed=st.integers(0, 1 << 32),
    lazy=st.booleans(),
)
@settings(max_examples=EXAMPLES)
def test_no_schedule_of_device_work_tears_an_image_deadlocks_or_erases_a_slot_early(
    actions, pace, seed, lazy
):
    with training(pace=pace, seed=seed, lazy=lazy) as trainer:
        trainer.save()
        for action in actions:
            getattr(trainer, action)()
        trainer.end()


def test_frozen_device_tensors_are_copied_once_until_they_change():
    with training() as trainer:
        held = []
        for action in ["wait", "change_frozen_in_place", "unfreeze"]:
            for act in [action, "save", "drain", "train", "save", "drain", "train"]:
                getattr(trainer, act)()
            held.append((len(trainer.slots.bases), len(trainer.checkpointer._frozen.base.leaves)))
    assert held == [(1, 3), (2, 2), (3, 1)]
    assert trainer.slots.staged == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eager", [False, True])
def test_a_write_to_one_frozen_element_on_a_device_is_detected_and_logged(seed, eager, caplog):
    with training(seed=seed) as trainer:
        for action in ["save", "drain", "train"] * 2:
            getattr(trainer, action)()
        trainer.saver._eager = eager
        trainer.change_little_frozen()
        for action in ["save", "drain", "train"] * 2:
            getattr(trainer, action)()
        assert "model.frozen.2" not in trainer.checkpointer._frozen.base.names
    assert trainer.slots.staged == [1, 2, 4], "the image with the former value is given up"
    messages = [
        message for message in caplog.messages if "past torch's version counters" in message
    ]
    assert len(messages) == 1
    assert "model.frozen.2" in messages[0]


@pytest.mark.parametrize("lazy", [True, False])
def test_a_script_without_conflicting_changes_loses_no_step_on_a_device(lazy):
    """Else the property would hold for code that discards everything."""
    with training(lazy=lazy) as trainer:
        ways = ["train", "save", "train_beside", "save", "train_in_forks", "save"]
        for action in [*ways * 3, "mutate", "save", "drain"]:
            getattr(trainer, action)()
    assert trainer.slots.staged == list(range(1, 11))
    assert trainer.checkpointer.stats.discarded == 0


def test_the_fence_waits_for_the_copies_but_not_for_other_device_work():
    with training(pace="late") as trainer:
        trainer.save()
        pending = trainer.saver.pending_image
        trainer.checkpointer._fence(decided=False)
        assert all(event.done for event in pending.done.values()), "something still reads"
        assert not pending.judged.is_set(), "the device had to come to the fence"
        trainer.checkpointer.fence()
        assert pending.judged.is_set()
        trainer.train()
        trainer.save()  # waits for that, and finds a slot
        trainer.drain()
    assert trainer.slots.staged == [1, 2]


# --- what it found, each alone ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_an_image_of_two_devices_waits_for_both(seed):
    """One stream was used for all; a copy from another device is queued on that one's own, which
    neither the erased page nor the event of the first knows of."""
    with training(pace="late", seed=seed, lazy=False) as trainer:
        for action in ["save", "train", "save", "train", "save", "drain"]:
            getattr(trainer, action)()
    assert trainer.slots.staged == [1, 2, 3]


@pytest.mark.parametrize("failure", ["save_without_memory", "save_interrupted"])
@pytest.mark.parametrize("seed", range(4))
def test_a_failed_save_erases_its_slot_only_after_the_device_has_finished_with_it(seed, failure):
    """The host erased the slot at once, with copies into it under way."""
    with training(pace="late", seed=seed) as trainer:
        for action in [
            "save",
            "drain",
            "save",
            "drain",
            "train",
            failure,
            "train",
            "save",
            "drain",
        ]:
            getattr(trainer, action)()
    assert trainer.slots.staged == [1, 2, 4]


@pytest.mark.parametrize("seed", range(4))
def test_device_memory_that_the_script_frees_is_not_reused_while_it_is_copied(seed):
    with training(pace="late", seed=seed) as trainer:
        for action in ["save", "offload", "train", "save", "offload", "drain"]:
            getattr(trainer, action)()
    assert trainer.slots.staged == [1, 2]


@pytest.mark.parametrize("pace", ["late", "any", "early"])
@pytest.mark.parametrize("seed", range(4))
def test_state_that_is_reallocated_between_steps_loses_no_step_and_switches_to_eager_copies(
    pace, seed
):
    with training(pace=pace, seed=seed) as trainer:
        for action in ["train", "save", "move"] * 5 + ["drain"]:
            getattr(trainer, action)()
        assert trainer.saver.copies_eagerly
    assert (trainer.slots.staged, trainer.slots.discarded) == ([1, 2, 3, 4, 5], [])


# --- the seam over torch, as far as it can be seen without a device ------------------------------


def test_only_methods_of_the_generic_torch_stream_and_event_interface_are_called():
    for made, real in ((Stream, torch.Stream), (Event, torch.Event)):
        called = {name for name in vars(made) if not name.startswith("_")}
        ours = {"add", "can_run", "run"}
        assert {name for name in called - ours if not hasattr(real, name)} == set()


def test_a_stream_is_active_only_inside_its_context(monkeypatch):
    class One:
        def __init__(self, at: int) -> None:
            self.device = _PLACES[at]

    now, current = {device: One(at) for at, device in enumerate(_PLACES)}, [_PLACES[0]]

    def put(stream: One) -> None:
        now[stream.device], current[0] = stream, stream.device

    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device=None: now[device or current[0]]
    )
    monkeypatch.setattr(torch.accelerator, "set_stream", put)
    before, side = dict(now), One(1)
    with contextlib.suppress(KeyError), accelerator.Accelerator().use_stream(side):
        assert (now[_PLACES[1]], current) == (side, [_PLACES[1]])
        raise KeyError
    assert (now, current) == (before, [_PLACES[0]])


def test_an_unused_device_is_not_initialised(monkeypatch):
    monkeypatch.setattr(accelerator, "accelerator_kind", lambda: "cuda")
    device = accelerator.Accelerator()
    assert device.current_device() is None
    assert not device.is_capturing()
    device.synchronize()
    device.wait_for_copies()
    assert "cuda" not in rng.capture_all_generators()


# --- to a device, through pinned buffers ---------------------------------------------------------


class Late(accelerator.Accelerator):
    """Two devices in memory of the host that copy when something waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[int, int] = {}
        self.can_pin, self.fails = True, False
        self.carried = 0
        self._places: dict[int, torch.device] = {}
        self._now = threading.local()
        self._computing = {place: LateStream() for place in _PLACES}

    def made(self, tensor: Tensor, place: torch.device) -> Tensor:
        self._places[tensor.untyped_storage().data_ptr()] = place
        return tensor

    def device_of(self, tensor: Tensor) -> torch.device | None:
        return self._places.get(tensor.untyped_storage().data_ptr())

    def current_device(self) -> int | None:
        return 0

    def create_stream(self, device: torch.device) -> Any:
        return LateStream()

    def get_compute_stream(self, device: torch.device) -> Any:
        return self._computing[device]

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self._now.stream = stream
        yield
        del self._now.stream

    def copy(self, targets: Any, sources: Any) -> None:
        if self.fails:
            raise RuntimeError("no such device")
        for target, source in zip(targets, sources, strict=True):
            (begin, size), *_ = self.pins.items()
            assert begin <= source.data_ptr()
            assert source.data_ptr() + source.nbytes <= begin + size
            self._now.stream.queue.append(functools.partial(target.copy_, source))
            self.carried += source.nbytes

    def pin(self, address: int, size_bytes: int, device: int | None) -> bool:
        if self.can_pin:
            self.pins[address] = size_bytes
        return self.can_pin

    def unpin(self, address: int) -> None:
        del self.pins[address]


class LateStream:
    """Runs what is queued in it when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        for work in self.queue[self.done : until]:
            work()
        self.done = max(until, self.done)

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=functools.partial(self.run, len(self.queue)))

    def wait_stream(self, other: LateStream) -> None:
        other.synchronize()

    def synchronize(self) -> None:
        self.run(len(self.queue))


@pytest.fixture
def late(monkeypatch):
    here = Late()
    monkeypatch.setattr(accelerator, "_HERE", here)
    monkeypatch.setattr(copying, "_BUFFER_BYTES", 4096)
    monkeypatch.setattr(copying, "_WORTH_BYTES", 4096)
    return here


def to_devices(late: Late) -> tuple[list[copying.TensorCopy], list[Tensor]]:
    """Copies of tensors of all sizes and kinds, and what must come of them."""
    sources = [
        *(torch.arange(size, dtype=torch.float32) for size in (0, 1, 7, 1023, 1024, 1025, 30_000)),
        *(torch.full((size % 50,), size % 251, dtype=torch.uint8) for size in range(600)),
        torch.tensor(True),
        torch.randn(33, dtype=torch.complex128),
        torch.randn(1000).bfloat16(),
        torch.randn(40, 50),
    ]
    copies = []
    for at, source in enumerate(sources):
        target = nn.Parameter(torch.zeros_like(source), requires_grad=False)
        copies.append(copying.TensorCopy(late.made(target, _PLACES[at % 2]), source))
    over = late.made(torch.zeros(50, 40), _PLACES[0]).t()  # of other strides
    as_other = late.made(torch.zeros(40, 50, dtype=torch.float64), _PLACES[0])
    copies += [copying.TensorCopy(over, sources[-1]), copying.TensorCopy(as_other, sources[-1])]
    return copies, [*sources, sources[-1], sources[-1].double()]


def test_bytes_reach_devices_through_pinned_buffers_which_are_not_used_too_early(late):
    copies, expected = to_devices(late)
    versions = [copy.target._version for copy in copies]
    copying.run_transfers(copying.Transfers(copies=copies))
    assert all(map(torch.equal, (copy.target for copy in copies), expected))
    assert late.carried == sum(copy.source.nbytes for copy in copies[:-2])
    assert not late.pins
    grown = [copy.target._version > was for copy, was in zip(copies, versions, strict=True)]
    assert all(grew for grew, copy in zip(grown, copies, strict=True) if copy.source.nbytes)


def test_bytes_reach_devices_without_pinned_memory_too(late):
    late.can_pin = False
    copies, expected = to_devices(late)
    copying.run_transfers(copying.Transfers(copies=copies))
    assert all(map(torch.equal, (copy.target for copy in copies), expected))
    assert not late.carried


def test_a_copy_to_a_device_that_fails_is_raised_and_leaves_nothing_pinned(late):
    late.fails = True
    with pytest.raises(RuntimeError, match="no such device"):
        copying.run_transfers(copying.Transfers(copies=to_devices(late)[0]))
    assert not late.pins


# --- slots that are pinned beforehand ------------------------------------------------------------


@pytest.fixture
def an_agent(tmp_path, late):
    """An saver of a process that uses a device, and the paths of the slots of its layout."""
    table = Slots(tmp_path)
    layout = Layout.build(
        [TensorSpec("w", "F32", (4,), TensorRole.PARAMS)],
        rank=0,
        world=1,
        aliases={},
        skeleton="[]",
        extras_capacity_bytes=100,
        parameters={},
    )
    table._lay_out(SimpleNamespace(header=base64.b64encode(layout.header), base=""))
    paths = [mapping.path for mapping in table.mappings.values()]
    saver = SaveThread("/nowhere", rank=0, world=1)
    saver.use_layout(layout)
    return saver, paths


def test_further_slots_are_mapped_and_pinned_before_their_first_use(an_agent, late):
    saver, (path, *others) = an_agent
    gone = f"{path}-gone"
    saver._keep(SlotGranted(slot="a", path=path, others=(gone, *others)))
    assert saver.waiting_slot is not None, "it waits for no other slot"
    saver._preparing.join(10)
    assert saver._mappings.keys() == {path, *others}
    assert len(late.pins) == 2
    again = saver._mappings[others[0]]
    saver._held = None
    saver._keep(SlotGranted(slot="b", path=others[0], others=(path,)))
    assert saver.waiting_slot.mapping is again


def test_slots_of_a_former_layout_are_unpinned_and_unmapped(an_agent, late):
    saver, (path, *others) = an_agent
    saver._keep(SlotGranted(slot="a", path=path, others=tuple(others)))
    saver._preparing.join(10)
    saver.use_layout(SimpleNamespace(id="another"))
    deadline = time.monotonic() + 10
    while late.pins and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not late.pins
    assert not saver._mappings


# --- the batch call of the CUDA runtime -----------------------------------------------------------

RUNTIME = """
#include <stddef.h>
#include <string.h>

enum { DEVICE = 1, HOST = 2, STREAM_ORDER = 1 };
struct location { int type; int id; };
struct attributes { int order; struct location source, target; unsigned flags; };

int calls, fails, forgotten;

int cudaGetLastError(void) { return ++forgotten; }

int cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count,
                         struct attributes *attrs, size_t *first, size_t many
#ifdef TWELVE
                         , size_t *failed
#endif
                         , void *stream)
{
    calls++;
    if (many != 1 || *first != 0 || stream != (void *)0x7f0000001234) return 1;
    if (attrs->order != STREAM_ORDER || attrs->flags != 0) return 2;
    if (attrs->source.type != DEVICE || attrs->source.id != 3) return 3;
    if (attrs->target.type != HOST || attrs->target.id != 0) return 4;
#ifdef TWELVE
    if (*failed != 0) return 5;
#endif
    for (size_t at = 0; at < count; at++) {
        if (fails && at == 1) return 801;
        memcpy(dsts[at], srcs[at], sizes[at]);
    }
    return 0;
}
"""
"""What the headers of CUDA 12.8 and 13 declare, over memory of the host."""


@pytest.fixture(params=[12, 13])
def runtime(request, tmp_path):
    """A runtime of this version, compiled from C."""
    made, source = tmp_path / "libcudart.so", tmp_path / "cudart.c"
    source.write_text(RUNTIME)
    define = ["-DTWELVE"] if request.param == 12 else []
    compiler = sysconfig.get_config_var("CC").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", *define, "-o", made, source], check=True)
    library = ctypes.CDLL(str(made))
    counts = {name: ctypes.c_int.in_dll(library, name) for name in ("calls", "fails", "forgotten")}
    return accelerator.BatchCopyCall(library, major=request.param), SimpleNamespace(**counts)


def some_copies() -> tuple[list[Tensor], list[Tensor]]:
    sources = [
        torch.arange(6.0).reshape(2, 3),
        torch.zeros(0),
        torch.arange(8).reshape(2, 4).t(),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([1 + 2j]).conj(),
        nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)),
    ]
    return [torch.full(source.shape, 9, dtype=source.dtype) for source in sources], sources


def test_the_cuda_runtime_copies_contiguous_tensors_in_one_batch_call(runtime):
    call, library = runtime
    targets, sources = some_copies()
    copies = accelerator.DeviceToHostCopies(targets, sources)
    assert call(copies.batch, 3, 0x7F0000001234)
    assert int(library.calls.value) == 1
    assert all(torch.equal(targets[at], sources[at]) for at in (0, 3, 5))
    assert [id(tensor) for tensor in copies.rest[1]] == [id(sources[at]) for at in (1, 2, 4)]
    assert all((targets[at] == 9).all() for at in (2, 4)), "these are not their bytes"


def test_a_runtime_that_fails_in_the_middle_is_not_called_again_and_leaves_no_error(runtime):
    call, library = runtime
    targets, sources = some_copies()
    library.fails.value = 1
    batch = accelerator.DeviceToHostCopies(targets, sources).batch
    assert [call(batch, 3, 0x7F0000001234) for _ in range(3)] == [False] * 3
    assert (library.calls.value, library.forgotten.value) == (1, 1)


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_all_copies_arrive_whether_or_not_there_is_a_batch_call(monkeypatch, works, pinned):
    class Here(accelerator.Accelerator):
        def copy_batch(self, batch: accelerator.CopyBatch, place: torch.device) -> bool:
            for target, source, size in zip(*batch, strict=True):
                if works:
                    ctypes.memmove(target, source, size)
            return works

    targets, sources = some_copies()
    Here().queue_repeated_copies(
        accelerator.DeviceToHostCopies(targets, sources), _PLACES[0], pinned=pinned
    )
    assert all(map(torch.equal, targets, sources))


def test_no_batch_copy_is_attempted_without_a_suitable_cuda_runtime(monkeypatch, caplog):
    for version in (None, "0.1"):
        accelerator._runtime.cache_clear()
        accelerator._batch_call.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        copies = accelerator.DeviceToHostCopies(*some_copies())
        with caplog.at_level("DEBUG", logger="keepstep"):
            for _ in range(2):
                assert not accelerator.Accelerator().copy_batch(copies.batch, _PLACES[0])
    accelerator._runtime.cache_clear()
    accelerator._batch_call.cache_clear()
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 2


# --- devices of a state --------------------------------------------------------------------------


def test_tensors_of_a_device_that_cannot_be_kept_are_refused_with_what_to_do():
    with pytest.raises(UsageError, match=r"model\.w: tensors on 'mps' .*one stream.*CUDA.*CPU"):
        accelerator.check_device(torch.device("mps"), "model.w")
    with pytest.raises(UsageError, match=r"model\.w: tensors on 'xpu' .*accelerator here is none"):
        accelerator.check_device(torch.device("xpu", 1), "model.w")
    accelerator.check_device(torch.device("cpu"), "model.w")


class FakeDevices:
    """`torch.xpu` with so many devices, of which the second is this thread's."""

    def __init__(self, count: int) -> None:
        self.states = [torch.tensor([at, 7], dtype=torch.uint8) for at in range(count)]
        self.get_rng_state = self.states.__getitem__
        self.set_rng_state = lambda state, at=1: self.states.__setitem__(at, state)
        self.device_count = self.states.__len__

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 1


@pytest.fixture
def fake(monkeypatch):
    def has(kind: str, count: int) -> FakeDevices:
        made = FakeDevices(count)
        monkeypatch.setattr(accelerator, "accelerator_kind", lambda: kind)
        monkeypatch.setattr(accelerator, "torch_module", lambda _: made)
        return made

    return has


def test_the_random_generators_of_all_devices_are_restored(fake, caplog):
    fake("xpu", 3)
    kept = rng.capture_all_generators()
    assert kept["xpu"] == [b"\0\7", b"\1\7", b"\2\7"]
    other = fake("xpu", 3)
    for state in other.states:
        state.zero_()
    rng.apply_generators(kept)
    assert [state.tolist() for state in other.states] == [[0, 7], [1, 7], [2, 7]]
    assert not caplog.records
    fewer = fake("xpu", 2)
    rng.apply_generators(kept)
    assert [state.tolist() for state in fewer.states] == [[0, 7], [1, 7]]
    assert "3 devices (xpu), and 2 are here" in caplog.text


def test_random_states_of_another_device_type_cause_a_warning_and_are_ignored(fake, caplog):
    here = fake("xpu", 1)
    rng.apply_generators({"cuda": [b"\1\2"]})
    assert here.states[0].tolist() == [0, 7]
    assert "1 devices (cuda), and 0 are here" in caplog.text


def test_the_current_device_is_named_without_an_index_and_other_devices_with_one(fake):
    fake("xpu", 3)
    assert accelerator.device_name(torch.device("xpu", 1)) == "xpu"
    assert accelerator.device_name(torch.device("xpu", 2)) == "xpu:2"
    assert accelerator.device_name(torch.device("cpu")) == "cpu"
    assert accelerator.parse_device_name("xpu") == torch.device("xpu", 1)
    assert accelerator.parse_device_name("xpu:2") == torch.device("xpu", 2)
    assert accelerator.parse_device_name("xpu:9") == torch.device("xpu", 1)
    assert [accelerator.parse_device_name(device).type for device in (None, "cpu", "cuda:0")] == [
        "cpu"
    ] * 3
