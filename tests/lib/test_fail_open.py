"""The sidecar may be absent, die, hang or come back: training goes on, and says what it lost."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from torch import nn

import keepstep
from keepstep.client import embedded
from keepstep.client.session import ConditionNotifier, SidecarSession
from keepstep.restore.images import StepImages
from keepstep.steps import EpochId, StepId
from tests.harness import eventually
from tests.lib.training import begun


def eventually_saved(checkpointer, model, step):
    """Train and save until a step is staged again; returns that step."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        step += 1
        with checkpointer.mutating():
            model.weight.data.add_(1)
        if checkpointer.save(step):
            return step
        time.sleep(0.02)  # a training step stands here
    pytest.fail(f"no step was kept again: {checkpointer.stats}")


def test_all_calls_are_no_ops_without_a_sidecar(monkeypatch):
    monkeypatch.delenv("KEEPSTEP_SOCKET", raising=False)
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    assert checkpointer.restore() is None
    assert checkpointer.save(0) is False
    checkpointer.close()


def test_restore_never_starts_over_in_silence(monkeypatch, tmp_path):
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(tmp_path / "nobody.sock"))
    monkeypatch.setattr("keepstep.checkpointer._CONNECT_S", 0.2)
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    with pytest.raises(keepstep.RestoreError, match="no sidecar listens"):
        checkpointer.restore()
    checkpointer.close()


def test_restore_waits_for_a_running_sidecar_that_is_too_busy_to_answer(sidecar, monkeypatch):
    """As where a machine has far too much to do."""
    monkeypatch.setattr("keepstep.checkpointer._CONNECT_S", 0.3)
    monkeypatch.setattr("keepstep.client.session._LEASE_S", 0.5)
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    later = threading.Timer(2.0, os.kill, (sidecar.process.pid, signal.SIGCONT))
    later.start()
    try:
        assert checkpointer.restore() is None
    finally:
        later.join()
    assert checkpointer.save(0)
    checkpointer.close()


def test_restore_gives_up_on_an_unresponsive_sidecar_after_the_restore_timeout(
    sidecar, monkeypatch
):
    monkeypatch.setattr("keepstep.checkpointer._CONNECT_S", 0.3)
    monkeypatch.setattr("keepstep.client.session._LEASE_S", 0.5)
    monkeypatch.setenv("KEEPSTEP_RESTORE_TIMEOUT", "1")
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(keepstep.RestoreError, match="did not answer in time"):
            checkpointer.restore()
    finally:
        os.kill(sidecar.process.pid, signal.SIGCONT)
    checkpointer.close()


def test_the_search_for_steps_is_limited_by_the_restore_timeout(sidecar):
    """Of thousands of ranks it takes minutes."""
    session = SidecarSession(str(sidecar.socket), rank=0, world=1, changed=ConditionNotifier())
    session.request_lease(timeout_s=30)
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        with pytest.raises(keepstep.SidecarAbsent, match="did not answer in time"):
            StepImages.locate_step(session, StepId(EpochId(1, "0" * 8), 1), timeout_s=0.2)
    finally:
        os.kill(sidecar.process.pid, signal.SIGCONT)
    assert time.monotonic() - begun < 60
    session.close(goodbye=True)


def test_a_slow_sidecar_is_not_restarted(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        embedded.SidecarRestarter, "restart_if_due", lambda keeper: asked.append(keeper)
    )
    keeper, path = embedded.SidecarRestarter(tmp_path), str(tmp_path / "sidecar.sock")
    session = SidecarSession(path, rank=0, world=1, changed=ConditionNotifier(), keeper=keeper)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(keepstep.SidecarAbsent, match="did not answer in time"):
            session.request_lease(timeout_s=0.2)
        assert asked == []
    with pytest.raises(keepstep.SidecarAbsent, match="no sidecar listens"):
        session.request_lease(timeout_s=0.2)
    assert asked == [keeper]


WAITS = """
import torch, keepstep
keepstep.Checkpointer({"m": torch.nn.Linear(2, 2)}).restore()
"""


