"""However a trainer ends: what it kept is there, its exit code is its own, and time limits hold."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

import keepstep
from keepstep.save.snapshot import SnapshotMaker
from tests.harness import eventually
from tests.lib.training import begun, hold_copies


def script(text, **environment):
    """Run it as a process of its own."""
    head = "import os, sys, torch, keepstep\nfrom torch import nn\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_script_that_ends_without_close_exits_with_0_and_keeps_its_last_step(sidecar):
    ended = script(
        """
        model = nn.Sequential(*[
            nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last) for _ in range(40)
        ])
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
        checkpointer.restore()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(6):
            optimizer.step()
            checkpointer.save(step)
            if step == 4:
                checkpointer.wait(4, "staged")
        """
    )
    assert ended.returncode == 0, ended.stderr
    assert sidecar.get("/v1/status")["ranks"][0]["staged"]["step"] == 5


@pytest.mark.parametrize("daemon", [False, True])
def test_a_script_may_end_while_its_slots_are_unmapped(daemon):
    """Also if a daemon let them go."""
    ended = script(
        f"""
        import mmap, threading
        from keepstep.client.slot import unmap_in_background
        memory = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8).fill_(1)
        held = [memory[at : at + 9] for at in range(2000)] + [memory]
        del memory
        thread = threading.Thread(target=unmap_in_background, args=(held,), daemon={daemon})
        thread.start()
        thread.join()
        """
    )
    assert ended.returncode == 0, ended.stderr


def test_close_makes_the_last_step_durable_where_only_every_fourth_is_staged(sidecars, monkeypatch):
    sidecar = sidecars().start("--stage-every", "4")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = begun({"model": model, "optimizer": optimizer})

    def train(step):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.save(step)

    for step in range(11):
        train(step)
    with pytest.raises(keepstep.NotDurableError, match="one in 4"):
        checkpointer.wait(9, "staged")
    checkpointer.close(timeout=30)
    assert sidecar.published()[-1] == 10
    other = nn.Linear(4, 4)
    opt = torch.optim.SGD(other.parameters(), lr=1.0)
    checkpointer = begun({"model": other, "optimizer": opt})
    assert checkpointer.epoch.parent.step == 10
    assert torch.equal(other.weight, model.weight)
    checkpointer.save(13)
    other(torch.ones(1, 4)).sum().backward()
    opt.step()
    with pytest.raises(keepstep.NotDurableError, match="state has changed since"):
        checkpointer.close(timeout=30)


def test_an_interrupt_at_the_very_end_of_a_save_does_not_hide_the_later_ones_from_close(
    sidecars, monkeypatch
):
    sidecar = sidecars().start("--stage-every", "4")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    checkpointer = begun({"state": {"loss": 0.5}})
    checkpointer.save(4)
    checkpointer._saving = True  # the interrupt came where it is reset
    checkpointer.save(5)
    checkpointer.close(timeout=30)
    assert sidecar.published()[-1] == 5


def test_close_does_not_stage_a_changed_state_under_the_number_of_the_last_step(
    sidecars, monkeypatch
):
    sidecar = sidecars().start("--stage-every", "4")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    state = {"loss": 0.5}  # and no optimizer of torch's, of which a step would be seen
    checkpointer = begun({"state": state})
    checkpointer.save(4)
    checkpointer.save(5)
    state["loss"] = math.nan
    assert checkpointer.save(6, healthy=False) is False
    with pytest.raises(keepstep.NotDurableError, match="state has changed since"):
        checkpointer.close(timeout=30)
    assert sidecar.published() == [4]


def test_close_respects_its_timeout_with_a_hung_sidecar_and_fails_at_once_when_repeated(sidecar):
    checkpointer = begun({"model": nn.Linear(2, 2)})
    checkpointer.save(0)
    checkpointer.wait(0)
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    try:
        checkpointer.save(1)
        started = time.monotonic()
        with pytest.raises(keepstep.NotDurableError) as first:
            checkpointer.close(timeout=3.0)
        assert time.monotonic() - started < 10.0
        assert not checkpointer.stats.saves - checkpointer.stats.staged > 1
        started = time.monotonic()
        with pytest.raises(keepstep.NotDurableError) as second, checkpointer:
            pass
        assert time.monotonic() - started < 2.5
        assert str(second.value) == str(first.value)
    finally:
        os.kill(sidecar.process.pid, signal.SIGCONT)


def test_calling_close_again_after_an_interrupt_raises_an_error_that_names_the_interrupt(
    sidecar, monkeypatch
):
    checkpointer = begun({"model": nn.Linear(2, 2)})
    checkpointer.save(0)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpointer._saver.session, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    with pytest.raises(keepstep.NotDurableError, match=r"interrupted \(KeyboardInterrupt.* step 0"):
        checkpointer.close()


def test_a_save_returns_false_when_a_signal_handler_called_close_inside_it(
    sidecar, caplog, monkeypatch
):
    model = nn.Linear(8, 8)
    checkpointer = begun({"model": model})
    checkpointer.save(0)
    checkpointer.wait(0)
    begin, events = SnapshotMaker.begin, []

    def then_the_handler_closes(self, *arguments, **options):
        pending = begin(self, *arguments, **options)
        with pytest.raises(keepstep.NotDurableError) as error:
            checkpointer.close(timeout=1.0)
        events.append(str(error.value))
        return pending

    monkeypatch.setattr(SnapshotMaker, "begin", then_the_handler_closes)
    assert checkpointer.save(1) is False
    assert "step 1 was not staged" in events[0]
    assert "close() was called inside its save()" in events[0]
    assert "step 1 is not kept" in caplog.text
    with pytest.raises(keepstep.NotDurableError, match="step 1 was not staged"):
        checkpointer.close()


@pytest.mark.parametrize("strict", [False, True])
def test_weights_changed_before_close_discard_the_last_step_and_raise_only_in_strict_mode(
    sidecar, caplog, monkeypatch, strict
):
    model = nn.Linear(64, 64)
    checkpointer = begun({"model": model}, strict=strict)
    checkpointer.save(0)
    checkpointer.wait(0)
    gate = hold_copies(monkeypatch)
    checkpointer.save(1)
    model.weight.data.copy_(torch.zeros(64, 64))
    gate.set()
    if strict:
        with pytest.raises(keepstep.NotDurableError, match="step 1 was not staged"):
            checkpointer.close()
    else:
        checkpointer.close()
        assert "call close() first, then load other weights" in caplog.text
        assert "the newest durable one is 0" in caplog.text


def test_close_raises_when_weights_changed_and_no_earlier_step_was_staged(sidecar, monkeypatch):
    gate = hold_copies(monkeypatch)
    model = nn.Linear(64, 64)
    checkpointer = begun({"model": model})
    checkpointer.save(0)
    model.weight.data.copy_(torch.zeros(64, 64))
    gate.set()
    with pytest.raises(keepstep.NotDurableError, match="no step was staged"):
        checkpointer.close()


def test_close_stages_a_refused_last_step_if_the_tensors_are_unchanged(sidecar, monkeypatch):
    model, progress = nn.Linear(8, 8), {"batches": 1}
    checkpointer = begun({"model": model, "progress": progress})
    assert checkpointer.save(0)
    checkpointer.wait(0)
    sidecar.kill()
    eventually(lambda: checkpointer.save(checkpointer._last_step + 1) is False)
    last = checkpointer._last_step
    progress["batches"] = 7  # values are those of the save
    sidecar.start()
    checkpointer.close(timeout=60)
    assert sidecar.published()[-1] == last
    other = {"batches": 0}
    with begun({"model": nn.Linear(8, 8), "progress": other}) as again:
        assert again.epoch.parent.step == last
    assert other == {"batches": 1}


def test_close_does_not_stage_a_refused_step_whose_state_has_changed(sidecar):
    model = nn.Linear(8, 8)
    checkpointer = begun({"model": model})
    assert checkpointer.save(0)
    checkpointer.wait(0)
    sidecar.kill()
    eventually(lambda: checkpointer.save(checkpointer._last_step + 1) is False)
    model.weight.data.add_(1)
    sidecar.start()
    with pytest.raises(keepstep.NotDurableError, match=r"model\.weight has changed since"):
        checkpointer.close(timeout=60)


def test_a_save_after_close_logs_once_why_it_is_not_kept(sidecar, caplog):
    checkpointer = begun({"model": nn.Linear(2, 2)})
    checkpointer.save(0)
    checkpointer.close()
    assert checkpointer.save(1) is False
    assert checkpointer.save(2) is False
    messages = [message for message in caplog.messages if "close() was called" in message]
    assert len(messages) == 1
    assert "step 1" in messages[0]
    assert checkpointer.stats.staged == 1


def test_a_checkpointer_cannot_be_copied(sidecar):
    with begun({"model": nn.Linear(2, 2)}) as checkpointer:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(keepstep.UsageError, match="cannot be copied"):
                duplicate(checkpointer)
        assert checkpointer.save(0)


def test_a_second_checkpointer_resumes_after_an_error_ended_the_first(sidecar):
    model = nn.Linear(2, 2)

    def train():
        checkpointer = begun({"model": model})
        checkpointer.cycle = checkpointer
        checkpointer.save(0)
        checkpointer.wait(0)
        raise ValueError("an error of the script")

    with pytest.raises(ValueError, match="of the script") as error:
        train()
    del error
    started = time.monotonic()
    with begun({"model": model}) as checkpointer:
        assert checkpointer.epoch.parent.step == 0
        assert checkpointer.save(1)
    assert time.monotonic() - started < 15.0


def test_a_checkpointer_that_follows_a_closed_one_reuses_its_slots_at_once(sidecar):
    model = nn.Linear(2, 2)
    for step in range(3):
        with begun({"model": model}) as checkpointer:
            checkpointer.save(step)
    assert sidecar.text().count('"slot.allocated"') <= 3, "the slots of the first serve all"


def test_a_second_checkpointer_beside_an_open_one_is_refused_at_once(sidecar):
    first = begun({"model": nn.Linear(2, 2)})
    started = time.monotonic()
    with pytest.raises(keepstep.RestoreError, match=r"of this process.*call its close\(\)"):
        begun({"model": nn.Linear(2, 2)})
    assert time.monotonic() - started < 15.0
    assert first.save(0)
    first.close()


def test_a_checkpointer_in_a_subprocess_of_a_trainer_is_refused_at_once(sidecar):
    first = begun({"model": nn.Linear(2, 2)})
    started = time.monotonic()
    ended = script(
        """
        try:
            keepstep.Checkpointer({"model": nn.Linear(2, 2)}).restore()
        except keepstep.RestoreError as error:
            print(error)
        """
    )
    assert time.monotonic() - started < 25.0, "not for as long as a predecessor may need to die"
    assert f"pid {os.getpid()}, the trainer that started this process" in ended.stdout
    assert first.save(0)
    first.close()


def test_a_forked_child_process_does_not_act_as_the_trainer(sidecar, capfd):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = begun({"model": model, "optimizer": optimizer}, lazy=False)
    checkpointer.save(0)
    checkpointer.wait(0)
    expected = model.weight.detach().clone()
    checkpointer.save(1)
    with open("/proc/self/maps") as maps:
        assert ".slot" in maps.read()
    child = os.fork()
    if child == 0:
        problems = []
        try:
            with open("/proc/self/maps") as maps:
                problems += ["slots are mapped"] * (".slot" in maps.read())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(777.0)
                    parameter.grad = torch.zeros_like(parameter)
            started = time.monotonic()
            optimizer.step()
            problems += ["the step waited"] * (time.monotonic() - started > 5)
            problems += ["kept"] * any(checkpointer.save(step) for step in range(2, 5))
            checkpointer.close()
            del checkpointer, optimizer
        except BaseException as error:
            problems.append(repr(error))
        print("problems:", problems, flush=True)
        os._exit(len(problems))
    assert os.waitpid(child, 0)[1] == 0
    output = capfd.readouterr()
    assert (output.out + output.err).count("forked from the trainer") <= 1
    checkpointer.wait(1)
    assert checkpointer.save(2)
    checkpointer.wait(2)
    checkpointer.close()
    other = nn.Linear(64, 64)
    with begun({"model": other, "optimizer": torch.optim.SGD(other.parameters(), 1.0)}) as again:
        assert again.epoch.parent.step == 2
    assert torch.equal(other.weight, expected)
