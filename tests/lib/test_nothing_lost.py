"""Nothing is lost in silence: whatever happened, the next step is kept again, and what was lost is
counted, logged and told."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy
import pytest
import torch
from torch import nn

import keepstep
from keepstep.client import copying
from tests.harness import eventually
from tests.lib.training import begun, hold_copies


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def kept(checkpointer, step, *, within_s=20.0):
    """The first step from `step` on that is staged."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if checkpointer.save(step):
            try:
                checkpointer.wait(step, "staged", timeout=within_s)
            except keepstep.NotDurableError:
                pass
            else:
                return step
        step += 1
        time.sleep(0.01)  # a training step stands here
    pytest.fail(f"no step is kept any more: {checkpointer.stats}")


def accounted(checkpointer):
    stats = checkpointer.stats
    return stats.saves == stats.staged + stats.skipped + stats.discarded


_NO_STEPS = (0.0, 0.5, True, None, "3", 10**18, 2**63, -1, numpy.float64(3))


def test_a_step_that_is_not_a_whole_number_is_refused_and_loses_no_other_step(sidecar, model):
    checkpointer = begun({"m": model})
    for step in _NO_STEPS:
        assert checkpointer.save(step) is False
        with pytest.raises(keepstep.UsageError, match="whole number"):
            checkpointer.wait(step)
    assert checkpointer.stats.skipped == len(_NO_STEPS)
    assert "whole number" in checkpointer.stats.why_not()
    assert kept(checkpointer, 0) == 0
    checkpointer.close()
    with begun({"m": model}, strict=True) as strict:
        for step in _NO_STEPS:
            with pytest.raises(keepstep.UsageError, match="whole number"):
                strict.save(step)


def test_integers_of_other_types_are_accepted_as_steps(sidecar, model):
    with begun({"m": model}, strict=True) as checkpointer:
        for step in (numpy.int64(0), torch.tensor(1), numpy.uint8(2), 10**18 - 1):
            assert checkpointer.save(step)
            checkpointer.wait(step, "staged")


def test_wait_returns_only_for_exactly_the_given_step(sidecar, model, monkeypatch):
    gate = hold_copies(monkeypatch)
    checkpointer = begun({"m": model})
    checkpointer.save(1)
    with torch.no_grad():
        model.weight.add_(1)
    gate.set()
    with pytest.raises(keepstep.NotDurableError, match="weight changed"):
        checkpointer.wait(1, "staged")
    checkpointer.save(2)
    checkpointer.save(5)
    checkpointer.wait(5)
    for state in ("staged", "durable", "committed"):
        with pytest.raises(keepstep.NotDurableError, match=r"step 1 was not staged: .*weight"):
            checkpointer.wait(1, state)
        for never in (0, 3, 4, 6):
            with pytest.raises(keepstep.UsageError, match=f"step {never} was never saved"):
                checkpointer.wait(never, state)
    checkpointer.close()


def test_wait_fails_at_once_for_a_step_that_was_overwritten_in_memory_before_its_write(
    sidecars, monkeypatch, model
):
    sidecar = sidecars().start("--persist-every", "1000")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    checkpointer = begun({"m": model})
    step = 1
    for _ in range(9):
        step = kept(checkpointer, step) + 1
    last = step - 1
    checkpointer.wait(last)
    for state in ("durable", "committed"):
        with pytest.raises(keepstep.NotDurableError, match="overwritten by later ones"):
            checkpointer.wait(1, state, timeout=60)
        checkpointer.wait(last, state)
    assert sidecar.published() == [last]
    checkpointer.close()


def test_wait_succeeds_for_a_committed_step_that_has_been_retired_since(sidecar, model):
    checkpointer = begun({"m": model})
    step, committed = 0, []
    while not committed or committed[0] in sidecar.published():
        committed.append(kept(checkpointer, step))
        checkpointer.wait(committed[-1])
        step = committed[-1] + 1
    checkpointer.wait(committed[0], timeout=5)
    checkpointer.close()


def test_an_optimizer_without_hooks_is_kept_eagerly_after_the_first_discarded_step(
    sidecar, caplog, monkeypatch
):
    run = copying.run_transfers

    def slow(transfers, **options):
        if threading.current_thread().name == "keepstep-save":
            time.sleep(0.02)
        run(transfers, **options)

    monkeypatch.setattr(copying, "run_transfers", slow)
    weight = nn.Parameter(torch.zeros(1000))
    holder = nn.ParameterList([weight])
    checkpointer = begun({"m": holder})
    first = kept(checkpointer, 0)
    checkpointer.stats.discarded = 0
    for step in range(first + 1, first + 40):
        with torch.no_grad():
            weight.add_(1)  # no torch.optim.Optimizer, no fence
        checkpointer.save(step)
        with torch.no_grad():
            weight.add_(1)
        if not checkpointer.stats.discarded:
            checkpointer._saver.drain(timeout_s=5)
    assert checkpointer.stats.discarded == 1
    checkpointer._saver.drain(timeout_s=5)
    assert accounted(checkpointer)
    assert sum("from now on every step is copied" in message for message in caplog.messages) == 1
    checkpointer.close()


