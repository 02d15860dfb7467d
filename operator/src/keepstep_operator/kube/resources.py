"""The kinds that we read or write, and the types of requests about them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from keepstep_operator import names
from keepstep_operator.api.cluster_objects import Job
from keepstep_operator.api.job_kinds import is_object_name, kind_of
from keepstep_operator.object_body import Body

Patch = Body | list[Body]
"""A merge patch, or a list of JSON patch operations."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """Where a kind is served. `group` is '' for the core API."""

    group: str
    version: str
    plural: str

    def path(self, *parts: str, namespace: str | None = None) -> str:
        """The path of the collection, or of the object and subresource that `parts` name. Names may
        come from users, so they are quoted and cannot lead to another path."""
        root = ("apis", self.group, self.version) if self.group else ("api", self.version)
        scope = ("namespaces", namespace) if namespace else ()
        return "".join(f"/{quote(part, safe='')}" for part in (*root, *scope, self.plural, *parts))


POLICIES: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpointpolicies")
RUNS: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpointruns")
CHECKPOINTS: Final = Resource(group=names.GROUP, version=names.VERSION, plural="checkpoints")
PODS: Final = Resource(group="", version="v1", plural="pods")
NAMESPACES: Final = Resource(group="", version="v1", plural="namespaces")
LIMIT_RANGES: Final = Resource(group="", version="v1", plural="limitranges")
QUOTAS: Final = Resource(group="", version="v1", plural="resourcequotas")
SECRETS: Final = Resource(group="", version="v1", plural="secrets")
EVENTS: Final = Resource(group="events.k8s.io", version="v1", plural="events")
SERVICES: Final = Resource(group="", version="v1", plural="services")
TOKEN_REVIEWS: Final = Resource(group="authentication.k8s.io", version="v1", plural="tokenreviews")
WEBHOOKS: Final = Resource(
    group="admissionregistration.k8s.io", version="v1", plural="mutatingwebhookconfigurations"
)


def find_job_resource(job: Job) -> Resource | None:
    """Where a job is served; None for an unknown kind or a name that no object can have."""
    kind = kind_of(job.api_version, job.kind)
    if kind is None or not is_object_name(job.name):
        return None
    version = job.api_version.rpartition("/")[2]
    return Resource(group=kind.group, version=version, plural=kind.plural)


class PatchType(str, enum.Enum):
    """The media types of PATCH. `MERGE` replaces whole lists."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
