"""Steps of another world that are not whole are never begun anew over."""

from __future__ import annotations

from collections.abc import Callable

from trainer import FakeTrainer

from keepstep.steps import StepId, TierAnswer
from tests.harness import SidecarProcess


def test_incomplete_steps_of_a_larger_world_prevent_a_silent_start_at_step_0(
    sidecars: Callable[..., SidecarProcess], trainers: Callable[..., FakeTrainer]
) -> None:
    sidecar = sidecars().start()
    ranks = [trainers(sidecar.socket, rank, 4).begin_run() for rank in range(4)]
    step_id = StepId(ranks[0].epoch.id, 400)
    for rank in ranks[2:]:  # ranks 0 and 1 die first; nothing is committed
        assert rank.stage(400) == step_id
        assert rank.wait(step_id, "durable", flush=True).reached
    for rank in ranks:
        rank.disconnect()
    sidecar.kill()
    sidecar.lose_memory()
    sidecar.start()
    for rank in range(2):
        trainer = trainers(sidecar.socket, rank, 2)
        trainer.connect()
        ballot = trainer.candidates()
        assert (ballot.answer, ballot.candidates, ballot.offers) == (TierAnswer.UNKNOWN, (), ())
        for part in (str(step_id), "saved by 4 ranks", "2 are running", "no copy of rank 0, 1"):
            assert part in ballot.reason
