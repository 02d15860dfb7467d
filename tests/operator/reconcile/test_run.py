"""Scenarios of one run: what its status says, and what its sidecars are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.retention import Retention
from keepstep.core.shard import Shard
from keepstep.core.suspicion import Failure
from keepstep.steps import Tier
from keepstep.wire.reports import ReportedVolume
from keepstep.wire.status import TierProgress
from keepstep_operator.api.model import JobState, RunKey
from keepstep_operator.api.policy import Accounting, VolumeKind
from keepstep_operator.api.run import CommittedStatus, RunStatus, StartStatus, as_json, utc
from keepstep_operator.api.tiers import Archive, Directory
from keepstep_operator.reconcile.state.actions import (
    AskJob,
    DeleteRun,
    NameFreshStart,
    NoteCommit,
    WriteStatus,
)
from keepstep_operator.reconcile.state.run import MOST_ALARMS
from keepstep_operator.reconcile.status.conditions import COMMITTING, FULLY_INJECTED, PROTECTED
from keepstep_operator.reconcile.writers.status_writer import status_of
from tests.operator.reconcile.samples import (
    FIRST,
    JOB,
    KEY,
    T0,
    Play,
    Sidecar,
    accepted,
    each_shard,
    later,
    listed,
    pod,
    policy,
    run_object,
    step,
)


def running(*, kind: VolumeKind = VolumeKind.HOST_PATH, **changes: object):  # type: ignore[no-untyped-def]
    """Two pods of one rank each that hold steps 98 to 100 in memory and 90 on local."""
    pods = [pod(rank, volumes=(kind,), **changes) for rank in (0, 1)]
    sidecars = [Sidecar(rank=rank).staged(98, 99, 100).durable(90) for rank in (0, 1)]
    play = Play(*pods)
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, pods, sidecars


def test_a_watermark_advances_only_when_both_pods_have_reported_the_step() -> None:
    play, pods, sidecars = running()
    assert play.status.committed is not None
    assert play.status.committed.id == str(step(90))
    play.hear(pods[0], sidecars[0].durable(100).report())
    assert play.status.watermarks["local"] == str(step(90))
    play.hear(pods[1], sidecars[1].durable(100).report())
    assert play.status.watermarks["local"] == str(step(100))
    assert play.registry.reply(pods[0].uid, at=play.now).committed["local"] == step(100)
    assert play.status.behind == 0
    assert play.events("Committed") == [
        "step 90 is durable on all 2 ranks",
        "step 100 is durable on all 2 ranks",
    ]


def test_the_step_is_what_all_ranks_have_staged_even_when_reports_share_none() -> None:
    play, pods, sidecars = running()
    play.hear(pods[0], sidecars[0].staged(101, 102, 103, 104, 105, 106).report())
    assert play.status.step == 100
    play.hear(pods[1], sidecars[1].staged(110, 111, 112, 113).report())
    assert play.status.step == 106
    assert play.status.behind == 16


def test_a_late_report_changes_nothing() -> None:
    play, pods, sidecars = running()
    early = sidecars[0].report()
    play.hear(pods[0], sidecars[0].durable(100).report())
    play.hear(pods[1], sidecars[1].durable(100).report())
    play.hear(pods[0], early)
    assert play.status.watermarks["local"] == str(step(100))


def test_a_sidecar_that_begins_anew_counts_from_one_and_is_believed() -> None:
    play, pods, sidecars = running()
    old = [sidecars[0].report() for _ in range(5)][-1]
    play.hear(pods[0], old)
    # its clock may even have been set back
    again = Sidecar(rank=0, started_at=T0 - 3600).staged(100, 101).durable(90, 100)
    play.hear(pods[0], again.report())
    play.hear(pods[1], sidecars[1].staged(101).durable(100).report())
    assert play.status.watermarks["local"] == str(step(100))
    play.hear(pods[0], replace(old, sequence=99))
    assert play.status.watermarks["local"] == str(step(100))


def test_pods_that_were_created_in_the_same_second_do_not_take_turns() -> None:
    play, pods, sidecars = running()
    twin, places = replace(pods[0], uid="pod-0-2"), play.registry.runs[KEY].ledger.places
    play.see(twin)
    play.hear(twin, Sidecar(rank=0, started_at=T0 + 60).durable(90).report())
    play.hear(pods[0], sidecars[0].report())
    assert places[0].pod == twin.uid
    play.lose(twin)
    play.hear(pods[0], sidecars[0].report())
    assert places[0].pod == pods[0].uid


def test_a_pod_that_comes_back_to_its_node_finds_what_its_hostpath_kept() -> None:
    play, pods, _ = running()
    play.lose(pods[0])
    status = play.status
    assert status.committed is not None
    assert status.committed.step == 90
    assert status.survives == ["ContainerRestart", "PodRestart"]
    newer = pod(0, life=2)
    play.see(newer)
    scanning = Sidecar(rank=0, started_at=T0 + 60, ready=False, alive=False, epochs=[], library="")
    play.hear(newer, scanning.report())
    assert play.status.committed is not None, "what is not scanned yet is not lost"
    play.hear(newer, replace(scanning, ready=True, epochs=[FIRST]).durable(90).report())
    assert play.registry.reply(newer.uid, at=play.now).plan == step(90)
    assert play.status.phase == "Restoring"


def test_a_pod_takes_its_emptydir_with_it_and_the_status_says_so() -> None:
    play, pods, _ = running(kind=VolumeKind.EMPTY_DIR)
    assert play.status.survives == ["ContainerRestart"]
    assert "emptyDir" in play.condition(PROTECTED)[2]
    play.lose(pods[0])
    assert play.status.survives == []
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "PodsMissing")
    assert "look at the job" in message


def test_the_memory_of_a_pod_that_failed_is_gone_even_while_its_object_stays() -> None:
    play, pods, _ = running()
    play.see(replace(pods[0], phase="Failed", training=False))
    assert play.registry.reply(pods[1].uid, at=play.now).committed["memory"] == step(90)
    assert play.status.ranks[0].memory is None
    assert play.status.ranks[0].local == 90


def test_the_last_report_of_a_pod_tells_of_its_volumes_and_not_of_its_memory() -> None:
    play, pods, sidecars = running()
    play.hear(pods[1], sidecars[1].durable(100).report())
    play.see(replace(pods[0], phase="Failed", training=False))
    play.hear(pods[0], sidecars[0].durable(100).report())
    assert play.status.watermarks["local"] == str(step(100))
    assert play.status.ranks[0].memory is None


@pytest.mark.parametrize(
    ("node", "kind"), [("node-9", VolumeKind.HOST_PATH), ("node-0", VolumeKind.EMPTY_DIR)]
)
def test_a_new_pod_is_not_credited_with_what_it_cannot_have(node: str, kind: VolumeKind) -> None:
    play, *_ = running(kind=kind)
    moved = pod(0, life=2, node=node, volumes=(kind,))
    play.see(moved)
    scanning = Sidecar(rank=0, started_at=T0 + 60, epochs=[], ready=False).report()
    play.hear(moved, replace(scanning, ranks=()))
    assert "local" not in play.status.watermarks


def test_a_rank_that_a_scanned_volume_does_not_name_is_not_there() -> None:
    play, pods, sidecars = running()
    play.hear(pods[0], replace(sidecars[0].report(), ranks=(), ready=False))
    assert play.status.watermarks["local"] == str(step(90))
    play.hear(pods[0], replace(sidecars[0].report(), ranks=()))
    assert "local" not in play.status.watermarks


def test_an_older_watermark_is_believed_only_when_everybody_has_told() -> None:
    play, pods, sidecars = running()
    for one in sidecars:
        one.durable(100)
    play.hear_all(*zip(pods, sidecars, strict=True))
    newer = pod(0, life=2)
    play.see(newer)
    again = Sidecar(rank=0, started_at=T0 + 60, ready=False).durable(90)
    play.hear(newer, again.report())
    assert play.status.committed is not None
    assert play.status.committed.step == 100
    again.ready = True
    play.hear(newer, again.report())
    assert play.status.committed.step == 90


# --- restarts ------------------------------------------------------------------------------------


def test_a_restart_loses_the_steps_between_the_newest_staged_and_the_restored_one() -> None:
    play, pods, sidecars = running()
    second = later(2, 90)
    play.hear(pods[0], sidecars[0].restored(second, tier=Tier.LOCAL).report())
    assert play.status.restarts == 0, "not before both ranks told of it"
    play.hear(pods[1], sidecars[1].restored(second, tier=Tier.MEMORY).report())
    status = play.status
    assert (status.restarts, status.lost_steps) == (1, 10)
    assert status.recent[0].type == "Restored"
    assert (status.recent[0].step, status.recent[0].tier) == (90, "local")
    assert play.events("Restored") == ["restored step 90 from local in 1.5 s; 10 steps lost"]
    assert status.epoch == str(second.id)
    assert status.step == 90


def test_steps_that_every_rank_says_it_lost_count_even_if_no_report_showed_them() -> None:
    play, pods, sidecars = running()
    second = later(2, 100)
    for one in sidecars:
        one.restored(second, lost=3)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert play.status.lost_steps == 3


def test_a_restart_that_one_sidecar_forgot_is_counted_after_a_while() -> None:
    play, pods, sidecars = running()
    play.hear(pods[0], sidecars[0].restored(later(2, 100)).report())
    play.wait(30)
    assert play.status.restarts == 0
    play.wait(6)
    assert play.status.restarts == 1


def test_a_reconciler_that_restarts_goes_on_counting_where_it_was() -> None:
    play, pods, sidecars = running()
    play.find(run_object())
    second = later(2, 90)
    for one in sidecars:
        one.restored(second)
    play.hear_all(*zip(pods, sidecars, strict=True))
    written = play.status

    heir = Play(*pods)
    heir.find(run_object(written))
    heir.hear_all(*zip(pods, sidecars, strict=True))
    assert (heir.status.restarts, heir.status.lost_steps) == (1, 10)
    assert heir.status.recent == written.recent
    assert heir.status.committed == written.committed
    assert heir.status.conditions == written.conditions
    assert heir.events("Restored") == []

    third = later(3, 90)
    for one in sidecars:
        one.restored(third)
    heir.hear_all(*zip(pods, sidecars, strict=True))
    assert heir.status.restarts == 2


def test_a_run_that_lost_everything_says_what_it_cost_and_trusts_the_new_epoch() -> None:
    play, pods, _ = running(kind=VolumeKind.EMPTY_DIR)
    for one in pods:
        play.lose(one)
    # the new nonce sorts before the old one, and the number begins anew
    again = later(1, None, nonce="00000000")
    newer = [pod(rank, life=2, volumes=(VolumeKind.EMPTY_DIR,)) for rank in (0, 1)]
    for rank, one in enumerate(newer):
        play.see(one)
        sidecar = Sidecar(rank=rank, started_at=T0 + 60, epochs=[])
        play.hear(one, sidecar.restored(again, tier=None).report())
    status = play.status
    assert (status.restarts, status.lost_steps) == (1, 100)
    assert status.recent[0].type == "FreshStart"
    assert "emptyDir" in status.recent[0].message
    assert status.committed is None
    for rank, one in enumerate(newer):
        sidecar = Sidecar(rank=rank, started_at=T0 + 60, epochs=[again])
        play.hear(one, replace(sidecar, sequence=5).staged(1, epoch=again).report())
    assert play.status.step == 1
    assert play.status.watermarks["memory"] == str(step(1, again))
    assert play.status.warnings == []


def test_a_run_that_lost_everything_while_the_reconciler_was_away_is_a_fresh_start() -> None:
    pods = [pod(0), pod(1)]
    play = Play(*pods)
    play.find(run_object(RunStatus(step=100, epoch=str(later(5, 90).id), restarts=4)))
    for rank, one in enumerate(pods):
        play.hear(one, Sidecar(rank=rank, epochs=[]).restored(FIRST, tier=None).report())
    assert (play.status.restarts, play.status.lost_steps) == (5, 100)
    assert len(play.events("FreshStart")) == 1


def test_a_fresh_start_beside_older_steps_waits_for_somebody_to_acknowledge_it() -> None:
    play, pods, sidecars = running()
    fresh = later(2, None)
    for one in sidecars:
        one.restored(fresh, tier=None).durable(5, 6, 7, epoch=fresh)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert "fresh-start=newest" in play.events("FreshStart")[0]
    assert any("fresh-start=newest" in text for text in play.status.warnings)
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(5, fresh),)

    play.find(run_object(fresh_start="newest"))
    assert [one for one in play.actions if isinstance(one, NameFreshStart)] == [
        NameFreshStart(KEY, fresh.id)
    ]
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(90), step(5, fresh))
    assert play.status.warnings == []


def test_an_acknowledgement_of_the_newest_never_means_one_that_comes_later() -> None:
    play, pods, sidecars = running()
    play.find(run_object(fresh_start="newest"))
    play.wait(200)
    for one in sidecars:
        one.restored(later(2, None), tier=None)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert not [one for one in play.actions if isinstance(one, NameFreshStart)]
    assert play.status.warnings != []


# --- what sidecars are told ----------------------------------------------------------------------


def test_steps_are_retired_only_for_a_known_policy_that_is_not_paused_and_never_pins() -> None:
    play, pods, sidecars = running()
    for one in sidecars:
        one.durable(150, 200)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(90),)
    play.find(run_object(pins=(str(step(90)),), generation=2))
    assert play.registry.reply(pods[0].uid, at=play.now).retire == ()
    play.find(run_object(paused=True, generation=3))
    reply = play.registry.reply(pods[0].uid, at=play.now)
    assert (reply.retire, reply.plan) == ((), None)

    unknown = Play(*pods, known_policy=policy(name="another"))
    unknown.hear_all(*zip(pods, sidecars, strict=True))
    assert unknown.registry.reply(pods[0].uid, at=unknown.now).retire == ()


def test_how_the_script_failed_is_told_to_all_pods_also_to_those_that_are_made_anew() -> None:
    play, pods, sidecars = running()
    first, second = (Failure(at=step(one), after=(step(90),)) for one in (99, 100))
    for one, failure in zip(sidecars, (first, second), strict=True):
        one.more["failures"] = (failure,)
    play.hear_all(*zip(pods, sidecars, strict=True))
    for one in pods:
        assert play.registry.reply(one.uid, at=play.now).failures == (first, second)
    anew = pod(0, life=2)
    play.see(anew)
    play.hear(anew, Sidecar(rank=0).report())
    assert play.registry.reply(anew.uid, at=play.now).failures == (first, second)


def test_a_pod_hears_of_every_step_it_holds_that_all_ranks_have() -> None:
    play, pods, sidecars = running()
    sidecars[0].durable(95, 97, 100)
    sidecars[1].durable(95, 100, 105)
    play.hear_all(*zip(pods, sidecars, strict=True))
    both = (step(90), step(95), step(100))
    assert [play.registry.reply(pod.uid, at=play.now).commits for pod in pods] == [both, both]
    newcomer = replace(sidecars[1].report(), ranks=())
    play.hear(pods[1], newcomer)
    assert play.registry.reply(pods[1].uid, at=play.now).commits == ()


def test_nothing_is_retired_while_a_rank_has_not_reported() -> None:
    pods = [pod(0), pod(1)]
    play = Play(*pods)
    play.hear(pods[0], Sidecar(rank=0).durable(10, 20, 30, 40).report())
    assert play.registry.reply(pods[0].uid, at=play.now).retire == ()


def test_a_changed_policy_holds_for_pods_that_were_made_with_it() -> None:
    play, pods, sidecars = running()
    for one in sidecars:
        one.durable(150, 205, 210, 215)
    play.hear_all(*zip(pods, sidecars, strict=True))
    play.note(play.registry.policy_seen(policy(generation=2, keep=Retention(last=1))))
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(90),)
    assert "has changed" in play.status.warnings[0]
    play.see(replace(pods[0], policy_generation=2))
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(90), step(210))
    play.note(play.registry.policy_gone(KEY.namespace, "default"))
    assert play.registry.reply(pods[0].uid, at=play.now).retire == (step(90), step(210))
    assert "does not exist any more" in play.status.warnings[0]
    assert play.status.policy is not None
    assert play.status.policy.generation == 2


def test_a_start_lasts_from_the_first_pod_until_none_stays() -> None:
    first = pod(0, sidecar_image="sidecar:1")
    play = Play(first)
    assert play.status.start == StartStatus(image="sidecar:1")
    play.see(pod(1, life=2, sidecar_image="sidecar:2"))
    assert play.status.start == StartStatus(image="sidecar:1"), "of the oldest"
    play.see(replace(first, deleting=True))
    assert play.status.start == StartStatus(image="sidecar:2")
    play.see(pod(1, life=2, phase="Succeeded"))
    assert play.status.start is None


@pytest.mark.parametrize("policy_first", [True, False])
def test_a_reconciler_that_begins_goes_on_by_the_policy_that_the_pods_were_made_with(
    policy_first: bool,
) -> None:
    before = Play(pod(0)).status
    changed = policy(generation=2, keep=Retention(last=1))
    heir = Play(known_policy=changed if policy_first else policy(name="another"))
    heir.see(pod(0))
    heir.find(run_object(before, policy=accepted(generation=1)))
    heir.note(heir.registry.policy_seen(changed))

    def goes_by() -> int:
        known = heir.registry.runs[KEY].policy
        return known.generation if known is not None else 0

    assert goes_by() == 1
    heir.see(pod(0, life=2, policy_generation=2))
    assert goes_by() == 2


def test_a_policy_that_is_not_accepted_never_replaces_the_one_in_use() -> None:
    play, *_ = running()
    broken = policy(generation=2, problem=("InvalidMemory", "spec.memory: too small"))
    play.note(play.registry.policy_seen(broken))
    assert play.status.policy is not None
    assert play.status.policy.generation == 1
    assert "not accepted" in play.status.warnings[0]


# --- conditions ----------------------------------------------------------------------------------


def test_a_run_that_is_well_says_what_each_kind_of_loss_would_cost() -> None:
    play, *_ = running()
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("True", "Protected")
    assert message == (
        "the restart of a container goes on from step 100; a pod that comes back to its node goes"
        " on from step 90 or newer; a node that is lost takes its part with it; a new job begins"
        " anew, unless its pods carry the label keepstep.dev/run"
    )
    assert play.condition(FULLY_INJECTED) == ("True", "AllInjected", "all 2 pods have the sidecar")
    assert play.condition(COMMITTING) == (
        "True",
        "Committing",
        f"step 90 became committed at {utc(T0)}; 10 steps are staged and not committed",
    )
    assert play.status.protected == "True"
    assert play.status.survives_summary == "ContainerRestart,PodRestart"
    assert play.status.tiers == "local"
    assert play.status.phase == "Running"


def test_a_run_with_a_label_outlives_its_job() -> None:
    play, *_ = running(labelled=True)
    assert play.status.survives == ["ContainerRestart", "PodRestart", "JobRecreate"]


def test_an_annotated_pod_without_a_sidecar_is_an_event_and_a_condition_that_says_what_to_do() -> (
    None
):
    play, _, _ = running()
    bare = pod(2, injected=False, volumes=())
    play.see(bare)
    expected = "kubectl delete pod -n team gpt-worker-2"
    assert expected in play.events("NotInjected")[0]
    status, reason, message = play.condition(FULLY_INJECTED)
    assert (status, reason) == ("False", "NotInjected")
    assert expected in message
    assert play.condition(PROTECTED)[1] == "NotInjected"
    play.lose(bare)
    assert play.condition(FULLY_INJECTED)[0] == "True"


def test_a_pod_without_a_sidecar_is_told_again_before_its_event_expires() -> None:
    play, _, _ = running()
    bare = pod(2, injected=False, volumes=())
    play.see(bare)
    told = len(play.events("NotInjected"))
    for _ in range(60):
        play.wait(60.0)
    assert told < len(play.events("NotInjected")) <= told + 3, "twice an hour, not every minute"
    assert "restarts fail" in play.events("NotInjected")[-1]
    play.lose(bare)
    told = len(play.events("NotInjected"))
    play.wait(7200.0)
    assert len(play.events("NotInjected")) == told


def test_what_admission_wrote_about_a_pod_is_told() -> None:
    play = Play(pod(0, injected=False, trouble="there is no CheckpointPolicy typo"))
    assert "there is no CheckpointPolicy typo" in play.events("NotInjected")[0]
    assert play.condition(PROTECTED)[1] == "NotInjected"


def test_what_injection_did_otherwise_than_asked_is_told_once_for_all_pods() -> None:
    said = "the sidecar serves no metrics, since container train uses port 26740"
    play = Play(pod(0, warnings=(said,)), pod(1, warnings=(said, "another")))
    assert play.status.warnings == [
        "another (pod gpt-worker-1)",
        f"{said} (pod gpt-worker-0 and 1 more)",
    ]
    play.lose(pod(1))
    assert play.status.warnings == [f"{said} (pod gpt-worker-0)"]


def test_ranks_that_no_sidecar_has_are_told_once_no_pod_is_late() -> None:
    """Only the workers' template has the annotation: the master's pod is not known."""
    play = Play(pod(1))
    play.hear(pod(1), Sidecar(rank=1, world=2).staged(99, 100).report())
    assert play.condition(FULLY_INJECTED)[1] == "AllInjected"
    play.wait(59)
    assert play.condition(FULLY_INJECTED)[1] == "AllInjected"
    play.wait(2)
    status, reason, message = play.condition(FULLY_INJECTED)
    assert (status, reason) == ("False", "RanksWithoutSidecar")
    assert "2 ranks, but its 1 pods serve 1" in message
    assert "keepstep.dev/policy to every pod template" in message
    assert play.condition(PROTECTED)[0] == "False"


def test_a_training_image_without_the_library_is_told_after_a_minute() -> None:
    play, pods, sidecars = running()
    for one in sidecars:
        one.library, one.alive, one.memory, one.local = "", False, [], []
    play.hear_all(*zip(pods, sidecars, strict=True))
    play.wait(59)
    assert play.events("LibraryMissing") == []
    play.wait(2)
    assert len(play.events("LibraryMissing")) == 2
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "LibraryMissing")
    assert "pip install ./lib of its source" in message
    sidecars[0].library = sidecars[1].library = "0.1.0"
    play.hear_all(*zip(pods, sidecars, strict=True))
    play.wait(1)
    assert play.condition(PROTECTED)[1] == "NothingKept"


def test_silent_sidecars_make_protection_unknown() -> None:
    play, pods, sidecars = running()
    play.wait(60)
    play.hear(pods[0], sidecars[0].report())
    play.wait(31)
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("Unknown", "SidecarsSilent")
    assert "gpt-worker-1" in message
    assert "gpt-worker-0" not in message


@pytest.mark.parametrize(("every", "stalls"), [(None, True), (10, True), (1000, False)])
def test_commits_that_stop_while_steps_are_staged_are_stalled(
    every: int | None, stalls: bool
) -> None:
    play, pods, sidecars = running()
    play.note(play.registry.policy_seen(policy(generation=1, persist_every=every)))
    for number in range(101, 161):
        play.now += 20
        for one, sidecar in zip(pods, sidecars, strict=True):
            play.hear(one, sidecar.staged(number).report())
    play.wait(1)
    assert bool(play.events("CommitStalled")) is stalls
    assert (play.condition(COMMITTING)[0] == "False") is stalls
    assert (play.condition(PROTECTED)[1] == "CommitStalled") is stalls
    if stalls:
        assert play.status.recent[0].type == "CommitStalled"
        assert "kubectl logs -n team gpt-worker-0" in play.condition(COMMITTING)[2]


def test_commits_that_stall_because_two_pods_have_one_node_rank_say_so_and_nothing_else() -> None:
    play, pods, sidecars = running()
    play.see(replace(pod(1, life=2), name="other-worker-0"))
    sidecars[1].more = {"volumes": (_full_volume(),)}
    play.hear(pods[1], sidecars[1].report())
    play.wait(1)
    status, reason, message = play.condition(COMMITTING)
    assert (status, reason) == ("False", "CommitStalled")
    assert "have node rank 1 between them" in message
    status, _, message = play.condition("DuplicateNodeRank")
    assert status == "True"
    assert "other-worker-0" in message
    assert "free space" not in message


def test_a_volume_that_takes_no_writes_is_a_stall_at_once() -> None:
    play, pods, sidecars = running()
    broken = ReportedVolume(
        name="nvme0", engine="direct", used_bytes=0, free_bytes=0, failed="No space left on device"
    )
    sidecars[1].more = {"volumes": (broken,)}
    play.hear(pods[1], sidecars[1].report())
    play.wait(1)
    message = play.events("CommitStalled")[0]
    assert "volume nvme0 of pod gpt-worker-1 on node node-1" in message
    assert "No space left on device" in message


def test_the_status_that_is_written_soon_after_a_report_of_trouble_tells_of_it() -> None:
    play, pods, sidecars = running()
    sidecars[1].more = {"volumes": (_full_volume(),)}
    play.hear(pods[1], sidecars[1].report())
    assert play.condition("Committing")[0] == "False"


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    play, pods, sidecars = running()
    since = play.status.conditions[0].last_transition_time
    play.now += 60
    play.hear(pods[0], sidecars[0].staged(101).report())
    assert play.status.conditions[0].last_transition_time == since
    play.see(pod(2, injected=False))
    assert play.status.conditions[0].last_transition_time == utc(T0 + 60)


def test_warnings_of_many_sidecars_are_told_once() -> None:
    play, pods, sidecars = running()
    for one in sidecars:
        one.more = {"warnings": ("slots are not locked",)}
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert play.status.warnings == ["slots are not locked (pod gpt-worker-0 and 1 more)"]


def test_clocks_an_hour_off_change_nothing_as_only_the_operators_own_is_read() -> None:
    play, pods, sidecars = running()
    for one, sidecar, off in zip(pods, sidecars, (3600.0, -3600.0), strict=True):
        report = sidecar.durable(100).report()
        ranks = tuple(replace(rank, staged_at=T0 + off) for rank in report.ranks)
        report = replace(report, ranks=ranks)
        play.hear(one, each_shard(report, written_at=T0 + off))
    assert play.status.committed == CommittedStatus(step=100, id=str(step(100)), time=utc(T0))
    assert play.condition(PROTECTED)[0] == "True"
    assert play.registry.reply(pods[0].uid, at=play.now).plan == step(100)


# --- the end -------------------------------------------------------------------------------------


def test_a_run_whose_pods_all_succeeded_is_finished() -> None:
    play, pods, _ = running()
    for one in pods:
        play.see(replace(one, phase="Succeeded", training=False))
    play.wait(1)
    assert play.status.phase == "Finished"
    assert play.condition(PROTECTED) == (
        "Unknown",
        "Finished",
        "the job is finished; its last committed step is 90. It stays on the volumes of its nodes;"
        " a new job goes on from it when its pods carry the label keepstep.dev/run: gpt-1a2b3c4d",
    )


def test_a_run_whose_pods_are_gone_is_finished_when_its_job_is() -> None:
    play, pods, _ = running()
    play.find(run_object())
    for one in pods:
        play.lose(one)
    play.wait(1)
    (question,) = [one for one in play.actions if isinstance(one, AskJob)]
    assert question.job.name == "gpt"
    play.note(play.registry.job_answered(KEY, JobState.ACTIVE, at=play.now))
    assert play.status.phase == "Restoring"
    play.wait(31)
    play.note(play.registry.job_answered(KEY, JobState.GONE, at=play.now))
    assert play.status.phase == "Finished"
    play.see(pod(0, life=2))
    assert play.status.phase != "Finished", "a job of the same run goes on"


def test_a_run_whose_kind_of_job_may_not_be_read_ends() -> None:
    play, pods, _ = running()
    play.find(run_object())
    for one in pods:
        play.lose(one)
    for _ in range(60):
        play.wait(24 * 3600.0)
        if any(isinstance(one, AskJob) for one in play.actions):
            play.actions = [one for one in play.actions if not isinstance(one, AskJob)]
            play.note(play.registry.job_answered(KEY, JobState.UNKNOWN, at=play.now))
    assert play.status.phase == "Finished" or DeleteRun(KEY) in play.actions


def test_a_finished_run_is_deleted_after_its_ttl_also_by_a_later_reconciler() -> None:
    play, pods, _ = running()
    play.find(run_object())
    for one in pods:
        play.lose(one)
    play.note(play.registry.job_answered(KEY, JobState.FINISHED, at=play.now))
    written = play.status

    heir = Play(known_policy=policy(run_ttl_s=3600.0))
    heir.find(run_object(written))
    heir.wait(3599)
    assert not [one for one in heir.actions if isinstance(one, DeleteRun)]
    # the policy is not known by any pod: its snapshot, or the default of a week, holds
    heir.wait(7 * 24 * 3600)
    assert DeleteRun(KEY) in heir.actions
    heir.note(heir.registry.object_gone(KEY))
    assert status_of(heir.registry, KEY, at=heir.now) is None
    assert heir.registry.runs == {}


def test_a_run_object_that_a_person_made_ahead_is_left_alone() -> None:
    play = Play()
    play.find(run_object())
    play.wait(30 * 24 * 3600)
    assert not [one for one in play.actions if isinstance(one, AskJob | DeleteRun)]


def test_a_reconciler_that_restarts_lets_the_written_status_stand_until_it_knows_better() -> None:
    play, pods, sidecars = running()
    play.find(run_object())
    written = play.status
    heir = Play(*pods)
    heir.find(run_object(written))
    assert heir.registry.waits(KEY, at=heir.now)
    heir.hear(pods[0], sidecars[0].report())
    assert heir.registry.waits(KEY, at=heir.now)
    heir.hear(pods[1], sidecars[1].report())
    assert not heir.registry.waits(KEY, at=heir.now)

    deaf = Play(*pods)
    deaf.find(run_object(written))
    deaf.wait(46)
    assert not deaf.registry.waits(KEY, at=deaf.now)
    assert deaf.condition(PROTECTED)[1] == "NoReports"
    assert deaf.status.ranks == written.ranks
    assert deaf.status.watermarks == written.watermarks


def test_the_written_status_stands_while_sidecars_come_to_a_new_reconciler_over_minutes() -> None:
    """With 10,000 pods it takes two and a half; a run of which half is known looks unprotected."""
    pods = [pod(rank) for rank in range(6)]
    sidecars = [Sidecar(rank=rank, world=6).staged(100).durable(90) for rank in range(6)]
    play = Play(*pods)
    play.find(run_object())
    play.hear_all(*zip(pods, sidecars, strict=True))
    heir = Play(*pods)
    heir.find(run_object(play.status))
    for one, sidecar in zip(pods[:-1], sidecars[:-1], strict=True):
        heir.wait(30)
        assert heir.registry.waits(KEY, at=heir.now)
        heir.hear(one, sidecar.report())
        heir.hear(one, sidecar.report())
    heir.wait(46)
    assert not heir.registry.waits(KEY, at=heir.now), "the last one does not come"
    assert heir.condition(PROTECTED)[0] != "True"


@pytest.mark.parametrize("seen", ["before", "after", "never"])
def test_a_run_is_over_since_when_it_was_and_says_where_its_steps_lie_also_by_a_later_reconciler(
    seen: str,
) -> None:
    """`seen`: its pod, which stays as it ended, beside the run's object."""
    archive = policy(archive=Archive(store=Directory(claim="shared")))
    ended = pod(0, phase="Succeeded", training=False)
    play, told = Play(pod(0), known_policy=archive), Sidecar(rank=0, world=1).staged(95).durable(90)
    told.archive = [step(90)]
    play.find(run_object())
    play.hear(pod(0), told.report())
    play.see(ended)
    play.wait(2)
    written = play.status
    assert [one.type for one in written.recent] == ["Finished"]

    heir = Play(known_policy=archive)
    if seen == "before":
        heir.see(ended)
    heir.find(run_object(written))
    if seen == "after":
        heir.see(ended)
    heir.wait(3600)
    assert heir.registry.runs[KEY].finished_at == play.now
    assert heir.status.recent == written.recent
    assert {one.type: one for one in heir.status.conditions} == {
        one.type: one for one in written.conditions
    }


