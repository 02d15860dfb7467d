"""A run that began from a step of another one: what its status and events say of it."""

from __future__ import annotations

from dataclasses import replace

from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep_operator.api.run import as_json
from tests.chart.charts import crds, schema_of
from tests.operator.reconcile.samples import Play, Sidecar, pod, policy, run_object, step

PARENT = StepId(EpochId(3, "abcdef01"), 1200)
BEGAN = Epoch(EpochId(4, "10fedcba"), PARENT, "gpt-1a2b3c4d")
ORIGIN = f"gpt-1a2b3c4d/{PARENT}"


def forked() -> tuple[Play, list[Sidecar]]:
    """Two pods that have just begun from the other run's step."""
    pods = [pod(rank) for rank in (0, 1)]
    sidecars = [Sidecar(rank=rank, epochs=[]) for rank in (0, 1)]
    play = Play(*pods, known_policy=policy())
    play.hear_all(*zip(pods, sidecars, strict=True))
    for one in sidecars:
        one.restored(BEGAN, tier=Tier.ARCHIVE).staged(1201, epoch=BEGAN)
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, sidecars


def test_a_fork_is_told_with_its_origin_and_is_no_restart() -> None:
    play, _ = forked()
    assert play.events("Forked") == [
        "began from step 1200 of run gpt-1a2b3c4d from archive in 1.5 s"
    ]
    assert play.events("Restored") == play.events("FreshStart") == []
    assert (play.status.origin, play.status.restarts, play.status.lost_steps) == (ORIGIN, 0, 0)
    allowed = schema_of(crds()["CheckpointRun"])["properties"]["status"]["properties"]
    assert allowed["origin"]["maxLength"] >= len(as_json(play.status)["origin"])


def test_a_restart_of_a_fork_is_a_restart_and_its_origin_stays() -> None:
    play, sidecars = forked()
    again = Epoch(EpochId(5, "00000005"), step(1201, BEGAN))
    for one in sidecars:
        one.restored(again, tier=Tier.MEMORY)
    play.hear_all(*zip([pod(0), pod(1)], sidecars, strict=True))
    assert (play.status.origin, play.status.restarts) == (ORIGIN, 1)
    assert len(play.events("Forked")) == len(play.events("Restored")) == 1


def test_a_new_reconciler_does_not_tell_of_it_again() -> None:
    play, sidecars = forked()
    heir = Play(known_policy=policy())
    heir.find(run_object(play.status))
    pods = [pod(0), pod(1)]
    for one in pods:
        heir.see(one)
    heir.hear_all(*zip(pods, [replace(one) for one in sidecars], strict=True))
    assert heir.events("Forked") == []
    assert heir.status.origin == ORIGIN
