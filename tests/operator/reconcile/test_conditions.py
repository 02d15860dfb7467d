"""What the conditions of a run say: a table of runs, and what people read of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.wire.run_reports import (
    Advisory,
    AdvisoryKind,
    LeaderRecord,
    LossOutcome,
    RestoreFromState,
)
from keepstep_operator.api.cluster_objects import NodeRecord
from keepstep_operator.api.policy import VolumeKind
from keepstep_operator.api.tiers import Archive, ArchiveBucket, PeerSpec
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts
from keepstep_operator.reconcile.conditions import (
    _DOUBTS,
    SILENT_S,
    ConditionState,
    condition_states,
)
from keepstep_operator.reconcile.run_transitions import Run
from tests.operator.reconcile.samples import (
    T0,
    begun,
    pod,
    policy,
    report,
    reported,
    run_object,
    step,
)

S3 = Archive(store=ArchiveBucket(kind="s3", name="ckpt"))


def verdict_of(
    run: Run, condition: str, *, now: float = T0, cluster: ClusterFacts | None = None
) -> ConditionState | None:
    return condition_states(run, cluster or ClusterFacts(), now=now).get(condition)


def brief(run: Run, condition: str, **more: Any) -> tuple[str, str] | None:
    found = verdict_of(run, condition, **more)
    return None if found is None else (found.status, found.reason)


def doubted(kind: AdvisoryKind, text: str = "look at it") -> Run:
    known = policy(peers=PeerSpec(), archive=S3)
    return reported(begun(known=known), report(doubts=(Advisory(kind=kind, text=text),)))


@pytest.mark.parametrize("kind", AdvisoryKind)
def test_each_advisory_sets_the_condition_that_it_belongs_to(kind: AdvisoryKind) -> None:
    condition, status, reason = _DOUBTS[kind]
    assert verdict_of(doubted(kind), condition) == ConditionState(status, reason, "look at it")


@pytest.mark.parametrize(
    ("kind", "protected"),
    [
        (AdvisoryKind.COMMIT_STALLED, ("False", "CommitStalled")),
        (AdvisoryKind.COMMIT_LOST, ("False", "PartGone")),
        (AdvisoryKind.RESTORE_REFUSED, ("False", "RestoreRefused")),
        (AdvisoryKind.NOTHING_KEPT, ("False", "NothingKept")),
        (AdvisoryKind.ARCHIVE_TROUBLED, ("False", "Troubled")),
        (AdvisoryKind.PEERS_BEHIND, ("False", "Behind")),
        (AdvisoryKind.RANKS_ABSENT, ("False", "RanksWithoutSidecar")),
        (AdvisoryKind.LEFT_NOT_SERVED, ("True", "Protected")),
        (AdvisoryKind.PEERS_NOT_SERVING, ("True", "Protected")),
    ],
)
def test_the_protected_condition_is_false_for_advisories_that_can_lose_steps(
    kind: AdvisoryKind, protected: tuple[str, str]
) -> None:
    assert brief(doubted(kind), "Protected") == protected


def test_a_healthy_run_has_exactly_the_conditions_that_apply_to_it() -> None:
    run = reported(begun())
    found = condition_states(run, ClusterFacts(), now=T0)
    assert {condition: verdict.status for condition, verdict in found.items()} == {
        "Protected": "True",
        "FullyInjected": "True",
        "Committing": "True",
    }
    assert "goes on from step 100" in found["Protected"].message
    assert "step 100 became committed at 2026-09-2" in found["Committing"].message


@pytest.mark.parametrize(
    ("safe", "volumes", "words"),
    [
        (
            LossOutcome(node=step(90)),
            VolumeKind.EMPTY_DIR,
            "the loss of a pod or its node goes back to",
        ),
        (
            LossOutcome(node=step(90), archived=step(90)),
            VolumeKind.EMPTY_DIR,
            "step 90 in the archive",
        ),
        (
            LossOutcome(pod=step(95)),
            VolumeKind.EMPTY_DIR,
            "a pod that is deleted or moved goes on from",
        ),
        (LossOutcome(), VolumeKind.EMPTY_DIR, "the run then begins at step 0 (volumes: emptyDir"),
        (LossOutcome(), VolumeKind.HOST_PATH, "a node that is lost takes its part with it"),
    ],
)
def test_the_protected_condition_states_the_cost_of_losing_a_pod(
    safe: LossOutcome, volumes: VolumeKind, words: str
) -> None:
    pods = [pod(rank, volumes=(volumes,)) for rank in (0, 1)]
    run = reported(begun(*pods), report(safe=replace(safe, restart=step(100))))
    found = verdict_of(run, "Protected")
    assert found is not None
    assert words in found.message


@pytest.mark.parametrize("early", ["Protected", "Committing"])
def test_all_conditions_are_unknown_before_the_first_report(early: str) -> None:
    run = begun(pod(0, trouble="not scheduled: no room"), pod(1))
    assert brief(run, early) == ("Unknown", "NoReports")
    found = verdict_of(run, "Protected")
    assert found is not None
    assert "gpt-worker-0 is not scheduled: no room" in found.message


def test_a_run_without_a_pod_of_node_rank_0_has_no_leader() -> None:
    assert brief(begun(pod(20_000), pod(20_001)), "Protected") == ("Unknown", "NoLeader")
    assert brief(begun(pod(0), pod(20_001)), "Protected") == ("Unknown", "NoReports")


def test_pods_without_a_sidecar_take_precedence_over_other_reasons() -> None:
    run = reported(begun(pod(0), pod(1, injected=False, trouble="no room for it.")))
    found = verdict_of(run, "Protected")
    assert found is not None
    assert found.reason == "NotInjected"
    assert "no room for it. Then let its job make it again" in found.message


def test_two_pods_with_the_same_node_rank_are_reported() -> None:
    run = reported(begun(pod(0), pod(1), pod(1, life=2, name="gpt-other")))
    assert brief(run, "DuplicateNodeRank") == ("True", "DuplicateNodeRank")
    assert brief(run, "Protected") == ("False", "DuplicateNodeRank")
    found = verdict_of(run, "DuplicateNodeRank")
    assert found is not None
    assert "pods gpt-other, gpt-worker-1 share node rank 1" in found.message


def test_a_pod_that_is_being_replaced_does_not_count_as_a_duplicate() -> None:
    run = reported(begun(pod(0), pod(1, deleting=True), pod(1, life=2)))
    assert brief(run, "DuplicateNodeRank") is None


def test_a_commit_stall_is_attributed_to_two_pods_with_the_same_node_rank() -> None:
    run = begun(pod(0), pod(1), pod(1, life=2))
    run = reported(
        run, report(doubts=(Advisory(kind=AdvisoryKind.COMMIT_STALLED, text="none since"),))
    )
    found = verdict_of(run, "Committing")
    assert found is not None
    assert "share node rank 1" in found.message


def test_a_leader_that_stops_reporting_is_reported() -> None:
    run = reported(begun())
    assert brief(run, "Protected", now=T0 + SILENT_S - 1) == ("True", "Protected")
    found = verdict_of(run, "Protected", now=T0 + SILENT_S)
    assert found is not None
    assert (found.status, found.reason) == ("Unknown", "SidecarsSilent")
    assert "gpt-worker-0" in found.message
    assert "gpt-worker-1" not in found.message


def test_a_member_that_cannot_reach_its_leader_is_reported() -> None:
    run = reported(begun(), report(missing="1"))
    found = verdict_of(run, "Protected")
    assert found is not None
    assert found.reason == "SidecarsSilent"
    assert "gpt-worker-1" in found.message


def test_a_member_whose_container_has_just_started_is_waited_for() -> None:
    run = reported(begun(pod(0), pod(1, training_since=T0 - 10)), report(missing="1"))
    assert brief(run, "Protected") == ("True", "Protected")


def test_a_trainer_that_never_connects_is_reported_after_a_minute() -> None:
    verdict = report(without_library="0-1")
    run = reported(begun(pod(0), pod(1, training_since=T0 - 59)), verdict)
    found = verdict_of(run, "Protected")
    assert found is not None
    assert (found.reason, "gpt-worker-0" in found.message) == ("LibraryMissing", True)
    assert "more pods" not in found.message


def test_the_replicated_condition_requires_two_nodes() -> None:
    known = policy(peers=PeerSpec())
    run = reported(begun(pod(0), pod(1, node="node-0"), known=known))
    assert brief(run, "Replicated") == ("False", "OneNode")
    apart = begun(known=known)
    assert brief(reported(apart), "Replicated") == ("Unknown", "NothingReplicated")
    safe = report(safe=LossOutcome(restart=step(100), node=step(99)))
    assert brief(reported(apart, safe), "Replicated") == ("True", "Replicated")
    assert brief(reported(begun()), "Replicated") is None, "no peers in the policy"


def test_the_archived_condition_names_the_archived_steps() -> None:
    run = begun(known=policy(archive=S3))
    assert brief(reported(run), "Archived") == ("Unknown", "NothingArchived")
    run_report = report(safe=LossOutcome(restart=step(100), archived=step(80)), archived=4)
    found = verdict_of(reported(run, run_report), "Archived")
    assert found == ConditionState("True", "Archived", "step 80 is in s3://ckpt, and 3 older")


@pytest.mark.parametrize(
    ("known", "more", "expected"),
    [
        (None, {}, ("Unknown", "Propagating")),
        (RestoreFromState(asked="90"), {}, ("False", "NotFound")),
        (RestoreFromState(asked="90", run="other"), {}, ("False", "OtherRun")),
        (RestoreFromState(asked="90", step=str(step(90))), {}, ("Unknown", "Propagating")),
        (
            RestoreFromState(asked="90", step=str(step(90))),
            {"restore_known": True},
            ("Unknown", "Waiting"),
        ),
        (
            RestoreFromState(asked="90", step=str(step(90)), epoch="0002.bbbbbbbb"),
            {},
            ("True", "Restored"),
        ),
        (RestoreFromState(asked="80", step=str(step(80))), {}, ("Unknown", "Propagating")),
    ],
)
def test_the_restore_from_condition_follows_a_rollback(
    known: RestoreFromState | None, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    run = transitions.run_object_seen(begun(), run_object(restore_from="90"))
    run = reported(run, report(record=LeaderRecord(restore_from=known), **more))
    assert brief(run, "RestoreFrom") == expected


def test_a_drained_node_with_the_only_copy_is_reported() -> None:
    run = reported(begun(), report(safe=LossOutcome(restart=step(100), sole=("node-0", "node-1"))))
    cluster = ClusterFacts(nodes={"node-1": NodeRecord(name="node-1", cordoned=True)})
    found = verdict_of(run, "Protected", cluster=cluster)
    assert found is not None
    assert "node node-1 is cordoned" in found.message
    assert "node-0" not in found.message


def test_the_conditions_of_a_finished_run_name_its_last_committed_step() -> None:
    run = reported(begun())
    for rank in (0, 1):
        run = transitions.pod_seen(run, pod(rank, phase="Succeeded"), at=T0)
    found = verdict_of(run, "Protected")
    assert found is not None
    assert (found.status, found.reason) == ("Unknown", "Finished")
    assert "its last committed step is 100" in found.message
    assert "label keepstep.dev/run: gpt-1a2b3c4d" in found.message
    assert brief(run, "Committing") == ("Unknown", "Finished")


def test_memory_that_no_quota_counts_is_reported() -> None:
    run = reported(begun(pod(0, uncounted=True), pod(1)))
    assert brief(run, "CountedByQueue") == ("False", "MemoryAdded")