def test_a_job_that_was_made_again_says_that_the_steps_of_the_earlier_one_are_kept() -> None:
    play, pods, _ = running()
    play.find(run_object())
    for one in pods:
        play.lose(one)
    anew = RunKey(KEY.namespace, "gpt-99999999")
    play.see(pod(0, life=2, run=anew, job=replace(JOB, uid="job-2")))
    status = status_of(play.registry, anew, at=play.now)
    assert status is not None
    assert "keepstep.dev/run: gpt-1a2b3c4d" in status.warnings[0]
    named = RunKey(KEY.namespace, "gpt")
    play.see(pod(0, life=3, run=named, labelled=True, job=replace(JOB, uid="job-3")))
    status = status_of(play.registry, named, at=play.now)
    assert status is not None
    assert status.warnings == [], "whoever gives a run a name knows what it goes on from"


def test_a_status_leaves_out_what_is_empty() -> None:
    play, *_ = running()
    body = as_json(play.status)
    assert body["restarts"] == 0
    assert body["committed"] == {"step": 90, "id": str(step(90)), "time": utc(T0)}
    assert "recent" not in body
    assert body["ranks"][0] == {
        "node": "node-0",
        "pod": "gpt-worker-0",
        "nodeRank": 0,
        "ranks": "0",
        "memory": 100,
        "local": 90,
    }


