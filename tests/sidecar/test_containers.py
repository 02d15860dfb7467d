"""Trainer and sidecar in containers of their own: other pid namespaces, other users, one group."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from trainer import FakeTrainer, content, make_layout, read_image

from keepstep.steps import StepId
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces and other users"),
]
SIDECAR_ID, TRAINER_ID = 65532, 12345


@pytest.fixture
def apart(sidecars: Callable[..., SidecarProcess]) -> SidecarProcess:
    """A sidecar in a pid namespace of its own, as in a pod: it cannot see its trainers."""
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("unshare cannot make pid namespaces here")
    sidecar = sidecars()
    sidecar.program = (*apart, *sidecar.program)
    return sidecar.start("--slots", "3")


def slots_of(sidecar: SidecarProcess) -> list[dict[str, object]]:
    return list(sidecar.get("/v1/status")["ranks"][0]["slots"])


def test_the_lease_of_a_trainer_in_another_pid_namespace_ends_with_its_connection(
    apart: SidecarProcess, trainers: Trainers
) -> None:
    first = trainers(apart.socket).begin_run()
    step_id = first.stage(1)
    first.disconnect()
    successor = trainers(apart.socket)
    successor.connect()
    assert [candidate.id for candidate in successor.candidates().candidates] == [step_id]


def test_the_slot_of_a_trainer_in_another_pid_namespace_is_never_given_to_another(
    apart: SidecarProcess, trainers: Trainers
) -> None:
    first = trainers(apart.socket).begin_run()
    eventually(lambda: len(slots_of(apart)) == 3)
    kept = [first.stage(step) for step in range(2)]
    path = first.begin()
    written = path.stat().st_ino
    first.disconnect()
    successor = trainers(apart.socket)
    successor.connect()
    # another slot may have taken its name already
    assert not path.exists() or path.stat().st_ino != written
    assert [candidate.id for candidate in successor.candidates().candidates] == kept
    successor.restored(first.epoch)
    successor.register()
    eventually(lambda: len(slots_of(apart)) == 3, what="another slot is made")
    for step in range(2, 9):
        step_id = successor.stage(step)
    assert successor.wait(step_id, "committed", flush=True).reached


def test_a_trainer_in_another_pid_namespace_continues_after_a_sidecar_restart(
    apart: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(apart.socket).begin_run()
    trainer.stage(0)
    trainer.begin()
    assert trainer.slot is not None
    apart.kill()
    eventually(lambda: not _answers(apart), what="the namespace ends with its first process")
    trainer.fill(1)
    apart.start()
    granted = trainer.connect(holding=(str(trainer.slot.slot),))
    assert granted.held == (trainer.slot.slot,)
    trainer.register()
    trainer.report(1)
    assert trainer.wait(StepId(trainer.epoch.id, 1), "committed", flush=True).reached


def _answers(sidecar: SidecarProcess) -> bool:
    try:
        sidecar.get("/v1/status")
    except OSError:
        return False
    return True


@pytest.fixture
def shared() -> Iterator[Path]:
    """A place in shared memory that everybody may enter, as an emptyDir is."""
    path = Path(tempfile.mkdtemp(prefix="keepstep-users-", dir="/dev/shm"))
    path.chmod(0o755)
    for name in ("memory", "volume"):
        (path / name).mkdir()
        (path / name).chmod(0o777)
    yield path
    shutil.rmtree(path)


def _as_sidecar(shared: Path, ready: Connection) -> None:
    """Serve as the sidecar's user. Forked, not executed: its user may not read this Python."""
    log = os.open(shared / "log", os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.nice(10)  # whoever is no root cannot take that back
    os.setgroups([])
    os.setgid(SIDECAR_ID)
    os.setuid(SIDECAR_ID)
    from keepstep_sidecar.app import serve
    from keepstep_sidecar.config.sidecar import Config

    ready.send(True)
    serve(Config(run="run", memory_dir=shared / "memory", volumes=(shared / "volume",)))


def _as_trainer(shared: Path, groups: list[int], answer: Connection) -> None:
    """Train one step as another user; says whether it was committed, or the error."""
    os.setgroups(groups)
    os.setgid(TRAINER_ID)
    os.setuid(TRAINER_ID)
    try:
        trainer = FakeTrainer(shared / "memory" / "sidecar.sock").begin_run()
        answer.send(trainer.wait(trainer.stage(7), "committed", flush=True).reached)
    except PermissionError as error:
        answer.send(type(error).__name__)


def test_a_trainer_of_another_user_fills_slots_when_it_has_the_group(shared: Path) -> None:
    # loaded before the fork: the other users may not read this Python's files
    import keepstep_sidecar.app
    import keepstep_sidecar.config.sidecar  # noqa: F401

    context = get_context("fork")
    ready, child = context.Pipe(duplex=False)
    sidecar = context.Process(target=_as_sidecar, args=(shared, child))
    sidecar.start()
    try:
        assert ready.poll(20)
        socket = shared / "memory" / "sidecar.sock"
        eventually(socket.exists, what=f"the socket; {(shared / 'log').read_text()}")
        found = socket.stat()
        assert (found.st_uid, found.st_gid) == (SIDECAR_ID, SIDECAR_ID)
        assert stat.S_IMODE(found.st_mode) == 0o770
        assert _ask(shared, groups=[]) == "PermissionError"
        assert _ask(shared, groups=[SIDECAR_ID]) is True
        (slots,) = (shared / "memory").glob("rank-*")
        assert stat.S_IMODE(slots.stat().st_mode) == 0o2770
        assert {stat.S_IMODE(path.stat().st_mode) for path in slots.glob("*.slot")} == {0o660}
        (shard,) = (shared / "volume/run").glob("0*/rank-*")
        assert read_image(make_layout(), shard) == content(make_layout(), 7)
    finally:
        sidecar.terminate()
        sidecar.join(30)
    assert sidecar.exitcode == 0


def _ask(shared: Path, *, groups: list[int]) -> object:
    context = get_context("fork")
    answer, child = context.Pipe(duplex=False)
    process = context.Process(target=_as_trainer, args=(shared, groups, child))
    process.start()
    assert answer.poll(40), (shared / "log").read_text()
    received: object = answer.recv()
    process.join(10)
    return received
