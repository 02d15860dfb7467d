"""What is whole, by the ledger's own word: what is offered, planned, and never begun anew over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from trainer import FakeTrainer, make_layout

from keepstep.core.candidates import Candidates
from keepstep.image import Layout, Section, TensorSpec
from keepstep.steps import Answer, StepId
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]


def twin_layout(rank: int) -> Layout:
    """Two ranks whose images have the very same boxes."""
    specs = [TensorSpec(name="model.w", dtype="F32", shape=(2048,), section=Section.PARAMS)]
    return Layout.build(specs, rank=rank, world=2, twins=(1 - rank,))


def replicas(sidecar: SidecarProcess, trainers: Trainers) -> list[FakeTrainer]:
    ranks = [trainers(sidecar.socket, rank, 2) for rank in range(2)]
    for one in ranks:
        one.layout = twin_layout(one.rank)
        one.begin_run()
    return ranks


def come(sidecar: SidecarProcess, trainers: Trainers, rank: int, world: int) -> FakeTrainer:
    trainer = trainers(sidecar.socket, rank, world)
    trainer.connect()
    return trainer


# --- twins -------------------------------------------------------------------------------------


def test_a_step_of_which_a_twin_must_stand_in_does_not_beat_a_complete_one(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    ranks = replicas(sidecar, trainers)
    complete, _ = (one.stage(4) for one in ranks)
    ranks[0].stage(5)
    for one in ranks:
        one.disconnect()
    for rank in range(2):
        found = come(sidecar, trainers, rank, 2).candidates()
        assert [one.id for one in found.offers] == [complete]
        assert [one.id for one in found.candidates] == [complete]


# --- contested ---------------------------------------------------------------------------------


def test_a_step_of_two_writers_is_not_offered(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    options = ("--archive", str(archive), "--archive-every", "1")
    sidecar = sidecars().start(*options)
    trainer = trainers(sidecar.socket).begin_run()
    id = trainer.stage(4)
    assert trainer.wait(id, "archived", flush=True).reached
    sidecar.kill()
    sidecar.lose_memory()
    shutil.rmtree(sidecar.volume)
    sidecar.start()  # it does not know of the archive
    other = trainers(sidecar.socket)
    other.layout = make_layout(name="other")
    other.begin_run()
    assert other.stage(4) == id
    assert other.wait(id, "committed", flush=True).reached
    sidecar.kill()
    sidecar.start(*options)
    found = come(sidecar, trainers, 0, 1)
    said = eventually(lambda: _known(found), what="the archive was looked at")
    assert (said.offers, said.candidates, said.answer) == ((), (), Answer.UNKNOWN)
    assert "two different images of rank 0" in said.reason


def _known(trainer: FakeTrainer) -> Candidates | None:
    """What it can restore, once both writers are known of."""
    said = trainer.candidates()
    return None if said.candidates or said.offers else said


# --- another world -----------------------------------------------------------------------------


def test_steps_of_a_larger_world_that_are_not_whole_are_never_begun_anew_over(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start()
    ranks = [trainers(sidecar.socket, rank, 4).begin_run() for rank in range(4)]
    id = StepId(ranks[0].epoch.id, 400)
    for one in ranks[2:]:  # ranks 0 and 1 die first; nothing is committed
        assert one.stage(400) == id
        assert one.wait(id, "durable", flush=True).reached
    for one in ranks:
        one.disconnect()
    sidecar.kill()
    sidecar.lose_memory()
    sidecar.start()
    for rank in range(2):
        said = come(sidecar, trainers, rank, 2).candidates()
        assert (said.answer, said.candidates, said.offers) == (Answer.UNKNOWN, (), ())
        for part in (str(id), "saved by 4 ranks", "2 are running", "no copy of rank 0, 1"):
            assert part in said.reason


def test_a_lost_shard_of_another_world_is_named(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start()
    ranks = [trainers(sidecar.socket, rank, 4).begin_run() for rank in range(4)]
    id, *_ = (one.stage(4) for one in ranks)
    for one in ranks:
        assert one.wait(id, "committed", flush=True).reached
        one.disconnect()
    sidecar.kill()
    sidecar.lose_memory()
    for rank in (0, 1):
        next(sidecar.root.glob(f"0*/rank-{rank:05d}-*")).unlink()
    sidecar.start()
    said = come(sidecar, trainers, 0, 2).candidates()
    assert (said.answer, said.candidates) == (Answer.UNKNOWN, ())
    assert str(id) in said.reason
    assert "no copy of rank 0, 1" in said.reason