def test_memory_that_a_queue_does_not_count_is_said_with_what_to_set() -> None:
    adds = policy(memory_limit_bytes=8 << 30)
    play = Play(pod(0, uncounted=True), pod(1, uncounted=True), known_policy=adds)
    status, reason, message = play.condition("CountedByQueue")
    assert (status, reason) == ("False", "MemoryAdded")
    assert "8448Mi" in message
    assert "CarveOut" in message
    for play in (
        Play(pod(0), known_policy=adds),
        Play(pod(0, uncounted=True), known_policy=policy(accounting=Accounting.CARVE_OUT)),
        Play(pod(0, uncounted=True, phase="Succeeded"), known_policy=adds),
    ):
        assert "CountedByQueue" not in {one.type for one in play.status.conditions}


def test_a_run_that_a_queue_may_preempt_says_when_its_last_step_was_committed() -> None:
    pods, sidecars = (pod(0, queued=True), pod(1, queued=True)), (Sidecar(rank=0), Sidecar(rank=1))
    play = Play(*pods)
    play.find(run_object())

    def noted() -> list[float]:
        return [one.at for one in play.actions if isinstance(one, NoteCommit)]

    def commit(number: int) -> None:
        for one in sidecars:
            one.local = [step(number)]
        play.hear_all(*zip(pods, sidecars, strict=True))

    commit(5)
    assert noted() == [T0]
    play.wait(10)
    commit(6)
    assert noted() == [T0], "not at each commit: that would be a write for each step"
    play.wait(60)
    commit(7)
    assert noted() == [T0, T0 + 70]
    others = Play(pod(0), pod(1))
    others.find(run_object())
    others.hear_all(*zip((pod(0), pod(1)), sidecars, strict=True))
    assert not [one for one in others.actions if isinstance(one, NoteCommit)]


