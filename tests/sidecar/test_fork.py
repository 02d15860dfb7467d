"""A run that begins from a step of another run's archive, with real sidecars on both sides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, make_layout

from keepstep.errors import SidecarError
from keepstep.steps import Epoch, EpochId, StepId, TierAnswer
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]
Start = Callable[..., SidecarProcess]


@pytest.fixture
def step(sidecars: Callable[..., SidecarProcess], trainers: Trainers, archive: Path) -> StepId:
    """Steps 4 and 5 of two ranks in the archive of run `first`, which has ended; 4 is returned."""
    first = sidecars("first").start("--archive", str(archive), "--archive-every", "1")
    ranks = [trainers(first.socket, rank, 2).begin_run() for rank in range(2)]
    for number in (4, 5):
        ids = [rank.stage(number) for rank in ranks]
        for rank, step_id in zip(ranks, ids, strict=True):
            waited = rank.wait(step_id, "archived", flush=True)
            assert waited.reached, waited.reason
    for rank in ranks:
        rank.disconnect()
    first.kill()
    shutil.rmtree(first.memory)
    shutil.rmtree(first.root)
    return StepId(ranks[0].epoch.id, 4)


@pytest.fixture
def start(sidecars: Callable[..., SidecarProcess], archive: Path, tmp_path: Path) -> Start:
    """Starts the sidecar of run `second`, which begins from what is named."""

    def fork(text: str) -> SidecarProcess:
        memory = tmp_path / "slots"
        memory.mkdir(exist_ok=True)
        process = sidecars("second", memory=memory)
        return process.start(
            "--archive", str(archive), "--archive-every", "1", "--restore-from", text
        )

    return fork


def come(sidecar: SidecarProcess, trainers: Trainers, world: int = 2) -> list[FakeTrainer]:
    ranks = [trainers(sidecar.socket, rank, world) for rank in range(world)]
    for rank in ranks:
        rank.connect()
    return ranks


def go_on(ranks: list[FakeTrainer], parent: StepId, number: int = 2) -> Epoch:
    epoch = Epoch(EpochId(number, "0f0f0f0f"), parent)
    for rank in ranks:
        rank.restored(epoch)
        rank.register()
    return epoch


def test_a_fork_with_its_own_commit_never_restores_from_the_original_run_again(
    start: Start, trainers: Trainers, archive: Path, step: StepId
) -> None:
    second = start("first/4")
    ranks = come(second, trainers)
    go_on(ranks, step)
    ids = [rank.stage(5) for rank in ranks]
    assert all(
        rank.wait(step_id, "committed", flush=True).reached
        for rank, step_id in zip(ranks, ids, strict=True)
    )
    second.kill()
    shutil.rmtree(archive / "first")  # it is not even asked any more
    again = start("first/4")
    found = [trainer.candidates() for trainer in come(again, trainers)]
    assert [[each.id for each in vote.candidates] for vote in found] == [[ids[0]]] * 2
    assert [[each.id for each in vote.offers] for vote in found] == [[ids[0]]] * 2

    def settled() -> bool:
        return not any(tier["trouble"] for tier in again.get("/v1/status")["tiers"].values())

    eventually(settled, what="nobody misses the other run")


def test_a_damaged_byte_in_the_original_run_is_detected_and_reported(
    start: Start, trainers: Trainers, archive: Path, step: StepId
) -> None:
    path = archive / "first" / str(step) / "rank-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[len(make_layout(1, 2).header) + 77] ^= 1
    path.write_bytes(data)
    second = start("first/4")
    ranks = come(second, trainers)
    ranks[1].candidates()  # returns when the archive was looked at
    # who fetches ahead of the trainer may have found it first, and then the step is out of reach
    named = rf"first/{step}/rank-00001-of-00002|rank 1 does not hold step {step}"
    with pytest.raises(SidecarError, match=named):
        ranks[1].open(step)
    log = second.log.read_text()
    assert f"first/{step}/rank-00001-of-00002" in log
    assert path.read_bytes() == data, "what is another run's is not put aside"
    found = ranks[1].candidates()
    assert (found.answer, found.candidates) == (TierAnswer.UNKNOWN, ())
    assert str(step) in found.reason
