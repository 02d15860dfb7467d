"""A pod of several is gone with what it kept: what people are told is what the restart does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.shard import Ranks
from keepstep.wire.reports import Report
from keepstep_operator.api.model import PodRecord
from keepstep_operator.api.policy import OnLoss, VolumeKind
from keepstep_operator.reconcile.state.actions import NameFreshStart
from keepstep_operator.reconcile.status.conditions import (
    COMMITTING,
    PROTECTED,
    RESTORE_REFUSED,
)
from tests.operator.reconcile.samples import (
    FIRST,
    KEY,
    Play,
    Sidecar,
    later,
    pod,
    policy,
    run_object,
    step,
)

WAITS = {"on_loss": OnLoss.WAIT}
REFUSED = "no step is held by all 2 ranks"


def twins(report: Report) -> Report:
    """The same report of replicas: each rank's image has all boxes."""
    both = Ranks.of((0, 1))
    ranks = (
        replace(
            one,
            memory=tuple(replace(held, alike=both) for held in one.memory),
            local=tuple(replace(held, alike=both) for held in one.local),
        )
        for one in report.ranks
    )
    return replace(report, ranks=tuple(ranks))


def running(
    *, kind: VolumeKind = VolumeKind.EMPTY_DIR, alike: bool = False, **of_policy: object
) -> tuple[Play, list[PodRecord], list[Sidecar]]:
    """Two pods that trained up to step 100, committed at 90."""
    pods = [pod(0, volumes=(kind,)), pod(1, volumes=(kind,))]
    play = Play(*pods, known_policy=policy(**of_policy))
    sidecars = [Sidecar(rank=rank).staged(98, 99, 100).durable(90) for rank in (0, 1)]
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, twins(sidecar.report()) if alike else sidecar.report())
    return play, pods, sidecars


def delete(play: Play, one: PodRecord) -> None:
    play.see(replace(one, deleting=True))
    play.lose(one)


def come_again(play: Play, one: PodRecord) -> PodRecord:
    """Its successor, with nothing, whose trainer is there."""
    new = replace(one, uid=f"{one.uid}-new", created_at="2026-11-21T08:00:00Z")
    play.see(new)
    play.hear(new, Sidecar(rank=one.node_rank, started_at=play.now, epochs=[]).report())
    return new


def test_a_pod_whose_twin_is_left_costs_nothing_and_that_is_said_before() -> None:
    play, pods, _ = running(alike=True)
    assert play.status.survives == ["ContainerRestart", "PodRestart", "NodeLoss"]
    delete(play, pods[0])
    assert play.events("LastStepLost") == []
    come_again(play, pods[0])
    assert play.condition(PROTECTED)[0] == "True"
    assert "goes on from step 100" in play.condition(PROTECTED)[2]


def test_twins_on_one_node_outlive_a_pod_and_not_the_node() -> None:
    pods = [replace(pod(rank, volumes=(VolumeKind.EMPTY_DIR,)), node="one") for rank in (0, 1)]
    play = Play(*pods)
    for one in pods:
        play.hear(one, twins(Sidecar(rank=one.node_rank).staged(100).durable(90).report()))
    assert play.status.survives == ["ContainerRestart", "PodRestart"]
    assert "goes on from step 90 or newer" in play.condition(PROTECTED)[2]
    delete(play, pods[1])
    assert play.events("LastStepLost") == []


def test_a_shard_that_goes_with_its_pod_has_the_run_begin_again() -> None:
    play, pods, sidecars = running()
    assert play.status.survives == ["ContainerRestart"]
    assert "the run then begins at step 0" in play.condition(PROTECTED)[2]
    delete(play, pods[0])
    (said,) = play.events("LastStepLost")
    assert "before step 100 was kept" in said
    assert "the run begins again at step 0" in said
    new = come_again(play, pods[0])
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "PartGone")
    assert "the next start begins again at step 0" in message
    assert play.condition(COMMITTING)[:2] == ("False", "PartGone")
    assert "step 90 was committed" in play.condition(COMMITTING)[2]

    fresh = later(2, None)
    play.hear(pods[1], sidecars[1].restored(fresh, tier=None, lost=100).report())
    mine = Sidecar(rank=0, started_at=play.now, epochs=[]).restored(fresh, tier=None)
    mine.sequence = 5
    play.hear(new, mine.report())
    play.wait(10)
    (said,) = play.events("FreshStart")
    assert "began again at step 0 (100 steps lost): a part of every step went" in said
    play.hear(pods[1], sidecars[1].staged(3, epoch=fresh).durable(3, epoch=fresh).report())
    play.hear(new, mine.staged(3, epoch=fresh).durable(3, epoch=fresh).report())
    assert set(play.told(pods[1]).retire) == {step(90)}, "what is left of it is of no use"
    assert play.condition(PROTECTED)[0] == "True"
    assert play.condition(COMMITTING)[0] == "True"