def test_a_pod_that_is_deleted_is_told_to_all_and_what_went_with_it_is_said() -> None:
    there, leaves = pod(0, volumes=()), pod(1, volumes=())
    play, one, other = Play(there, leaves), Sidecar(rank=0), Sidecar(rank=1)
    for sidecar in (one, other):
        sidecar.durable(3).staged(3, 4)
    play.hear_all((there, one), (leaves, other))
    assert not play.registry.reply(there.uid, at=play.now).leaving
    play.see(replace(leaves, deleting=True))
    assert play.registry.reply(there.uid, at=play.now).leaving
    assert play.registry.reply(leaves.uid, at=play.now).leaving
    play.lose(replace(leaves, deleting=True))
    assert not play.registry.reply(there.uid, at=play.now).leaving
    (message,) = play.events("LastStepLost")
    assert "step 4" in message
    assert "flushTimeout" in message


@pytest.mark.parametrize("everything", [False, True], ids=["kept", "all are deleted"])
def test_nothing_is_said_of_a_pod_that_left_in_time_or_with_all_others(everything: bool) -> None:
    there, leaves = pod(0), pod(1)
    play, one, other = Play(there, leaves), Sidecar(rank=0), Sidecar(rank=1)
    for sidecar in (one, other):
        sidecar.staged(4)
        if not everything:
            sidecar.durable(4)
    play.hear_all((there, one), (leaves, other))
    for gone in (there, leaves) if everything else (leaves,):
        play.see(replace(gone, deleting=True))
    play.lose(leaves)
    assert play.events("LastStepLost") == []


