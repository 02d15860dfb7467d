"""`restore()` that raised or was interrupted can be called again at once, in the same process."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torch import nn

import keepstep
from keepstep.client.session import SidecarSession
from keepstep.image import PAGE_BYTES
from keepstep.restore import loader
from tests.harness import eventually
from tests.lib.training import begun, keep

AT_ONCE_S = 10.0
"""Well below the 30 s for which a rank waits for a predecessor that is just dying."""


def is_voting():
    return any(thread.name == "keepstep-vote" for thread in threading.enumerate())


def test_restore_succeeds_when_it_is_called_again_after_the_model_was_fixed(sidecar):
    saved = nn.Linear(2, 2)
    keep({"m": saved})
    parts = {"m": nn.Linear(3, 3)}
    checkpointer = keepstep.Checkpointer(parts)
    with pytest.raises(keepstep.MismatchError, match=r"m.weight: float32\[2, 2\] in the"):
        checkpointer.restore()
    parts["m"] = nn.Linear(2, 2)
    began = time.monotonic()
    assert checkpointer.restore().step == 0
    assert time.monotonic() - began < AT_ONCE_S
    assert parts["m"].weight.equal(saved.weight)
    assert checkpointer.save(1)
    checkpointer.close()


def test_a_run_starts_when_restore_is_called_again_after_an_unsupported_value_was_removed(sidecar):
    state = {"n": object()}
    checkpointer = keepstep.Checkpointer({"st": state})
    with pytest.raises(keepstep.UsageError, match="st"):
        checkpointer.restore()
    state["n"] = 1
    assert checkpointer.restore() is None
    assert checkpointer.save(0)
    checkpointer.close()


# an interrupt may come when a socket is open and nobody has it yet: Python closes it, and says so
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_restore_leaves_no_thread_and_can_be_called_again(sidecar, kind):
    def interrupt(_, frame):
        code = frame.f_code
        # the callback of a weak reference may raise nothing, and Python's own locks are no place of
        # ours: there, an interrupt becomes another error
        if code.co_name == "_remove" or code.co_filename == threading.__file__:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            return
        raise kind

    saved = nn.Linear(200, 200)
    keep({"m": saved})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        interrupted = 0
        for delay_s in (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
            live = nn.Linear(200, 200)
            checkpointer = keepstep.Checkpointer({"m": live})
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                checkpointer.restore()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except kind:
                interrupted += 1
                eventually(lambda: not is_voting())
                began = time.monotonic()
                if checkpointer.epoch is None:  # else it came when all was done
                    assert checkpointer.restore().step == 0
                assert time.monotonic() - began < AT_ONCE_S
            assert live.weight.equal(saved.weight)
            checkpointer.close()
        assert interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_restore_that_waits_for_its_sidecar_ends_at_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(tmp_path / "none"))

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.restore()
        assert time.monotonic() - began < AT_ONCE_S
        eventually(lambda: not is_voting())
    finally:
        signal.signal(signal.SIGALRM, before)
        checkpointer.close()


def two_steps():
    """A run whose steps 1 and 2 hold 1 and 2."""
    model = nn.Linear(2, 2)
    with begun({"m": model}, strict=True) as checkpointer:
        for step in (1, 2):
            nn.init.constant_(model.weight, step)
            checkpointer.save(step)
            checkpointer.wait(step)


def test_an_image_that_is_overwritten_while_it_is_read_is_not_used(sidecar, monkeypatch, caplog):
    """As by a sidecar that was started again, and does not know who reads."""
    two_steps()
    fill = loader.fill_targets

    def overwritten(*arguments):
        monkeypatch.setattr(loader, "fill_targets", fill)
        done = fill(*arguments)
        for path in sidecar.slots(0):
            with path.open("r+b") as file:
                file.seek(-PAGE_BYTES, os.SEEK_END)
                file.write(bytes(PAGE_BYTES))
        return done

    monkeypatch.setattr(loader, "fill_targets", overwritten)
    model = nn.Linear(2, 2)
    with keepstep.Checkpointer({"m": model}) as checkpointer:
        at = checkpointer.restore()
    assert "the image of rank 0 was overwritten while it was read" in caplog.text
    assert at is not None
    assert bool((model.weight == at.step).all())


def test_a_sidecar_that_dies_while_it_brings_a_step_back_costs_no_step(
    sidecar, monkeypatch, caplog
):
    two_steps()
    call = SidecarSession.call_apart

    def dies(self, route, message, kind, *, timeout_s):
        if route == "/v1/restore":
            monkeypatch.setattr(SidecarSession, "call_apart", call)
            sidecar.kill()
            sidecar.start()
        return call(self, route, message, kind, timeout_s=timeout_s)

    monkeypatch.setattr(SidecarSession, "call_apart", dies)
    model, began = nn.Linear(2, 2), time.monotonic()
    with keepstep.Checkpointer({"m": model}) as checkpointer:
        at = checkpointer.restore()
    assert time.monotonic() - began < AT_ONCE_S
    assert (at.step, bool((model.weight == 2).all())) == (2, True)
    assert "step 2 is asked for again, because a sidecar went away" in caplog.text
