"""Large images on huge pages are written while they are copied: readers see what was sealed, or
nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer import LARGE, FakeTrainer, content, read_image

from keepstep.image import HUGE_PAGE_BYTES, ControlPage
from keepstep.steps import StepId
from keepstep_sidecar.volume.faults import FAULTS_ENV
from tests import hugetlbfs
from tests.harness import SidecarProcess, eventually, verify_image

Trainers = Callable[..., FakeTrainer]
CHUNK = 8 << 20
SLOTS = 4


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with pages for all slots of one rank."""
    pages = (SLOTS + 1) * (LARGE // HUGE_PAGE_BYTES + 1)
    with hugetlbfs.for_test(tmp_path / "huge", pages) as directory:
        yield directory


@pytest.fixture
def sidecars(sidecars: Callable[..., SidecarProcess], huge: Path) -> Callable[..., SidecarProcess]:
    """Sidecars whose slots are on huge pages."""

    def make() -> SidecarProcess:
        one = sidecars()
        one.huge = huge
        return one

    return make


def unfinished(sidecar: SidecarProcess) -> list[Path]:
    return list(sidecar.root.rglob(".rank-*"))


def is_written(sidecar: SidecarProcess, trainer: FakeTrainer, step: int, chunk: int) -> bool:
    """Whether this chunk of the step's tensors lies in an unfinished file."""
    begin = chunk * CHUNK - len(trainer.layout.header)
    wanted = content(trainer.layout, step)[begin : begin + CHUNK]
    return any(
        read_image(trainer.layout, path)[begin : begin + CHUNK] == wanted
        for path in unfinished(sidecar)
    )


def half_copied(sidecar: SidecarProcess, trainer: FakeTrainer, step: int) -> None:
    """Four chunks of the step are on the drive, and it is not sealed."""
    trainer.begin()
    control = trainer.control(step)
    trainer.copy(step, 0, LARGE // 2)
    trainer.announce(control, LARGE // 2)
    eventually(lambda: is_written(sidecar, trainer, step, 3), what="its chunks are written")


def half_announced(trainer: FakeTrainer, step: int) -> ControlPage:
    """The whole step is copied, half of it announced, and it is not sealed. Returns its seal."""
    trainer.begin()
    control = trainer.control(step)
    trainer.copy(step, 0, trainer.layout.size_bytes)
    trainer.announce(control, LARGE // 2)
    return control


def check_durable(
    sidecar: SidecarProcess, trainer: FakeTrainer, id: StepId, *, content_of: int
) -> None:
    assert trainer.wait(id, "committed", flush=True).reached
    (path,) = (sidecar.root / str(id)).iterdir()
    assert verify_image(memoryview(path.read_bytes()), trainer.layout).id == id
    assert read_image(trainer.layout, path) == content(trainer.layout, content_of)


@pytest.mark.parametrize("slots", ["2", "4"])
def test_however_a_copy_goes_the_shard_is_the_image(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, slots: str
) -> None:
    sidecar = sidecars().start("--slots", slots)
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    chance = random.Random(slots)
    for step in range(4):
        trainer.begin()
        control, copied = trainer.control(step), 0
        for arrived in sorted(chance.randrange(LARGE) for _ in range(chance.randrange(6))):
            trainer.copy(step, copied, arrived)
            trainer.announce(control, copied := arrived)
        trainer.copy(step, copied, trainer.layout.size_bytes)
        trainer.seal(control)
        trainer.report(step)
        check_durable(sidecar, trainer, StepId(trainer.epoch.id, step), content_of=step)
    assert unfinished(sidecar) == []


def test_what_is_copied_is_on_the_drive_before_the_seal(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    half_copied(sidecar, trainer, 0)
    assert not is_written(sidecar, trainer, 0, 4), "that was not announced"
    assert sidecar.published() == []


def test_a_discarded_image_leaves_nothing_and_its_step_may_come_again(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    half_copied(sidecar, trainer, 7)
    trainer.discard(7)
    trainer.begin()
    control = trainer.control(7)  # the same step of other bytes, in the same slot
    trainer.copy(8, 0, trainer.layout.size_bytes)
    trainer.announce(control, LARGE // 2)
    trainer.seal(control)
    trainer.report(7)
    check_durable(sidecar, trainer, StepId(trainer.epoch.id, 7), content_of=8)
    assert unfinished(sidecar) == []


def test_an_image_that_is_begun_anew_under_the_same_grant_is_the_second_one(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    half_copied(sidecar, trainer, 7)
    trainer.begin()
    control = trainer.control(7)
    trainer.copy(8, 0, trainer.layout.size_bytes)
    trainer.announce(control, trainer.layout.digests_begin)
    trainer.seal(control)
    trainer.report(7)
    check_durable(sidecar, trainer, StepId(trainer.epoch.id, 7), content_of=8)
    assert unfinished(sidecar) == []


def test_a_trainer_killed_while_it_copies_leaves_nothing(sidecar: SidecarProcess) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sidecar.trainer", str(sidecar.socket), "1", "copying"],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        eventually(lambda: unfinished(sidecar), what="it is being written")
        process.kill()
    eventually(lambda: not unfinished(sidecar), what="nothing of it stays")
    assert sidecar.published() == [0]


def test_a_sidecar_killed_while_it_follows_a_copy_leaves_nothing(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    half_copied(sidecar, trainer, 0)
    sidecar.kill()
    trainer.disconnect()
    left = {path.name for path in unfinished(sidecar)}
    assert left
    sidecar.start()
    assert trainer.slot is not None
    trainer.connect(holding=(str(trainer.slot.slot),))
    trainer.register()
    # the new one may follow the same copy, into a file of its own
    eventually(
        lambda: left.isdisjoint(path.name for path in unfinished(sidecar)),
        what="what was written is gone",
    )
    trainer.fill(0)
    trainer.report(0)
    check_durable(sidecar, trainer, StepId(trainer.epoch.id, 0), content_of=0)


def test_a_drive_that_is_full_while_a_copy_is_followed_gets_the_image_after_its_seal(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start(**{FAULTS_ENV: "write.data:enospc@2"})
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    control = half_announced(trainer, 0)
    eventually(lambda: "enospc (injected)" in sidecar.text(), what="its early write has failed")
    trainer.seal(control)
    trainer.report(0)
    check_durable(sidecar, trainer, StepId(trainer.epoch.id, 0), content_of=0)


def test_a_drive_that_fails_while_a_copy_is_followed_costs_that_step(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start(**{FAULTS_ENV: "write.data:eio@2"})
    trainer = trainers(sidecar.socket, size=LARGE).begin_run()
    control = half_announced(trainer, 0)
    eventually(lambda: "not persisted" in sidecar.text())
    trainer.seal(control)
    trainer.report(0)
    check_durable(sidecar, trainer, trainer.stage(1), content_of=1)
    assert sidecar.published() == [1]
    assert unfinished(sidecar) == []
