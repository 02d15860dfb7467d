"""Looks up jobs of kinds that are known: whether one is over, and what made it."""

from __future__ import annotations

from keepstep_operator.api.cluster_objects import Job, JobState
from keepstep_operator.api.job_kinds import kind_of
from keepstep_operator.api.pod import controller_of
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import Denied, NotFound
from keepstep_operator.kube.resources import find_job_resource
from keepstep_operator.reconcile.parsing import job_state


async def read_job_state(client: KubeClient, job: Job, namespace: str) -> JobState:
    """The state of the job. Raises KubeError."""
    resource = find_job_resource(job)
    if resource is None:
        return JobState.UNKNOWN
    try:
        body = await client.get(resource, job.name, namespace=namespace)
    except NotFound as error:
        # a 404 without a reason: the version is not served, which says nothing of the job
        return JobState.GONE if error.reason else JobState.UNKNOWN
    except Denied:
        # We may not read this kind. The job may be suspended or scaled to zero, and its steps must
        # outlast that. A run whose pods all succeeded is finished without asking.
        return JobState.UNKNOWN
    if job.uid and (body.get("metadata") or {}).get("uid") != job.uid:
        return JobState.GONE
    return job_state(body)


async def read_parent_of_job(client: KubeClient, job: Job, namespace: str) -> Job | None:
    """The owner of this job, if it is of the kind that may own it. Raises KubeError."""
    resource, kind = find_job_resource(job), kind_of(job.api_version, job.kind)
    if resource is None or kind is None:
        return None
    try:
        body = await client.get(resource, job.name, namespace=namespace)
    except (NotFound, Denied):
        return None
    metadata = body.get("metadata") or {}
    if metadata.get("uid") != job.uid:
        return None
    owner = controller_of(metadata.get("ownerReferences") or [])
    above = kind_of(owner.api_version, owner.kind) if owner is not None else None
    if owner is None or above is None or (above.group, above.kind) != kind.owner:
        return None
    return owner
