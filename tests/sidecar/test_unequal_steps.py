"""Ranks that save different steps: every rank is told through its lease, and the drive stays
bounded."""

from __future__ import annotations

from collections.abc import Callable

from trainer import FakeTrainer

from keepstep.core.retention import NEVER_WHOLE_KEPT
from keepstep.wire.trainer import LeaseStreamEvent
from tests.harness import SidecarProcess, eventually, matching

Trainers = Callable[..., FakeTrainer]


def two_ranks(sidecar: SidecarProcess, trainers: Trainers) -> list[FakeTrainer]:
    return [trainers(sidecar.socket, rank, 2).begin_run() for rank in range(2)]


def warning(trainer: FakeTrainer) -> str:
    """The next warning of the lease's stream; waits for it."""
    while not (found := trainer.news(LeaseStreamEvent).warning):
        pass
    return found


def pending(sidecar: SidecarProcess) -> list[str]:
    return sorted(path.parent.name for path in matching(sidecar.root, "pending/*/rank-*"))


def test_shards_of_steps_that_can_never_be_completed_do_not_fill_the_drive(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    ranks = two_ranks(sidecar, trainers)
    for step in range(60):
        step_id = ranks[step % 2].stage(step)
        ranks[step % 2].wait(step_id, "durable", flush=True)
    eventually(lambda: len(pending(sidecar)) <= NEVER_WHOLE_KEPT + 2, what="the older are retired")


def test_a_rank_writes_nothing_to_the_drive_once_the_other_rank_has_closed(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    ranks = two_ranks(sidecar, trainers)
    ranks[1].release()
    for step in range(40):
        ranks[0].stage(step)
    text = warning(ranks[0])
    assert "it has called close()" in text
    assert ranks[0].wait(ranks[0].id_of(39), "committed", timeout_s=0.2).reason == text
    assert len(pending(sidecar)) <= 2


def test_a_rank_still_stages_steps_in_memory_once_the_other_rank_has_closed(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    ranks = two_ranks(sidecar, trainers)
    for step in range(8):
        for rank in ranks:
            rank.stage(step)
    ranks[1].take_slot()  # it has a slot at hand that still seals an older step
    ranks[1].release()
    for step in range(8, 20):
        ranks[0].stage(step)