def test_concurrent_saves_of_several_threads_are_serialised(sidecar, model):
    checkpointer = begun({"m": model})
    numbers = iter(range(300))
    lock, results = threading.Lock(), []

    def save():
        for _ in range(100):
            with lock:
                step = next(numbers)
            results.append(checkpointer.save(step))

    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(checkpointer, 300) >= 300
    assert accounted(checkpointer)
    why = checkpointer.stats.reasons
    assert all(any(text in reason for text in ("only grow", "slot", "other")) for reason in why)
    checkpointer.close()


def test_a_strict_save_waits_for_a_slot_longer_than_one_that_may_skip_its_step(sidecar, model):
    checkpointer = begun({"m": model}, strict=True)
    checkpointer.save(0)
    checkpointer.wait(0)
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    goes_on = threading.Timer(3.0, os.kill, (sidecar.process.pid, signal.SIGCONT))
    goes_on.start()
    try:
        assert all(checkpointer.save(step) for step in range(1, 8)), "more than there are slots"
    finally:
        goes_on.join()
    checkpointer.close()
    assert sidecar.published()[-1] == 7


def test_a_save_inside_a_save_is_refused_and_the_outer_one_is_kept(sidecar, model, monkeypatch):
    checkpointer = begun({"m": model})
    kept(checkpointer, 0)
    take = checkpointer._taking.take

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGUSR1)
        return take(*given)

    answers = []
    before = signal.signal(signal.SIGUSR1, lambda *_: answers.append(checkpointer.save(2)))
    try:
        monkeypatch.setattr(checkpointer._taking, "take", interrupted)
        assert checkpointer.save(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    checkpointer.wait(1)
    assert answers == [False]
    assert "inside save()" in checkpointer.stats.why_not()
    checkpointer.close()


class Projector:
    """What an optimizer may hold, and no image can."""


class Galore(torch.optim.SGD):
    """Its state comes with its first step, after the check of `restore()`."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("projector", Projector())
        return super().step(closure)


def test_the_first_save_of_a_state_that_cannot_be_kept_raises(sidecar, model, monkeypatch, caplog):
    optimizer = Galore(model.parameters(), lr=0.1)
    checkpointer = begun({"m": model, "optimizer": optimizer})
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(keepstep.UsageError, match=r"step 0 cannot be kept: .*projector"):
        checkpointer.save(0)
    monkeypatch.setattr("keepstep.save.save_thread._REPEAT_S", 0.2)
    assert checkpointer.save(1) is False
    eventually(
        lambda: any("projector" in warning for warning in sidecar.get("/v1/status")["warnings"])
    )
    began = time.monotonic()
    for step in range(2, 30):
        checkpointer.save(step)
        time.sleep(0.02)
    repeated = [message for message in caplog.messages if "no step was staged for" in message]
    assert 2 <= len(repeated) <= (time.monotonic() - began) / 0.2 + 1
    assert "projector" in repeated[-1]
    assert checkpointer.stats.unkept == 29
    for state in optimizer.state.values():
        del state["projector"]
    checkpointer._components["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    assert kept(checkpointer, 30) == 30
    assert (checkpointer.stats.unkept, checkpointer.stats.why_unkept) == (0, "")
    assert not any("no step" in warning for warning in sidecar.get("/v1/status")["warnings"])
    checkpointer.close()


def test_a_state_that_becomes_unsupported_after_a_kept_step_does_not_raise(sidecar, model):
    optimizer = Galore(model.parameters(), lr=0.1)
    checkpointer = begun({"m": model, "optimizer": optimizer})
    assert checkpointer.save(0)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert checkpointer.save(1) is False
    assert "projector" in checkpointer.stats.why_unkept
    with pytest.raises(keepstep.NotDurableError, match="projector"):
        checkpointer.close()


def test_the_status_reports_why_no_step_has_been_staged_for_a_minute(sidecar, model):
    from keepstep_sidecar.api.saving import SaveCounters

    counters = SaveCounters()
    counters.lose(3, "a tensor changed")
    counters.lose(4, "no slot is free yet")
    now = counters.unkept.at
    assert counters.unkept.warning(0, now=now + 59) == ""
    assert counters.unkept.warning(0, now=now + 61) == (
        "rank 0: no step was staged since step 3 was not: no slot is free yet"
    )


def test_an_exception_of_a_signal_handler_inside_save_reaches_the_script(
    sidecar, model, monkeypatch
):
    """Any exception of its own: only errors of keepstep are kept from the script."""
    checkpointer = begun({"m": model})
    kept(checkpointer, 0)
    take = checkpointer._taking.take

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGUSR1)
        return take(*given)

    def preempted(*_):
        raise ValueError("asked to end")

    before = signal.signal(signal.SIGUSR1, preempted)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._taking, "take", interrupted)
            with pytest.raises(ValueError, match="asked to end"):
                checkpointer.save(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "ValueError inside save()" in checkpointer.stats.why_not()
    assert kept(checkpointer, 2) == 2
    checkpointer.close()
