"""The job of a run: what made it, and what a second one with the same label gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep_operator.api.model import Job, JobState, PodRecord
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.errands import asked, owner_of
from keepstep_operator.reconcile.state.actions import AskJob, EmitEvent, FindOwner
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import (
    JOB,
    KEY,
    Play,
    Sidecar,
    accepted,
    pod,
    policy,
    run_object,
    step,
)

OTHER = Job(api_version="batch/v1", kind="Job", name="again", uid="job-2")


def member(rank: int = 0, **changes: object) -> PodRecord:
    return pod(rank, labelled=True, **changes)


def rival(rank: int = 0, **changes: object) -> PodRecord:
    """A pod of the other job, made after those of the first."""
    changes = {"uid": f"rival-{rank}", "name": f"again-{rank}", "life": 5, **changes}
    return pod(rank, labelled=True, job=OTHER, **changes)


def first_job() -> tuple[Play, list[PodRecord], list[Sidecar]]:
    """Two pods that hold steps 98 to 100 in memory and 90 on local."""
    pods = [member(rank) for rank in (0, 1)]
    sidecars = [Sidecar(rank=rank).staged(98, 99, 100).durable(90) for rank in (0, 1)]
    play = Play(*pods)
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, pods, sidecars


def commits(play: Play, pods: list[PodRecord], sidecars: list[Sidecar], number: int) -> None:
    """The job makes this step durable, and that is a commit."""
    for one in sidecars:
        one.durable(number)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert play.status.committed is not None
    assert play.status.committed.id == str(step(number))


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 0), (2, 0), (0, 1, 2)])
def test_commits_of_the_first_job_go_on_and_the_second_one_is_told_why(
    ranks: tuple[int, ...],
) -> None:
    play, pods, sidecars = first_job()
    for rank in ranks:
        play.see(rival(rank))
        if not play.registry.refusal(f"rival-{rank}"):  # nothing shows yet whose it is
            play.hear(rival(rank), Sidecar(rank=rank, world=3).staged(1).report())
    commits(play, pods, sidecars, 100)
    assert "again" in play.registry.refusal("rival-0")
    assert play.status.world == 2
    (warning, *more) = [one for one in play.status.warnings if "label keepstep.dev/run" in one]
    assert len(more) == len(ranks) - 1
    assert "Job again has the label keepstep.dev/run: gpt-1a2b3c4d" in warning
    assert "PyTorchJob gpt has that run" in warning
    (event,) = [
        one for one in play.actions if isinstance(one, EmitEvent) and one.reason == "RunTaken"
    ]
    assert event.about == OTHER
    assert "DuplicateNodeRank" not in {one.type for one in play.status.conditions}
    commits(play, pods, sidecars, 101)


def test_a_policy_of_the_second_job_is_not_that_of_the_run() -> None:
    play, _, _ = first_job()
    play.note(play.registry.policy_seen(policy(name="other")))
    play.see(rival(policy="other"))
    assert play.registry.runs[KEY].policy == accepted()


@pytest.mark.parametrize("state", [JobState.GONE, JobState.FAILED, JobState.UNKNOWN])
def test_a_new_job_whose_pods_come_before_the_old_ones_go_waits_for_that(state: JobState) -> None:
    play, pods, _ = first_job()
    play.see(rival(0))
    play.see(rival(1))
    play.wait(10)
    assert not [one for one in play.actions if isinstance(one, AskJob)]
    for one in pods:
        play.see(replace(one, deleting=True))
    assert play.actions[-1] == AskJob(KEY, JOB)
    play.note(play.registry.job_answered(KEY, state, at=play.now))
    assert play.registry.refusal("rival-0") == ""
    assert play.registry.pod("rival-1") == rival(1)
    assert set(play.registry.runs[KEY].pods) >= {"rival-0", "rival-1"}


def test_a_second_job_that_is_given_up_leaves_nothing() -> None:
    play, _, _ = first_job()
    play.see(rival(0))
    play.lose(rival(0))
    assert play.registry.refusal("rival-0") == ""
    assert not [one for one in play.status.warnings if "keepstep.dev/run" in one]


@pytest.mark.parametrize("recreated", [False, True])
def test_a_reconciler_that_begins_sees_the_pods_in_any_order(recreated: bool) -> None:
    """`recreated`: the first job's pod is the younger one; the run's record names the job."""
    play, pods, _ = first_job()
    status, second = play.status, Play()
    if recreated:
        pods = [replace(one, created_at="2026-11-21T09:00:00Z") for one in pods]
        second.find(run_object(status))
    for one in (rival(0), rival(1), *pods):
        second.see(one)
    sidecars = [Sidecar(rank=rank).durable(90) for rank in (0, 1)]
    commits(second, pods, sidecars, 100)
    assert second.registry.refusal("rival-0")
    assert second.registry.refusal("rival-1")
    assert not second.registry.refusal(pods[0].uid)


def test_jobs_of_one_place_each_make_one_run() -> None:
    """For example bare pods with a label for their node rank: they are no rivals."""
    jobs = [replace(OTHER, name=f"place-{rank}", uid=f"job-{rank}") for rank in (0, 1)]
    pods = [member(rank, job=job) for rank, job in enumerate(jobs)]
    sidecars = [Sidecar(rank=rank) for rank in (0, 1)]
    play = Play(*pods)
    commits(play, pods, sidecars, 100)
    play.see(replace(pods[1], deleting=True))
    again = replace(member(1, life=2), job=jobs[1])
    play.see(again)
    commits(play, [pods[0], again], sidecars, 101)


# The job that people look at is what made the pods' job: a TrainJob makes a JobSet.


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
