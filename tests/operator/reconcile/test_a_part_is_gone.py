"""A pod of several is gone with what it kept: what people are told is what the restart does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.shard import Ranks
from keepstep.wire.reports import Report, ReportedVolume
from keepstep_operator.api.model import PodRecord
from keepstep_operator.api.policy import OnLoss, VolumeKind
from keepstep_operator.api.run import RunStatus
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
    each_shard,
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
    return each_shard(report, alike=both)


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


# A drive of a node is another one: the run begins again where that is certain, and else waits.


HERE, ELSEWHERE = "@" + "1" * 16, "@" + "2" * 16


def drive(number: int, at: str = HERE) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000{at}"


def on(**volumes: str) -> dict[str, Any]:
    """The volumes of a sidecar's report, by name."""
    return {
        "volumes": tuple(
            ReportedVolume(name=name, drive_id=one, engine="direct", used_bytes=0, free_bytes=1)
            for name, one in volumes.items()
        )
    }


def on_drives(
    *volumes: dict[str, Any], status: RunStatus | None = None, **of_policy: Any
) -> tuple[Play, list[PodRecord], list[Sidecar]]:
    """Two pods on hostPaths that trained up to step 100, committed at 90."""
    given = volumes or (on(nvme=drive(1)), on(nvme=drive(2)))
    pods = [pod(rank) for rank in range(2)]
    play = Play(*pods, known_policy=policy(**of_policy))
    play.find(run_object(status))
    sidecars = [
        Sidecar(rank=rank, more=given[rank]).staged(98, 99, 100).durable(90) for rank in range(2)
    ]
    for one, sidecar in zip(pods, sidecars, strict=True):
        play.hear(one, sidecar.report())
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, pods, sidecars


def come_with(
    play: Play, one: PodRecord, volumes: dict[str, Any], **changes: Any
) -> tuple[PodRecord, Sidecar]:
    """The pod is deleted, and its successor has nothing of the run."""
    play.see(replace(one, deleting=True))
    play.lose(one)
    new = replace(one, uid=f"{one.uid}-new", created_at="2026-11-21T08:00:00Z", **changes)
    play.see(new)
    sidecar = Sidecar(rank=one.node_rank, started_at=play.now, epochs=[], more=volumes)
    play.hear(new, replace(sidecar, ready=False).report())  # before its scan
    sidecar.sequence = 1
    play.hear(new, sidecar.report())
    return new, sidecar


def test_another_drive_on_the_same_node_has_the_run_begin_again() -> None:
    play, pods, sidecars = on_drives()
    assert not play.told(pods[1]).gone_for_good
    new, mine = come_with(play, pods[0], on(nvme=drive(7)))
    assert play.told(pods[1]).gone_for_good
    assert play.told(new).gone_for_good
    (said,) = play.events("OtherDrive")
    assert "volume nvme of pod gpt-worker-0" in said
    assert f"({drive(7)[:36]}, formerly {drive(1)[:36]})" in said
    assert "the next start begins again at step 0" in said
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "PartGone")
    assert "volume nvme of pod gpt-worker-0 lies on another file system" in message
    assert "next start begins again at step 0" in message
    assert play.condition(COMMITTING)[:2] == ("False", "PartGone")

    fresh = later(2, None)
    play.hear(pods[1], sidecars[1].restored(fresh, tier=None, lost=100).report())
    play.hear(new, mine.restored(fresh, tier=None).report())
    play.wait(10)
    (said,) = play.events("FreshStart")
    assert "began at step 0 although older steps exist (100 steps lost): volume nvme" in said
    assert "kubectl annotate checkpointrun" in said
    play.hear(pods[1], sidecars[1].staged(3, epoch=fresh).durable(3, epoch=fresh).report())
    play.hear(new, mine.staged(3, epoch=fresh).durable(3, epoch=fresh).report())
    assert not play.told(pods[1]).gone_for_good
    assert play.condition(PROTECTED)[0] == "True"
    assert step(90) not in play.told(pods[1]).retire, "the former drive may yet be found"


def test_the_record_outlives_the_reconciler() -> None:
    first, second = on(a=drive(1), b=drive(3)), on(nvme=drive(2))
    before, pods, _ = on_drives(first, second)
    status = before.status
    assert [(one.node_rank, one.node, one.volume, one.id) for one in status.drives] == [
        (0, "node-0", "a", drive(1)),
        (0, "node-0", "b", drive(3)),
        (1, "node-1", "nvme", drive(2)),
    ]
    play = Play(pods[1], known_policy=policy())
    play.find(run_object(status))
    new = replace(pods[0], uid="new", created_at="2026-11-21T08:00:00Z")
    play.see(new)
    play.hear(new, Sidecar(rank=0, epochs=[], more=on(a=drive(7), b=drive(3))).report())
    assert not play.told(new).gone_for_good, "the other pod has not reported yet"
    play.hear(pods[1], Sidecar(rank=1, more=second).durable(90).report())
    assert play.told(new).gone_for_good
    assert play.status.drives == status.drives


def test_with_on_loss_wait_the_run_waits_and_says_what_lies_there() -> None:
    play, pods, _ = on_drives(on_loss=OnLoss.WAIT)
    new, _ = come_with(play, pods[0], on(nvme=drive(7)))
    assert not play.told(new).gone_for_good
    (said,) = play.events("OtherDrive")
    assert "starts wait (onLoss: Wait)" in said
    message = play.condition(PROTECTED)[2]
    assert "(volume nvme of pod gpt-worker-0 lies on another file system" in message
    assert "starts wait until it is back. To begin again at step 0: kubectl" in message


@pytest.mark.parametrize(
    "volumes",
    [
        pytest.param(on(nvme=drive(7, ELSEWHERE)), id="the drive is not mounted"),
        pytest.param(on(nvme=drive(1)), id="the same drive, and the directory is away"),
        pytest.param(on(nvme=drive(1, ELSEWHERE)), id="another directory of the same drive"),
        pytest.param(on(nvme=""), id="not known"),
        pytest.param(on(nvme="made up"), id="not a name"),
        pytest.param(on(other=drive(7)), id="another volume of the policy"),
        pytest.param(on(), id="no volume"),
        pytest.param(on(nvme=drive(7), **{"\x1b[31m": drive(8)}), id="a name that no volume has"),
        pytest.param(on(**{f"v{n}": drive(n) for n in range(100)}), id="more than a pod may have"),
        pytest.param(on(nvme=drive(7), other=drive(8)), id="one volume more"),
    ],
)
def test_where_the_drive_may_come_back_the_run_waits(volumes: dict[str, Any]) -> None:
    play, pods, _ = on_drives()
    new, _ = come_with(play, pods[0], volumes)
    assert not play.told(new).gone_for_good
    assert play.events("OtherDrive") == []
    assert "starts wait until it is back" in play.condition(PROTECTED)[2]
    assert play.status.drives[0].id == drive(1)


def test_a_pod_whose_own_drive_is_not_known_may_lack_what_is_missing() -> None:
    play, pods, _ = on_drives(on(nvme=drive(1)), on(nvme=""))
    new, _ = come_with(play, pods[0], on(nvme=drive(7)))
    assert not play.told(new).gone_for_good


def test_a_run_without_a_host_path_has_no_record_of_drives() -> None:
    pods = [pod(rank, volumes=(VolumeKind.EMPTY_DIR,)) for rank in range(2)]
    play = Play(*pods)
    for one in pods:
        sidecar = Sidecar(rank=one.node_rank, more=on(nvme=drive(1))).staged(100).durable(90)
        play.hear(one, sidecar.report())
        play.hear(one, sidecar.report())
    assert play.status.drives == []