@pytest.mark.parametrize("kind", [VolumeKind.EMPTY_DIR, VolumeKind.HOST_PATH])
def test_where_the_run_waits_the_texts_say_so_and_name_the_way_out(kind: VolumeKind) -> None:
    wait = WAITS if kind is VolumeKind.EMPTY_DIR else {}
    play, pods, _ = running(kind=kind, **wait)
    delete(play, pods[0])
    new = replace(pods[0], uid="pod-0-moved", node="node-9", created_at="2026-11-21T08:00:00Z")
    play.see(new)
    play.hear(new, Sidecar(rank=0, started_at=play.now, epochs=[]).report())
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "PartGone")
    assert "starts wait until it is back" in message
    assert f"-n {KEY.namespace} {KEY.name} keepstep.dev/fresh-start=allow" in message
    for said in play.events("LastStepLost"):
        assert "restarts wait for what is missing" in said or "goes on from step" in said


def refuse(play: Play, one: PodRecord, sidecar: Sidecar, times: int) -> None:
    sidecar.more = {"refusals": times, "refused": REFUSED}
    play.hear(one, sidecar.report())


def test_a_refused_start_is_a_condition_an_event_and_a_count_until_one_restores() -> None:
    play, pods, sidecars = running(**WAITS)
    refuse(play, pods[1], sidecars[1], 1)
    assert play.events("RestoreRefused") == [f"1 start was refused: {REFUSED}"]
    refuse(play, pods[1], sidecars[1], 3)
    assert play.condition(RESTORE_REFUSED) == (
        "True",
        RESTORE_REFUSED,
        f"3 starts were refused: {REFUSED}",
    )
    assert play.condition(PROTECTED)[:2] == ("False", RESTORE_REFUSED)
    refuse(play, pods[1], sidecars[1], 0)
    assert all(one.type != RESTORE_REFUSED for one in play.status.conditions)


def test_a_person_may_have_the_run_begin_again_once() -> None:
    play, pods, sidecars = running(**WAITS)
    play.find(run_object())
    assert not play.told(pods[1]).begin_again
    play.find(run_object(fresh_start="allow"))
    assert play.told(pods[1]).begin_again

    fresh = later(2, None)
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, sidecar.restored(fresh, tier=None).report())
    assert NameFreshStart(KEY, fresh.id) in play.actions
    play.find(run_object(fresh_start=str(fresh.id)))
    assert play.told(pods[1]).begin_again, "until it has a step, a crash begins again, too"
    fresh = later(3, None, after=fresh, nonce="cccccccc")
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, sidecar.restored(fresh, tier=None).report())
    assert play.told(pods[1]).begin_again
    assert NameFreshStart(KEY, fresh.id) in play.actions
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, sidecar.staged(1, epoch=fresh).durable(1, epoch=fresh).report())
    assert not play.told(pods[1]).begin_again


def test_a_request_to_begin_again_ends_with_a_restore() -> None:
    play, pods, sidecars = running(**WAITS)
    play.find(run_object(fresh_start="allow"))
    onward = later(2, 100)
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, sidecar.restored(onward).report())
    assert NameFreshStart(KEY, onward.id) in play.actions
    assert not play.told(pods[1]).begin_again
    assert FIRST.id != onward.id


def test_of_a_single_pod_all_is_gone_and_so_it_begins_at_step_0_whatever_the_policy_says() -> None:
    only = pod(0, volumes=(VolumeKind.EMPTY_DIR,))
    play = Play(only, known_policy=policy(**WAITS))
    play.hear(only, Sidecar(rank=0, world=1).staged(100).durable(90).report())
    assert "the run then begins at step 0" in play.condition(PROTECTED)[2]
