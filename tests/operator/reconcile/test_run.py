"""A run and its transitions: single ones, and what holds after any sequence of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.steps import Epoch, EpochId
from keepstep.wire.run_reports import MOST_RECENT, LeaderRecord, NodeHoldings, RunEvent, format_utc
from keepstep_operator.api.cluster_objects import JobState
from keepstep_operator.api.run_status import (
    CommittedStatus,
    PolicyStatus,
    RunStatus,
    read_status,
    status_json,
)
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts, leader_answer, leader_pod
from keepstep_operator.reconcile.events import change_events
from keepstep_operator.reconcile.render import render_status
from keepstep_operator.reconcile.run_transitions import Run
from tests.operator.reconcile.samples import (
    JOB,
    KEY,
    T0,
    accepted,
    begun,
    pod,
    policy,
    report,
    reported,
    run_object,
    step,
)

RESTORED = RunEvent(
    time=format_utc(T0), type="Restored", step=90, lost_steps=10, message="restored"
)


# --- reports -------------------------------------------------------------------------------------


def test_an_outdated_report_is_ignored() -> None:
    run = reported(begun(), report(200, sequence=5))
    assert reported(run, report(100, sequence=4)) is run
    assert reported(run, report(100, sequence=5)) is run


def test_a_new_leader_receives_the_stored_record_and_its_first_report_does_not_change_it() -> None:
    record = LeaderRecord(restarts=3, holders=(NodeHoldings(node="node-7", node_ranks="1"),))
    run = reported(begun(), report(record=record))
    again = reported(run, report(leader="leader-2", sequence=1))
    assert again.record == record
    assert leader_answer(again, ClusterFacts()).record == record
    later = reported(
        again, report(leader="leader-2", sequence=2, record=replace(record, restarts=4))
    )
    assert later.record.restarts == 4
    assert leader_answer(later, ClusterFacts()).record is None


def test_the_time_of_a_commit_is_that_of_its_first_report() -> None:
    run = reported(begun(), report(100))
    run = reported(run, report(100, sequence=3), at=T0 + 60)
    assert run.committed == CommittedStatus(step=100, id=str(step(100)), time=format_utc(T0))


def test_a_commit_is_kept_in_the_status_until_all_members_have_reported() -> None:
    run = reported(begun(), report(100))
    partial = reported(run, report(None, sequence=1, leader="leader-2", settled=False))
    assert partial.committed == run.committed
    whole = reported(partial, report(None, sequence=2, leader="leader-2"))
    assert whole.committed is None


def test_a_rollback_sets_the_status_to_an_older_commit() -> None:
    after = Epoch(EpochId(2, "bbbbbbbb"), step(50))
    run = reported(
        reported(begun(), report(100)), replace(report(sequence=3), committed=step(60, after))
    )
    assert run.committed is not None
    assert run.committed.step == 60


def test_recent_events_are_stored_once_and_only_the_newest() -> None:
    run = reported(begun(), report(recent=(RESTORED,)))
    run = reported(run, report(sequence=3, recent=(RESTORED,)))
    assert run.recent == (RESTORED,)
    more = tuple(replace(RESTORED, time=format_utc(T0 + number)) for number in range(1, 20))
    assert len(reported(run, report(sequence=4, recent=more)).recent) == MOST_RECENT


# --- policies ------------------------------------------------------------------------------------


def test_a_changed_policy_applies_to_pods_created_afterwards() -> None:
    run = transitions.policy_seen(begun(), policy(generation=2))
    assert run.policy is not None
    assert run.policy.generation == 1
    run = transitions.pod_seen(run, pod(1, life=2, policy_generation=2), at=T0)
    assert run.policy is not None
    assert run.policy.generation == 2


def test_a_deleted_or_invalid_policy_does_not_change_the_policy_of_a_run() -> None:
    for now in (None, policy(problem=("Invalid", "no volumes"))):
        assert transitions.policy_seen(begun(), now).policy == accepted()


# --- over restarts of the operator ----------------------------------------------------------------


def test_a_restarted_reconciler_takes_over_the_stored_status() -> None:
    old = reported(
        begun(), report(record=LeaderRecord(restarts=2, lost_steps=30), recent=(RESTORED,))
    )
    status = read_status(status_json(render_status(old, ClusterFacts(), now=T0)))
    run = transitions.run_object_seen(Run(key=KEY, since=T0), run_object(status=status))
    assert (run.committed, run.recent, run.job) == (old.committed, old.recent, JOB)
    assert run.record == replace(old.record, counted="0001.aaaaaaaa")
    assert run.prefers_earlier_status(T0 + 30)
    assert not run.prefers_earlier_status(T0 + 60)
    assert not reported(run).prefers_earlier_status(T0)


def test_a_status_is_read_back_as_it_was_written() -> None:
    spec = {"memory": {"limit": "2Gi"}, "nodeSelector": {"a_b": "", "c": None}}
    status = RunStatus(
        phase="Running",
        policy=PolicyStatus(name="default", generation=3, spec=spec),
        recent=(RESTORED,),
        holders=(NodeHoldings(node="n", node_ranks="0-3", step=7),),
        watermarks={"local": str(step(100))},
    )
    body = status_json(status)
    assert body["policy"]["spec"] == spec
    assert body["holders"] == [{"node": "n", "nodeRanks": "0-3", "step": 7}]
    assert read_status(body) == status


def test_an_invalid_status_is_treated_as_empty() -> None:
    for body in ({"recent": 7}, {"policy": "default"}, {"committed": {"step": "x"}}):
        assert read_status(body) == RunStatus()


# --- who leads ------------------------------------------------------------------------------------


def test_the_older_of_two_pods_with_node_rank_0_is_the_leader() -> None:
    run = begun(pod(0, life=2, uid="first-by-name"), pod(0, life=1), pod(1))
    leads = leader_pod(run)
    assert leads is not None
    assert leads.uid == "pod-0-1"


def test_a_terminating_pod_stays_leader_until_its_replacement_exists() -> None:
    going = pod(0, deleting=True)
    assert leader_pod(begun(going, pod(1))) == going
    assert leader_pod(begun(going, pod(0, life=2), pod(1))) == pod(0, life=2)
    assert leader_pod(begun(pod(1))) is None
    assert leader_pod(begun(pod(0, injected=False))) is None


# --- any sequence of transitions ------------------------------------------------------------------

Step = Callable[[Run, float], Run]


def _steps() -> st.SearchStrategy[Step]:
    pods = st.builds(
        lambda rank, life, phase, deleting, labelled: pod(
            rank, life=life, phase=phase, deleting=deleting, labelled=labelled,
            job=replace(JOB, uid=f"job-{life}") if labelled else JOB,
        ),
        st.integers(0, 2),
        st.integers(1, 3),
        st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
        st.booleans(),
        st.booleans(),
    )  # fmt: skip
    reports = st.builds(
        lambda leader, sequence, number, settled, restarts: report(
            number,
            leader=leader,
            sequence=sequence,
            settled=settled,
            record=LeaderRecord(restarts=restarts),
            recent=(replace(RESTORED, time=format_utc(T0 + sequence)),),
        ),
        st.sampled_from(["a", "b"]),
        st.integers(1, 5),
        st.none() | st.integers(0, 300),
        st.booleans(),
        st.integers(0, 9),
    )
    return st.one_of(
        pods.map(lambda record: lambda run, at: transitions.pod_seen(run, record, at=at)),
        pods.map(lambda record: lambda run, at: transitions.pod_gone(run, record.uid, at=at)),
        reports.map(
            lambda run_report: lambda run, at: transitions.apply_report(run, run_report, at=at)
        ),
        st.sampled_from(JobState).map(
            lambda answer: lambda run, at: transitions.job_answered(run, answer, at=at)
        ),
        st.sampled_from([None, policy(), policy(generation=2)]).map(
            lambda record: lambda run, at: transitions.policy_seen(run, record)
        ),
        st.just(lambda run, at: transitions.run_object_seen(run, run_object())),
        st.just(lambda run, at: transitions.run_object_gone(run)),
    )


@given(st.lists(_steps(), max_size=30))
def test_the_state_of_a_run_is_consistent_after_any_sequence_of_events(steps: list[Step]) -> None:
    run, now = Run(key=KEY, since=T0), T0
    for take in steps:
        now += 1.0
        before, run = run, take(run, now)
        members = list(run.job_pods)
        assert run.finished_at is None or all(record.over for record in run.pods.values())
        alive = any(not record.over for record in run.pods.values())
        assert not (alive and run.idle_since is not None)
        assert all(any(record.job == job for record in run.pods.values()) for job in run.rivals)
        assert len(run.recent) <= MOST_RECENT
        assert [*run.recent] == sorted(run.recent, key=lambda event: event.time, reverse=True)
        leads = leader_pod(run)
        assert leads is None or (leads in members and leads.node_rank == 0)
        request = leader_answer(run, ClusterFacts(complete=True))
        assert {member.pod for member in request.members} == {
            member.uid for member in members if member.injected
        }
        status = render_status(run, ClusterFacts(), now=now)
        assert read_status(status_json(status)) == status
        written = replace(run, status=status)
        assert render_status(written, ClusterFacts(), now=now + 1) == status, (
            "nothing changed but the time"
        )
        assert not [*change_events(run, run)]
        assert all(event.message for event in change_events(before, run))