def test_ctrl_c_ends_a_script_that_waits_for_its_sidecar(tmp_path):
    """As `python`: what keeps an interpreter from ending is what is tested."""
    path = str(tmp_path / "sidecar.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        silent.settimeout(60.0)
        environment = {**os.environ, "KEEPSTEP_SOCKET": path}
        script = subprocess.Popen(
            [sys.executable, "-c", WAITS], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)  # it has asked, and gets no answer
                _until_idle(script.pid)  # an import that is interrupted may swallow it
                script.send_signal(signal.SIGINT)
                assert script.wait(9.0) == -signal.SIGINT
        finally:
            script.kill()
            script.wait()


def _until_idle(pid: int) -> None:
    """Until a process has used no processor for a moment, and asks for none: a busy machine may
    let one that imports stand still for as long."""
    process, used = psutil.Process(pid), [-1.0]

    def idle() -> bool:
        used.append(sum(process.cpu_times()[:2]))
        return used[-1] == used[-2] and process.status() == psutil.STATUS_SLEEPING

    eventually(idle, every_s=0.3, what="it waits")


def test_a_hung_sidecar_delays_training_once_and_not_at_every_step(sidecar):
    model = nn.Linear(8, 8)
    checkpointer = begun({"m": model})
    checkpointer.save(0)
    checkpointer.wait(0, "staged")
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    try:
        started = time.perf_counter()
        for step in range(1, 30):
            checkpointer.save(step)
        seconds = time.perf_counter() - started
    finally:
        os.kill(sidecar.process.pid, signal.SIGCONT)
    assert seconds < 8.0, "one wait a step would be 29 s"
    checkpointer.wait(eventually_saved(checkpointer, model, 30))
    checkpointer.close()


def test_save_before_restore_is_refused_and_raises_in_strict_mode(sidecar):
    model = nn.Linear(2, 2)
    checkpointer = keepstep.Checkpointer({"m": model})
    assert checkpointer.save(0) is False
    checkpointer.close()
    strict = keepstep.Checkpointer({"m": model}, strict=True)
    with pytest.raises(keepstep.UsageError, match="call restore"):
        strict.save(0)
    strict.close()


def test_a_forked_worker_does_not_hold_its_dead_parents_lease(sidecar, monkeypatch):
    """A data loader's worker outlives a trainer that was killed; the rank must be free at once."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
        checkpointer.restore()
        worker = os.fork()
        if worker == 0:
            os.write(writer, str(os.getpid()).encode())
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(reader, 32))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        monkeypatch.setattr("keepstep.checkpointer._CONNECT_S", 5.0)
        successor = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
        assert successor.restore() is None
        successor.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_no_room_for_a_slot_is_named_at_once_and_in_every_status_and_training_goes_on(
    sidecars, monkeypatch, caplog
):
    sidecar = sidecars().start("--memory-limit", "1Mi")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    model = nn.Linear(1024, 1024)
    checkpointer = begun({"m": model})
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        assert checkpointer.save(0) is False
    assert re.search(r"step 0 .*\d{7} bytes.*not one fits", caplog.text)
    assert time.monotonic() - started < 10.0
    eventually(
        lambda: any("since step 0" in warning for warning in sidecar.get("/v1/status")["warnings"])
    )
    assert checkpointer.save(1) is False
    assert "memory" in checkpointer.stats.why_unkept
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.close()


def test_the_error_of_close_names_the_step_that_is_not_durable(sidecar):
    checkpointer = begun({"m": nn.Linear(2, 2)})
    checkpointer.save(3)
    checkpointer.wait(3, "staged")
    sidecar.kill()
    with pytest.raises(keepstep.NotDurableError, match="step 3"):
        checkpointer.close(timeout=1.0)


def test_a_slot_that_is_being_filled_is_never_handed_out_a_second_time(sidecar, monkeypatch):
    """The save thread may wake while the training thread still copies eagerly: asking for a slot
    then would bring the same one again, and the next save would write over a sealed image."""
    from keepstep.save.snapshot import SnapshotMaker

    model, extra = nn.Linear(8, 8), {"x": torch.zeros(4)}
    checkpointer = begun({"m": model, "extra": extra}, strict=True)
    begin = SnapshotMaker.begin

    def begin_while_the_save_thread_wakes(self, *arguments, **options):
        checkpointer._saver.skip(0, "a reason to wake up")
        deadline = time.monotonic() + 5
        while checkpointer._saver._skips and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not checkpointer._saver._skips, (
            "the save thread is awake, and has nothing left to do"
        )
        assert checkpointer._saver.taken_slot is not None, (
            "one slot is being filled, none is at hand"
        )
        return begin(self, *arguments, **options)

    monkeypatch.setattr(SnapshotMaker, "begin", begin_while_the_save_thread_wakes)
    used = []
    for step in range(6):
        assert checkpointer.save(step)
        used.append(checkpointer._saver.pending_image or checkpointer._saver.staged_step)
        checkpointer.wait(step, "staged")
    assert len({(save.slot.grant.slot, save.slot.grant.generation) for save in used}) == 6
    checkpointer.close()
