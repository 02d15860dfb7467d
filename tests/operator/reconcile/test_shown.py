"""What people see of a run beside its conditions: status fields, warnings, Events, Checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.steps import Tier
from keepstep.wire.run_reports import (
    Advisory,
    AdvisoryKind,
    KeptStep,
    LeaderRecord,
    LossOutcome,
    NodeHoldings,
    ReportedAlarm,
    RunEvent,
    SaveOverhead,
    format_utc,
)
from keepstep_operator.api.cluster_objects import Job, NodeRecord
from keepstep_operator.api.policy import VolumeKind
from keepstep_operator.api.run_status import CommittedStatus, RunStatus
from keepstep_operator.api.tiers import PeerSpec
from keepstep_operator.reconcile import answer_to_leader as module
from keepstep_operator.reconcile import checkpoints
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts, leader_answer
from keepstep_operator.reconcile.events import (
    KubernetesEvent,
    change_events,
    event_bodies,
    policy_rejected_event,
    recurring_events,
)
from keepstep_operator.reconcile.render import policy_status, render_status
from keepstep_operator.reconcile.run_transitions import Run
from tests.operator.reconcile.samples import (
    KEY,
    T0,
    begun,
    node,
    pod,
    policy,
    report,
    reported,
    run_object,
    step,
)


def shown(run: Run, **more: Any) -> RunStatus:
    return render_status(run, more.pop("cluster", ClusterFacts()), now=more.pop("now", T0))


# --- the status ----------------------------------------------------------------------------------


def test_the_status_columns_of_a_healthy_run_are_filled() -> None:
    run_report = report(
        watermarks={Tier.MEMORY: step(101), Tier.LOCAL: step(100)},
        held_by=(Tier.LOCAL,),
        stall=SaveOverhead(skipped=1),
        record=LeaderRecord(restarts=2, lost_steps=7),
    )
    status = shown(reported(begun(), run_report))
    assert (status.phase, status.world, status.nodes) == ("Running", 2, 2)
    assert (status.step, status.behind, status.epoch) == (101, 1, "0001.aaaaaaaa")
    assert status.committed == CommittedStatus(step=100, id=str(step(100)), time=format_utc(T0))
    assert status.watermarks == {"memory": str(step(101)), "local": str(step(100))}
    assert (status.tiers, status.nodes_summary) == ("local", "node-0,node-1")
    assert (status.restarts, status.lost_steps, status.job_name) == (2, 7, "gpt")
    assert [(rank.node_rank, rank.pod, rank.ranks) for rank in status.ranks] == [
        (0, "gpt-worker-0", "0"),
        (1, "gpt-worker-1", "1"),
    ]


@pytest.mark.parametrize(
    ("volumes", "labelled", "safe", "survives"),
    [
        (VolumeKind.EMPTY_DIR, False, LossOutcome(), "ContainerRestart"),
        (VolumeKind.HOST_PATH, False, LossOutcome(), "ContainerRestart,PodRestart"),
        (VolumeKind.EMPTY_DIR, False, LossOutcome(pod=step(90)), "ContainerRestart,PodRestart"),
        (
            VolumeKind.EMPTY_DIR,
            True,
            LossOutcome(node=step(90)),
            "ContainerRestart,PodRestart,NodeLoss",
        ),
        (
            VolumeKind.EMPTY_DIR,
            True,
            LossOutcome(archived=step(90)),
            "ContainerRestart,JobRecreate",
        ),
        (VolumeKind.HOST_PATH, True, LossOutcome(), "ContainerRestart,PodRestart,JobRecreate"),
    ],
)
def test_the_survives_column_lists_the_failures_that_copies_protect_against(
    volumes: VolumeKind, labelled: bool, safe: LossOutcome, survives: str
) -> None:
    pods = [pod(rank, volumes=(volumes,), labelled=labelled) for rank in (0, 1)]
    assert shown(reported(begun(*pods), report(safe=safe))).survives_summary == survives


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"alive": 2}, "Running"),
        ({"alive": 1}, "Restoring"),
        ({"alive": 0, "committed": None, "step": None}, "Waiting"),
    ],
)
def test_the_phase_reflects_the_state_of_the_run(changes: dict[str, Any], phase: str) -> None:
    assert shown(reported(begun(), replace(report(), **changes))).phase == phase


def test_the_stored_status_is_kept_until_the_first_report() -> None:
    old = shown(reported(begun()))
    run = transitions.run_object_seen(Run(key=KEY, since=T0), run_object(status=old))
    run = transitions.pod_seen(run, pod(0), at=T0)
    status = shown(run, now=T0 + 60)
    assert (status.phase, status.step, status.world) == ("Running", 101, 2)
    assert status.protected == "Unknown"


def test_the_final_protected_condition_of_a_run_is_kept() -> None:
    run = reported(begun())
    for rank in (0, 1):
        run = transitions.pod_seen(run, pod(rank, phase="Succeeded"), at=T0)
    old = shown(run)
    assert old.phase == "Finished"
    again = transitions.run_object_seen(Run(key=KEY, since=T0), run_object(status=old))
    later = shown(again, now=T0 + 1000)
    kept = {condition.type: condition for condition in later.conditions}
    assert kept["Protected"] == next(
        condition for condition in old.conditions if condition.type == "Protected"
    )


def test_the_transition_time_changes_only_with_the_status_of_a_condition() -> None:
    run = reported(begun())
    first = shown(run)
    run = reported(replace(run, status=first), report(110, sequence=3), at=T0 + 100)
    second = shown(run, now=T0 + 100)
    times = [
        {condition.type: condition.last_transition_time for condition in of.conditions}
        for of in (first, second)
    ]
    assert times[0] == times[1]
    assert first.conditions != second.conditions, "the message names the newer step"


# --- warnings ------------------------------------------------------------------------------------


def test_warnings_name_their_pods_and_are_listed_once() -> None:
    slow = tuple(node(rank, warnings=("the drive is slow",)) for rank in (0, 1))
    pods = pod(0, warnings=("no metrics",)), pod(1, trouble="container x: CrashLoopBackOff")
    alarm = ReportedAlarm(kind="WorldChanged", text="the world changed from 2 to 3")
    assert shown(reported(begun(*pods), report(nodes=slow, alarms=(alarm,)))).warnings == (
        "the world changed from 2 to 3",
        "pod gpt-worker-1: container x: CrashLoopBackOff",
        "no metrics (pod gpt-worker-0)",
        "the drive is slow (pod gpt-worker-0 and 1 more)",
    )


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (None, "does not exist any more"),
        (policy(problem=("Invalid", "volumes: none")), "is not accepted: volumes: none"),
        (policy(generation=2), "has changed (generation 1 to 2)"),
    ],
)
def test_a_changed_policy_causes_a_warning(now: Any, words: str) -> None:
    (warning,) = shown(transitions.policy_seen(reported(begun()), now)).warnings
    assert words in warning


def test_warnings_about_an_earlier_run_and_a_fresh_start_name_the_fix() -> None:
    run = replace(reported(begun(), report(fresh="0002.bbbbbbbb")), earlier="gpt-00000000")
    fresh, earlier = shown(run).warnings
    assert "keepstep.dev/fresh-start=newest" in fresh
    assert "keepstep.dev/run: gpt-00000000" in earlier


# --- Events --------------------------------------------------------------------------------------


def reasons(before: Run, after: Run) -> list[tuple[str, bool]]:
    return [(event.reason, event.warning) for event in change_events(before, after)]


def test_each_change_causes_one_event() -> None:
    run = begun()
    restored = RunEvent(time=format_utc(T0), type="Restored", message="restored step 90", step=90)
    started = replace(restored, type="FreshStart", time=format_utc(T0 + 1))
    alarm, doubt = (
        ReportedAlarm(kind="TwoWriters", text="two"),
        Advisory(kind=AdvisoryKind.COMMIT_STALLED, text="no"),
    )
    run_report = report(recent=(started, restored), alarms=(alarm,), doubts=(doubt,))
    after = reported(run, run_report)
    assert reasons(run, after) == [
        ("Committed", False),
        ("FreshStart", True),
        ("Restored", False),
        ("TwoWriters", True),
        ("CommitStalled", True),
    ]
    assert reasons(after, reported(after, replace(run_report, sequence=3))) == []


def test_a_warning_of_a_sidecar_names_its_pod() -> None:
    run = reported(begun())
    after = reported(run, report(sequence=3, nodes=(node(1, warnings=("slow",)),)))
    assert [event.message for event in change_events(run, after)] == ["gpt-worker-1: slow"]


def test_a_warning_that_is_repeated_with_other_numbers_causes_one_event() -> None:
    def full(step: int, free: int) -> str:
        return f"step 0001.85a1a6b9-{step:09}, rank 0: no space: 2973696 needed, {free} free"

    run = reported(begun())
    first = reported(run, report(sequence=3, nodes=(node(1, warnings=(full(6, 2084864),)),)))
    (event,) = change_events(run, first)
    assert "000000006" in event.message
    second = reported(first, report(sequence=4, nodes=(node(1, warnings=(full(7, 12),)),)))
    assert list(change_events(first, second)) == []
    other = reported(second, report(sequence=5, nodes=(node(1, warnings=("a dead drive",)),)))
    assert [event.message for event in change_events(second, other)] == [
        "gpt-worker-1: a dead drive"
    ]


def test_an_event_about_a_second_job_with_the_run_label_is_attached_to_that_job() -> None:
    run = begun(pod(0, labelled=True), pod(1, labelled=True))
    other = Job(api_version="batch/v1", kind="Job", name="again", uid="job-2")
    after = transitions.pod_seen(run, pod(0, life=9, labelled=True, job=other), at=T0)
    (event,) = change_events(run, after)
    assert (event.reason, event.about) == ("RunTaken", other)


def test_events_about_lasting_conditions_are_repeated_while_they_hold() -> None:
    run = reported(
        begun(pod(0), pod(1), pod(2, injected=False)),
        report(without_library="1", safe=LossOutcome(sole=("node-0",))),
    )
    cluster = ClusterFacts(nodes={"node-0": NodeRecord(name="node-0", cordoned=True)})
    found = [(event.reason, event.topic) for event in recurring_events(run, cluster, now=T0)]
    assert found == [
        ("NotInjected", "pod-2-1"),
        ("LibraryMissing", "gpt-worker-1"),
        ("NodeDraining", "node-0"),
    ]


def test_an_event_is_on_the_job_and_on_the_run() -> None:
    run, event = (
        begun(),
        KubernetesEvent(reason="Committed", message="step 5\x1b[31m", warning=False),
    )
    made = [*event_bodies(event, KEY, job=run.job, run_uid="run-1", name="x", now=T0)]
    assert [event["regarding"]["kind"] for event in made] == ["PyTorchJob", "CheckpointRun"]
    assert [event["related"]["kind"] for event in made] == ["CheckpointRun", "PyTorchJob"]
    assert {(event["type"], event["note"]) for event in made} == {("Normal", "step 5\ufffd[31m")}
    (alone,) = event_bodies(event, KEY, job=run.job, run_uid="", name="x", now=T0)
    assert alone["regarding"]["kind"] == "PyTorchJob"


# --- policies ------------------------------------------------------------------------------------


def test_the_status_of_a_policy_states_whether_it_is_accepted() -> None:
    good = policy_status(replace(policy(), advice="outlives"), {}, now=T0)
    assert good["conditions"][0]["status"] == "True"
    assert policy_status(replace(policy(), advice="outlives"), good, now=T0 + 9) == good
    wrong = policy(problem=("InvalidMemory", "memory.limit is missing"))
    bad = policy_status(wrong, good, now=T0 + 9)
    assert (bad["conditions"][0]["reason"], bad["conditions"][0]["lastTransitionTime"]) == (
        "InvalidMemory",
        format_utc(T0 + 9),
    )
    event = policy_rejected_event(wrong)
    assert event is not None
    assert event.reason == "InvalidMemory"
    assert policy_rejected_event(policy()) is None


# --- Checkpoint objects --------------------------------------------------------------------------


def kept(number: int, *tiers: Tier) -> KeptStep:
    return KeptStep(
        step=str(step(number)), ranks=2, tiers=tiers or (Tier.ARCHIVE,), size_bytes=1 << 20
    )


def test_a_checkpoint_object_exists_for_each_kept_step() -> None:
    run = reported(
        begun(), report(kept=(kept(90, Tier.LOCAL, Tier.ARCHIVE), kept(80)), certain=True)
    )
    names = [checkpoints.checkpoint_name(run, checkpoint) for checkpoint in (kept(90), kept(80))]
    known = {names[0]: ("archive",), f"{KEY.name}-{step(10)}": ("archive",)}
    due = checkpoints.due_changes(run, known)
    assert [checkpoint.step for checkpoint in due.made] == [str(step(80))]
    assert [checkpoint.step for checkpoint in due.moved] == [str(step(90))]
    assert due.gone == (f"{KEY.name}-{step(10)}",)
    body = checkpoints.body_of(run, kept(90))
    assert body["spec"] == {"run": KEY.name, "step": str(step(90)), "ranks": 2, "bytes": 1 << 20}
    assert body["metadata"]["ownerReferences"][0]["uid"] == "run-1"


def test_no_checkpoint_object_is_deleted_while_its_step_may_be_temporarily_invisible() -> None:
    known = {f"{KEY.name}-{step(10)}": ("archive",)}
    assert checkpoints.due_changes(begun(), known) == checkpoints.ObjectChanges()
    assert checkpoints.due_changes(reported(begun(), report(certain=False)), known).gone == ()


# --- what the leader is told ---------------------------------------------------------------------


def test_the_reply_to_the_leader_contains_members_and_user_requests() -> None:
    body = run_object(
        pins=(str(step(50)), "nonsense"), restore_from="90", fresh_start="allow", paused=True
    )
    run = transitions.run_object_seen(begun(pod(0), pod(1, deleting=True), pod(2, node="")), body)
    request = leader_answer(run, ClusterFacts(complete=True), authorities="PEM")
    assert [(member.node_rank, member.address, member.leaving) for member in request.members] == [
        (0, "10.0.0.1", False),
        (1, "10.0.0.2", True),
    ]
    assert (request.pins, request.restore_from) == ((step(50),), "90")
    assert (request.fresh_start, request.paused, request.complete) == ("allow", True, True)
    assert request.authorities == "PEM"
    assert request.policy is not None
    assert request.policy.outlives_pod


def test_the_zone_of_a_member_is_the_node_label_named_by_the_policy() -> None:
    run = begun(known=policy(peers=PeerSpec(topology_key="zone")))
    nodes = {"node-0": NodeRecord(name="node-0", labels={"zone": "a"})}
    request = leader_answer(run, ClusterFacts(nodes=nodes))
    assert [member.domain for member in request.members] == ["a", "node-1"], (
        "one without a label is its own"
    )


def test_the_reply_lists_only_agents_and_lost_nodes_that_hold_shards_of_the_run() -> None:
    holders = (
        NodeHoldings(node="node-7", node_ranks="1"),
        NodeHoldings(node="node-9", node_ranks="2"),
    )
    run = reported(begun(), report(record=LeaderRecord(holders=holders)))
    cluster = ClusterFacts(
        nodes={"node-7": NodeRecord(name="node-7")},
        agents={"node-7": "10.0.0.7:26741", "node-8": "10.0.0.8:26741"},
        complete=True,
    )
    request = leader_answer(run, cluster)
    assert (request.agents, request.lost_nodes) == ({"node-7": "10.0.0.7:26741"}, ("node-9",))
    assert leader_answer(run, replace(cluster, complete=False)).lost_nodes == ()


def test_a_run_with_more_pods_than_the_reply_lists_is_never_marked_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its leader would take those that are not named for gone."""
    monkeypatch.setattr(module, "MOST_MEMBERS", 2)
    assert leader_answer(begun(pod(0), pod(1)), ClusterFacts(complete=True)).complete
    request = leader_answer(begun(pod(0), pod(1), pod(2)), ClusterFacts(complete=True))
    assert (len(request.members), request.complete) == (2, False)