def _full_volume() -> ReportedVolume:
    return ReportedVolume(
        name="nvme", engine="direct", used_bytes=9, free_bytes=0, failed="it takes no writes"
    )


@pytest.mark.parametrize(
    "trouble",
    [
        {"more": {"warnings": ("the drive is slow",)}},
        {"more": {"volumes": (_full_volume(),)}},
        {"more": {"tiers": {Tier.PEER: TierProgress(where="a", trouble="no space")}}},
        {"library": ""},
        {"archive": [step(90)]},
    ],
)
def test_what_changes_a_condition_is_to_be_written_before_what_changes_numbers(
    trouble: dict[str, Any],
) -> None:
    play, pods, sidecars = running()

    def soon(rank: int = 0) -> bool:
        play.actions.clear()
        play.hear(pods[rank], sidecars[rank].staged(101 + len(sidecars[0].memory)).report())
        (write,) = (one for one in play.actions if isinstance(one, WriteStatus))
        return write.soon

    assert not soon()
    for sidecar in sidecars:
        for name, value in trouble.items():
            setattr(sidecar, name, value)
    assert [soon(0), soon(1)].count(True) >= 1
    assert not soon()


def test_of_alarms_that_two_pods_cause_without_end_the_newest_few_are_remembered() -> None:
    """Two images of one step, of other steps with each report."""
    one, other = pod(0), pod(1)
    play = Play(one, other)
    for first in range(0, 6 * MOST_ALARMS, MOST_ALARMS):
        for writer in (one, other):
            held = tuple(
                Shard(step_id=step(number), rank=0, world=2, root=f"{writer.uid}/{number}")
                for number in range(first, first + MOST_ALARMS)
            )
            told = replace(Sidecar(rank=0).report().ranks[0], tiers={Tier.LOCAL: listed(held)})
            report = replace(Sidecar(rank=0).report(), sequence=first + 1, ranks=(told,))
            play.hear(writer, report)
    alarms = play.registry.runs[KEY].alarms
    assert len(alarms) == MOST_ALARMS
    assert str(step(6 * MOST_ALARMS - 1)) in alarms[-1]
    assert any("two different images" in text for text in play.status.warnings)
