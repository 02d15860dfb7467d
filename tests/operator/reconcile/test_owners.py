"""The job that people look at is what made the pods' job: a TrainJob makes a JobSet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep_operator.api.model import Job, JobState
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.errands import asked, owner_of
from keepstep_operator.reconcile.state.actions import AskJob, EmitEvent, FindOwner
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import JOB, KEY, Play, pod, run_object

JOB_SET = Job(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name="llama", uid="set-1")
TRAIN_JOB = Job(
    api_version="trainer.kubeflow.org/v1alpha1", kind="TrainJob", name="llama", uid="train-1"
)
SETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{KEY.namespace}/jobsets"
TRAIN_JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{KEY.namespace}/trainjobs"


def _lookups(play: Play) -> list[FindOwner]:
    return [one for one in play.actions if isinstance(one, FindOwner)]


def test_a_job_set_is_looked_up_once_and_its_train_job_is_the_run_s_job() -> None:
    first, second = pod(0, job=JOB_SET), pod(1, job=JOB_SET)
    play = Play(first, second)
    assert _lookups(play) == [FindOwner(KEY, JOB_SET)]
    play.note(play.registry.owner_found(KEY, JOB_SET, TRAIN_JOB))
    job = play.status.job
    assert job is not None
    assert (job.kind, job.name, job.uid) == ("TrainJob", "llama", "train-1")
    play.see(replace(second, injected=False, uid="late"))
    events = [one for one in play.actions if isinstance(one, EmitEvent)]
    assert [one.about for one in events if one.reason == "NotInjected"] == [TRAIN_JOB]
    for one in (first, second, replace(second, uid="late")):
        play.lose(one)
    play.wait(3600)
    ended = [one for one in play.actions if isinstance(one, AskJob)]
    assert [one.job for one in ended] == [TRAIN_JOB]
    assert len(_lookups(play)) == 1


def test_a_reconciler_that_begins_anew_keeps_the_train_job_until_it_is_found_again() -> None:
    before = Play(pod(0, job=JOB_SET))
    before.note(before.registry.owner_found(KEY, JOB_SET, TRAIN_JOB))
    play = Play()
    play.find(run_object(before.status))
    play.see(pod(0, job=JOB_SET))
    assert play.status.job is not None
    assert play.status.job.kind == "TrainJob"
    assert _lookups(play) == [FindOwner(KEY, JOB_SET)]
    play.note(play.registry.owner_found(KEY, JOB_SET, None))
    assert play.status.job.kind == "JobSet", "it was made by nobody this time"


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
async def test_what_made_a_job_set_is_its_controller(
    body: dict[str, Any], owner: Job | None
) -> None:
    cluster = ApiServer(objects={f"{SETS}/llama": body})
    async with cluster.running(), Client(cluster.access) as client:
        assert await owner_of(client, FindOwner(KEY, JOB_SET)) == owner


async def test_a_job_set_that_is_gone_or_may_not_be_read_has_no_owner() -> None:
    cluster = ApiServer()
    async with cluster.running(), Client(cluster.access) as client:
        assert await owner_of(client, FindOwner(KEY, JOB_SET)) is None
        cluster.forbidden = "/jobsets"
        assert await owner_of(client, FindOwner(KEY, JOB_SET)) is None


async def test_a_train_job_tells_its_end_by_its_conditions() -> None:
    over = {"conditions": [{"type": "Complete", "status": "True"}]}
    body = {"metadata": {"name": "llama", "uid": "train-1"}, "status": over}
    cluster = ApiServer(objects={f"{TRAIN_JOBS}/llama": body})
    async with cluster.running(), Client(cluster.access) as client:
        assert await asked(client, AskJob(KEY, TRAIN_JOB)) is JobState.FINISHED
        body["status"] = {"conditions": [{"type": "Suspended", "status": "True"}]}
        assert await asked(client, AskJob(KEY, TRAIN_JOB)) is JobState.ACTIVE
