"""The job of a run: what made it, its end, and what a second one with the same label gets."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from keepstep_operator.api.cluster_objects import Job, JobState, PodRecord
from keepstep_operator.api.run_status import JobStatus, RunStatus
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.job_state import read_job_state, read_parent_of_job
from keepstep_operator.reconcile.run_transitions import UNKNOWN_JOB_S, Run
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import (
    JOB,
    KEY,
    T0,
    accepted,
    begun,
    pod,
    policy,
    reported,
    run_object,
)

OTHER = Job(api_version="batch/v1", kind="Job", name="again", uid="job-2")


def member(rank: int = 0, **changes: Any) -> PodRecord:
    return pod(rank, labelled=True, **changes)


def rival(rank: int = 0, **changes: Any) -> PodRecord:
    """A pod of the other job, made after those of the first."""
    changes = {"uid": f"rival-{rank}", "name": f"again-{rank}", "life": 5, **changes}
    return pod(rank, labelled=True, job=OTHER, **changes)


def seen(run: Run, *pods: PodRecord) -> Run:
    for record in pods:
        run = transitions.pod_seen(run, record, at=T0)
    return run


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 0), (2, 0), (0, 1, 2)])
def test_the_first_job_of_a_run_stays_its_job(ranks: tuple[int, ...]) -> None:
    run = seen(begun(member(0), member(1)), *(rival(rank) for rank in ranks))
    assert run.rivals == {OTHER}
    assert {member.job for member in run.job_pods} == {JOB}
    assert run.job == JOB


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("on_record", [False, True])
def test_a_starting_reconciler_finds_the_same_job_for_any_order_of_pods(
    order: tuple[int, ...], on_record: bool
) -> None:
    """`on_record`: the first job's pods are the younger ones; the run's status names the job."""
    late = {"created_at": "2026-11-21T09:00:00Z"} if on_record else {}
    pods = [rival(0), rival(1), member(0, **late), member(1, **late)]
    status = RunStatus(
        job=JobStatus(api_version=JOB.api_version, kind=JOB.kind, name=JOB.name, uid=JOB.uid)
    )
    run = Run(key=KEY, since=T0)
    if on_record:
        run = transitions.run_object_seen(run, run_object(status=status))
    run = seen(run, *(pods[index] for index in order))
    assert run.rivals == {OTHER}
    assert run.job_of_pods == JOB


@pytest.mark.parametrize("state", [JobState.GONE, JobState.FAILED, JobState.UNKNOWN])
def test_a_new_job_takes_over_the_run_only_after_the_old_job_has_ended(state: JobState) -> None:
    pods = [member(0), member(1)]
    run = seen(begun(*pods), rival(0), rival(1))
    assert not transitions.needs_job_check(run)
    run = seen(run, *(replace(record, deleting=True) for record in pods))
    assert transitions.needs_job_check(run)
    assert transitions.job_answered(run, JobState.ACTIVE, at=T0).rivals == {OTHER}
    run = transitions.job_answered(run, state, at=T0)
    assert not run.rivals
    assert run.job == OTHER


def test_deleting_a_second_job_with_the_same_label_removes_the_conflict() -> None:
    run = seen(begun(member(0), member(1)), rival(0))
    assert not transitions.pod_gone(run, "rival-0", at=T0).rivals


def test_a_pod_whose_labels_arrive_late_does_not_conflict_with_itself() -> None:
    first = replace(member(2), labelled=False)
    run = begun(first)
    run = seen(run, replace(first, labelled=True, job=OTHER))
    assert not run.rivals
    assert run.job_of_pods == OTHER


def test_single_pod_jobs_with_different_node_ranks_form_one_run() -> None:
    """For example bare pods with a label for their node rank: they are no rivals."""
    jobs = [replace(OTHER, name=f"place-{rank}", uid=f"job-{rank}") for rank in (0, 1)]
    run = begun(*(member(rank, job=job) for rank, job in enumerate(jobs)))
    assert not run.rivals
    assert len([*run.job_pods]) == 2


def test_the_policy_of_a_second_job_does_not_replace_the_policy_of_the_run() -> None:
    run = seen(begun(member(0), member(1)), rival(0, policy="other"))
    assert transitions.policy_name(run) == "default"
    assert transitions.policy_seen(run, policy()).policy == accepted()


# --- its end -------------------------------------------------------------------------------------


def test_a_run_whose_pods_all_succeeded_is_finished_without_reading_its_job() -> None:
    run = seen(reported(begun()), pod(0, phase="Succeeded"))
    assert run.finished_at is None
    run = seen(run, pod(1, phase="Succeeded"))
    assert run.finished_at == T0
    assert run.recent[0].message == "the job is finished; step 100 is committed"


def test_the_job_is_read_when_all_pods_failed_as_they_may_be_recreated() -> None:
    run = seen(reported(begun()), pod(0, phase="Failed"), pod(1, phase="Failed"))
    assert transitions.needs_job_check(run)
    assert transitions.job_answered(run, JobState.ACTIVE, at=T0) == run
    assert transitions.job_answered(run, JobState.FAILED, at=T0).finished_at == T0
    assert transitions.job_answered(run, JobState.UNKNOWN, at=T0).finished_at is None
    later = T0 + UNKNOWN_JOB_S
    assert transitions.job_answered(run, JobState.UNKNOWN, at=later).finished_at == later


def test_a_recreated_pod_makes_a_finished_run_active_again() -> None:
    run = seen(reported(begun()), pod(0, phase="Succeeded"), pod(1, phase="Succeeded"))
    assert seen(run, pod(0, life=2)).finished_at is None


def test_the_run_object_expires_a_ttl_after_the_job_and_never_before_its_pods() -> None:
    run = seen(reported(begun()), pod(0, phase="Succeeded"), pod(1, phase="Succeeded"))
    later = T0 + run.ttl_s
    assert not transitions.is_expired(run, later)
    for uid in [*run.pods]:
        run = transitions.pod_gone(run, uid, at=T0)
    assert not transitions.is_expired(run, later - 1)
    assert transitions.is_expired(run, later)


# --- what made it --------------------------------------------------------------------------------


JOB_SET = Job(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name="llama", uid="set-1")
TRAIN_JOB = Job(
    api_version="trainer.kubeflow.org/v1alpha1", kind="TrainJob", name="llama", uid="train-1"
)
SETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{KEY.namespace}/jobsets"
TRAIN_JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{KEY.namespace}/trainjobs"


def test_the_job_of_a_run_is_the_train_job_that_owns_its_job_set() -> None:
    run = begun(pod(0, job=JOB_SET), pod(1, job=JOB_SET))
    assert not run.owner_known
    assert run.job == JOB_SET
    run = transitions.owner_found(run, JOB_SET, TRAIN_JOB)
    assert run.owner_known
    assert seen(run, pod(1, job=JOB_SET, life=2)).job == TRAIN_JOB


def test_a_recorded_train_job_is_used_until_its_owner_is_looked_up_again() -> None:
    record = JobStatus(
        api_version=TRAIN_JOB.api_version, kind=TRAIN_JOB.kind, name="llama", uid=TRAIN_JOB.uid
    )
    run = transitions.run_object_seen(
        Run(key=KEY, since=T0), run_object(status=RunStatus(job=record))
    )
    run = seen(run, pod(0, job=JOB_SET))
    assert run.job == TRAIN_JOB
    assert transitions.owner_found(run, JOB_SET, None).job == JOB_SET


def _job_set(uid: str, *owners: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "llama", "uid": uid, "ownerReferences": list(owners)}}


def _owner(job: Job, **more: Any) -> dict[str, Any]:
    named = {"apiVersion": job.api_version, "kind": job.kind, "name": job.name, "uid": job.uid}
    return {**named, "controller": True, **more}


@pytest.mark.parametrize(
    ("body", "owner"),
    [
        (_job_set("set-1", _owner(TRAIN_JOB)), TRAIN_JOB),
        (_job_set("set-1"), None),
        (_job_set("another", _owner(TRAIN_JOB)), None),
        (_job_set("set-1", _owner(TRAIN_JOB, controller=False)), None),
        (_job_set("set-1", _owner(TRAIN_JOB, apiVersion="example.com/v1")), None),
        (_job_set("set-1", _owner(JOB)), None),
    ],
    ids=["a TrainJob", "nobody", "another of that name", "no controller", "a stranger", "a kind"],
)
async def test_the_owner_of_a_job_set_is_its_controller_reference(
    body: dict[str, Any], owner: Job | None
) -> None:
    cluster = ApiServer(objects={f"{SETS}/llama": body})
    async with cluster.running(), KubeClient(cluster.access) as client:
        assert await read_parent_of_job(client, JOB_SET, KEY.namespace) == owner


async def test_a_deleted_or_unreadable_job_set_has_no_owner() -> None:
    cluster = ApiServer()
    async with cluster.running(), KubeClient(cluster.access) as client:
        assert await read_parent_of_job(client, JOB_SET, KEY.namespace) is None
        cluster.forbidden = "/jobsets"
        assert await read_parent_of_job(client, JOB_SET, KEY.namespace) is None


async def test_the_end_of_a_train_job_is_read_from_its_conditions() -> None:
    over = {"conditions": [{"type": "Complete", "status": "True"}]}
    body = {"metadata": {"name": "llama", "uid": "train-1"}, "status": over}
    cluster = ApiServer(objects={f"{TRAIN_JOBS}/llama": body})
    async with cluster.running(), KubeClient(cluster.access) as client:
        assert await read_job_state(client, TRAIN_JOB, KEY.namespace) is JobState.FINISHED
        body["status"] = {"conditions": [{"type": "Suspended", "status": "True"}]}
        assert await read_job_state(client, TRAIN_JOB, KEY.namespace) is JobState.ACTIVE


RAY_JOB = Job(api_version="ray.io/v1", kind="RayJob", name="llama", uid="ray-1")
RAY_CLUSTER = Job(api_version="ray.io/v1", kind="RayCluster", name="llama-9x7wq", uid="ray-2")
RAY = f"/apis/ray.io/v1/namespaces/{KEY.namespace}"


async def test_a_ray_job_owns_its_cluster_and_its_end_is_read_from_its_deployment_status() -> None:
    ready = {"state": "ready", "conditions": [{"type": "RayClusterProvisioned", "status": "True"}]}
    owned = {"name": "llama-9x7wq", "uid": "ray-2", "ownerReferences": [_owner(RAY_JOB)]}
    job: dict[str, Any] = {"metadata": {"name": "llama", "uid": "ray-1"}}
    cluster = ApiServer(
        objects={
            f"{RAY}/rayclusters/llama-9x7wq": {"metadata": owned, "status": ready},
            f"{RAY}/rayjobs/llama": job,
        }
    )
    async with cluster.running(), KubeClient(cluster.access) as client:
        assert await read_parent_of_job(client, RAY_CLUSTER, KEY.namespace) == RAY_JOB
        assert await read_job_state(client, RAY_CLUSTER, KEY.namespace) is JobState.ACTIVE
        for phase, state in (
            ("Running", JobState.ACTIVE),
            ("Retrying", JobState.ACTIVE),
            ("Complete", JobState.FINISHED),
            ("Failed", JobState.FAILED),
        ):
            job["status"] = {"jobStatus": "RUNNING", "jobDeploymentStatus": phase}
            assert await read_job_state(client, RAY_JOB, KEY.namespace) is state
