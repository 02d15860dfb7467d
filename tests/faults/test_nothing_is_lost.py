"""Nothing is lost in silence: whatever struck, later steps are kept, and what was said is true.

A real trainer (this process) and a real sidecar with real memory, socket and drive meet sequences
of faults. More of them: `KEEPSTEP_EXAMPLES=500 pytest tests/faults/test_nothing_is_lost.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import keepstep
from keepstep.errors import NotDurableError, UsageError
from keepstep.steps import StepId
from tests.core.test_states import watched_save_thread  # noqa: F401
from tests.faults import injection
from tests.faults.trainer import digest
from tests.harness import SidecarProcess, eventually, layout_of, verify_image

EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "0"))
_WITHIN_S = 40.0


class Trained:
    """A trainer beside a sidecar: what it saved, what it was told, and whether that was true."""

    def __init__(self, sidecar: SidecarProcess, *, lazy: bool = True) -> None:
        self.sidecar, self.lazy = sidecar, lazy
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.progress = {"n": 0}
        self.step = -1
        self.expected: dict[StepId, str] = {}
        self.floor = self.unbegun = -1
        self.begin()

    def begin(self) -> None:
        """A life: restores what there is."""
        parts = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        self.checkpointer = keepstep.Checkpointer(parts, lazy=self.lazy)
        at = self.checkpointer.restore()
        self.step = at.step if at else -1
        epoch = self.checkpointer.epoch
        assert epoch is not None
        self.epoch, self.reported, self.raised, self.stuck = epoch, 0, 0, False
        if at is not None:
            assert epoch.parent is not None
            assert digest(self.tensors()) == self.expected[epoch.parent], "restored, but not equal"
            assert self.progress["n"] == at.step
        assert self.step >= self.floor, f"step {self.floor} was committed, and {self.step} restored"

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        parts = [
            state[parameter][part]
            for parameter in self.model.parameters()
            for part in ("exp_avg",)
            if state
        ]
        return [*self.model.parameters(), *parts]

    def train(self) -> int:
        """One step of training; returns its number."""
        self.step += 1
        self.progress["n"] = self.step
        self.optimizer.zero_grad()
        self.model(torch.full((2, 8), float(self.step))).square().mean().backward()
        self.optimizer.step()
        self.expected[StepId(self.epoch.id, self.step)] = digest(self.tensors())
        return self.step

    def save(self, around: Any = None) -> bool:
        """Train and save, with something around the call that may raise."""
        step, saves = self.train(), self.checkpointer.stats.saves
        try:
            kept = (
                around(lambda: self.checkpointer.save(step))
                if around
                else (self.checkpointer.save(step))
            )
        except (injection.Injected, injection.Hit, KeyboardInterrupt):
            self.raised += 1
            if self.checkpointer.stats.saves == saves:  # nothing of keepstep's saw this call
                self.unbegun = step
            return False
        self.reported += kept
        return bool(kept)

    def reaches(self, step: int, state: str, timeout_s: float) -> bool:
        """Whether `wait` returns; then that is so."""
        try:
            self.checkpointer.wait(step, state, timeout=timeout_s)
        except (NotDurableError, UsageError):
            return False
        if state == "committed":
            self.check_committed(step)
        return True

    def check_committed(self, step: int) -> None:
        """The drive holds that step, with the bytes of that step; then it must never be lost."""
        step_id = StepId(self.epoch.id, step)
        (shard,) = (self.sidecar.root / str(step_id)).glob("*.safetensors")
        layout, data = layout_of(shard), memoryview(shard.read_bytes())
        assert verify_image(data, layout, path=shard).step_id == step_id
        names = [f"model.{name}" for name, _ in self.model.named_parameters()]
        names += [f"optimizer.state.{name}.exp_avg" for name in names]
        entries = [layout.entries[name] for name in names]
        stored = [
            torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=torch.float32)
            for entry in entries
        ]
        assert digest(stored) == self.expected[step_id], f"{shard} is not step {step}"
        self.floor = step

    def check_counted(self) -> None:
        """Nothing is on its way: every save that returned was staged, or its loss is counted."""
        stats = self.checkpointer.stats
        ended = stats.staged + stats.skipped + stats.discarded
        # where save itself raised, the counting may be what was struck
        assert abs(stats.saves - ended) <= self.raised, stats
        assert stats.staged + stats.discarded >= self.reported, stats

    def recovers(self) -> None:
        """Faults have ended: a step is committed in time, and from there on all is well."""
        deadline = time.monotonic() + _WITHIN_S
        while not (self.supervised() and self.save() and self.reaches(self.step, "committed", 5.0)):
            assert time.monotonic() < deadline, (
                f"no step was committed in {_WITHIN_S:.0f} s: {self.checkpointer.stats}\n"
                + self.sidecar.text()[-3000:]
            )
            time.sleep(0.02)  # a training step stands here
        self.check_counted()

    def supervised(self) -> bool:
        """A sidecar that ended is started again, as `keepstep run` and a kubelet do."""
        if self.sidecar.process is None or self.sidecar.process.poll() is not None:
            self.sidecar.start()
        return True

    def closes(self, timeout_s: float = 20.0) -> bool:
        """Whether `close` returns; then the last step is durable, if its `save` began."""
        try:
            self.checkpointer.close(timeout=timeout_s)
        except NotDurableError:
            return False
        if self.checkpointer.stats.saves and self.unbegun != self.step:
            self.check_committed(self.step)
        return True


class Faults:
    """What may happen to a `TrainedParameters`; each is one name of `EVENTS`."""

    def __init__(self, run: Trained, saver: injection.SaveThreadFault, signals: Any) -> None:
        self.run, self.saver, self.signals = run, saver, signals
        self.sidecar = run.sidecar

    @property
    def alive(self) -> bool:
        return self.sidecar.process is not None and self.sidecar.process.poll() is None

    def train(self, _: int) -> None:
        self.run.save()

    def wait(self, number: int) -> None:
        self.run.reaches(self.run.step, ("staged", "committed")[number % 2], 1.0)

    def wait_for_a_step_never_saved(self, _: int) -> None:
        assert not self.run.reaches(self.run.step + 1, "staged", 0.2)

    def kill_sidecar(self, _: int) -> None:
        if self.alive:
            self.sidecar.kill()

    def start_sidecar(self, _: int) -> None:
        if not self.alive:
            self.sidecar.start()

    def interrupt_sidecar(self, number: int) -> None:
        self.kill_sidecar(0)
        usual = self.sidecar.program
        self.sidecar.program = (*usual[:2], "tests.faults.interrupt", str(1 + number % 60))
        with contextlib.suppress(BaseException):  # it may end before it listens
            self.sidecar.start()
        self.sidecar.program = usual

    def empty_memory(self, _: int) -> None:
        with contextlib.suppress(OSError):  # a sidecar that lives makes slots meanwhile
            self.sidecar.lose_memory()

    def remove_directory(self, _: int) -> None:
        shutil.rmtree(self.sidecar.root, ignore_errors=True)
        self.run.floor = -1

    def remove_socket(self, _: int) -> None:
        self.sidecar.socket.unlink(missing_ok=True)

    def stop_sidecar(self, _: int) -> None:
        if self.alive:
            self.sidecar.process.send_signal(signal.SIGSTOP)

    def continue_sidecar(self, _: int) -> None:
        if self.alive:
            self.sidecar.process.send_signal(signal.SIGCONT)

    def signal_in_save(self, number: int) -> None:
        self.run.save(lambda work: self.signals(1e-5 + number * 2e-6, work))

    def error_in_save(self, number: int) -> None:
        error = injection.Injected("in save") if number % 2 else KeyboardInterrupt()
        self.run.save(lambda work: injection.raising_after(1 + number // 2, error, work))

    def error_in_save_thread(self, number: int) -> None:
        owner, name = injection.CALLS[number % len(injection.CALLS)]
        self.saver.arm(owner, name, after=number // len(injection.CALLS) % 2 == 1)

    def new_life(self, _: int) -> None:
        """Close, whatever that says, and begin again in this process."""
        self.saver.disarm()
        self.continue_sidecar(0)
        if not self.alive or not self.sidecar.socket.exists():
            return
        self.run.closes(2.0)
        self.run.begin()


EVENTS = [name for name in vars(Faults) if name[0] != "_" and name != "alive"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def running(**options: Any):
    """A trainer and a sidecar in directories of their own; whatever was done to them ends."""
    memory = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        sidecar = SidecarProcess("run", memory, place / "volume", place / "log")
        before = os.environ.get("KEEPSTEP_SOCKET")
        os.environ["KEEPSTEP_SOCKET"] = str(sidecar.socket)
        try:
            sidecar.start()
            yield Trained(sidecar, **options)
        finally:
            sidecar.end()
            shutil.rmtree(memory, ignore_errors=True)
            os.environ.pop("KEEPSTEP_SOCKET")
            if before is not None:
                os.environ["KEEPSTEP_SOCKET"] = before


def meet(events: list[tuple[str, int]], *, lazy: bool) -> None:
    """The sequence, then quiet: everything that must hold."""
    with running(lazy=lazy) as run, injection.signals() as signals:
        saver = injection.SaveThreadFault()
        faults = Faults(run, saver, signals)
        try:
            for name, number in events:
                print(f"{time.monotonic():.2f} s: {name} {number}, after step {run.step}")
                getattr(faults, name)(number)
        finally:
            saver.disarm()
            faults.continue_sidecar(0)
        run.recovers()
        assert run.closes(), "the last step was committed, and close() says that it is not"
        last = run.step
        # another sidecar: this one gives the rank to a process that lives on after two seconds only
        run.sidecar.kill()
        run.sidecar.start()
        run.begin()
        assert run.step == last
        run.checkpointer.close()


@settings(
    max_examples=EXAMPLES or 8,
    derandomize=not EXAMPLES,
    database=None,
    phases=[Phase.generate],
    print_blob=True,
)
@pytest.mark.timeout(300 + 20 * EXAMPLES)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 400)), min_size=4, max_size=10),
    st.booleans(),
)
def test_any_sequence_of_faults_loses_no_step_silently(events, lazy):
    meet([("train", 0), *events], lazy=lazy)


TRIVIAL = ("train", "wait", "wait_for_a_step_never_saved", "start_sidecar", "continue_sidecar")


@pytest.mark.parametrize("name", [event for event in EVENTS if event not in TRIVIAL])
def test_a_single_fault_loses_no_step_silently(name):
    meet([("train", 0), ("wait", 1), (name, 7), ("train", 0), ("train", 0)], lazy=True)


@pytest.mark.parametrize("lines", [18, 25])
@pytest.mark.parametrize("error", [injection.Injected("early"), KeyboardInterrupt()], ids=repr)
def test_close_stages_a_last_step_whose_save_ended_early_or_reports_it_as_lost(error, lines):
    for changed in (False, True):
        with running(lazy=True) as run:
            run.save()
            assert not run.save(lambda work: injection.raising_after(lines, error, work))
            if changed:
                run.optimizer.step()
                with pytest.raises(NotDurableError, match=r"1 was not staged.*has changed"):
                    run.checkpointer.close()
            else:
                assert run.closes()


@pytest.mark.parametrize("number", range(40) if EXAMPLES else (1, 3, 5))
def test_the_sidecar_recreates_removed_memory_even_after_an_error_in_its_watcher(number):
    """What watches over memory, slots and volumes begins again after an error."""
    meet([("interrupt_sidecar", number), ("train", 0), ("empty_memory", 0)], lazy=True)


def test_a_signal_at_the_end_of_a_copy_leaves_gradients_enabled(monkeypatch):
    ends = torch.no_grad.__exit__

    def strikes(*_: Any) -> None:
        monkeypatch.setattr(torch.no_grad, "__exit__", ends)
        raise injection.Hit

    def around(work: Any) -> bool:
        monkeypatch.setattr(torch.no_grad, "__exit__", strikes)
        return work()

    with running(lazy=False) as run, torch.enable_grad():
        run.save(around)
        assert run.raised == 1
        assert torch.is_grad_enabled()
        run.recovers()


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("kind", [injection.Injected, KeyboardInterrupt])
def test_an_error_at_any_line_of_save_loses_only_that_step(kind, lazy):
    with running(lazy=lazy) as run:
        run.recovers()
        places: list[injection.Place] = []

        def probe(work: Any) -> bool:
            places.extend(injection.lines_of(work))
            return True

        run.save(probe)
        assert len(places) > 60, "the lines of save, and of what it calls"
        for place in places:
            run.save(lambda work, at=place: injection.raising_at(at, kind("injected"), work))
            eventually(run.save, within_s=10, what=f"a step is kept after an error at {place}")
            assert run.reaches(run.step, "staged", 10.0), f"after an error at {place}"
        run.recovers()
        assert run.closes()
