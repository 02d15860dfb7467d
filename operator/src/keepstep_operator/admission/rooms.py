"""What a pod's namespace leaves for its sidecar: LimitRanges, ResourceQuotas, Pod Security.

They are followed for the whole cluster. That is enough where a quota holds the whole job with
its sidecars. Where it might not, the quota is read live, and so is how many pods of the job there
are and will be: the sidecars of the first pods must not take the place of the last ones.

What cannot be read of the job makes the decision more careful, never the pod wait: without its
size, pods like this one may come until the quota is full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Generic, TypeVar

from cachetools import TTLCache

from keepstep_operator.api.pod import Placement, Pod, root_of
from keepstep_operator.bodies import Body
from keepstep_operator.injection.room import Quota, Range, Room, parse_quota, parse_ranges
from keepstep_operator.kube import (
    LIMIT_RANGES,
    NAMESPACES,
    PODS,
    QUOTAS,
    Client,
    Feed,
    KubeError,
    NotFound,
    Resource,
    follow,
    resource_of,
)
from keepstep_operator.names import POD_SECURITY_LABEL, RUN_KEY_LABEL

_TIMEOUT_S: Final = 0.5
_REMEMBERED_S: Final = 5.0
_MOST_JOBS: Final = 1000
_NOT_OVER: Final = "status.phase!=Succeeded,status.phase!=Failed"

Parsed = TypeVar("Parsed")
_Key = tuple[str, str]


class _Collection(Generic[Parsed]):
    """All objects of a kind, by namespace and name."""

    def __init__(self, name: str, resource: Resource, parse: Callable[[Body], Parsed]) -> None:
        self._resource = resource
        self._parse = parse
        self._known: defaultdict[str, dict[str, Parsed]] = defaultdict(dict)
        self.feed = Feed[_Key](
            name=name, resource=resource, key_of=_key, seen=self._seen, gone=self._gone
        )

    def _seen(self, body: Body) -> None:
        namespace, name = _key(body)
        self._known[namespace][name] = self._parse(body)

    def _gone(self, key: _Key) -> None:
        namespace, name = key
        self._known[namespace].pop(name, None)
        if not self._known[namespace]:
            del self._known[namespace]

    async def of(self, client: Client, namespace: str) -> list[Parsed]:
        """Those of a namespace; asked live until all were seen once. Raises KubeError."""
        if self.feed.loaded.is_set():
            return [*self._known.get(namespace, {}).values()]
        return await self.live(client, namespace)

    async def live(self, client: Client, namespace: str) -> list[Parsed]:
        if self._resource is NAMESPACES:
            try:
                return [self._parse(await client.get(NAMESPACES, namespace))]
            except NotFound:
                return []
        return [self._parse(one) async for one in client.list(self._resource, namespace=namespace)]


class Rooms:
    """The rooms of all namespaces. `run` follows them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ranges = _Collection[tuple[Range, ...]]("limit ranges", LIMIT_RANGES, parse_ranges)
        self._quotas = _Collection[Quota]("quotas", QUOTAS, parse_quota)
        self._levels = _Collection[str]("namespaces", NAMESPACES, _level)
        self._sizes: TTLCache[_Key, int | None] = TTLCache(_MOST_JOBS, _REMEMBERED_S)

    @property
    def synced(self) -> bool:
        """Whether all objects were seen once."""
        return all(one.loaded.is_set() for one in self._feeds)

    async def run(self) -> None:
        """Follow them, for ever."""
        await follow(self._client, self._feeds)

    @property
    def _feeds(self) -> list[Feed[_Key]]:
        return [self._ranges.feed, self._quotas.feed, self._levels.feed]

    async def of(self, pod: Pod) -> Room:
        """The room for a pod, as if no pod of its job existed yet. Raises KubeError."""
        found = await self._ranges.of(self._client, pod.namespace)
        ranges = tuple(one for items in found for one in items)
        quotas = tuple(await self._quotas.of(self._client, pod.namespace))
        level = "".join(await self._levels.of(self._client, pod.namespace))
        pods = await self._size(pod) if quotas else 1
        return Room(ranges=ranges, quotas=quotas, pods=pods, pod_security=level)

    async def now(self, room: Room, pod: Pod, place: Placement) -> Room:
        """The same room from what the API server says now; unchanged if it does not answer."""
        try:
            quotas = await self._quotas.live(self._client, pod.namespace)
            there = await self._existing(pod.namespace, place)
        except KubeError:
            return room
        left = None if room.pods is None else room.pods - there
        return replace(room, quotas=tuple(quotas), pods=left, goes_on=there > 0)

    async def _existing(self, namespace: str, place: Placement) -> int:
        """How many pods with a sidecar the run has now."""
        labels = f"{RUN_KEY_LABEL}={place.run_key}"
        pods = self._client.names(PODS, namespace=namespace, labels=labels, fields=_NOT_OVER)
        return len([one async for one in pods])

    async def _size(self, pod: Pod) -> int | None:
        """How many pods the pod's job has; None if that is not known."""
        job = root_of(pod)
        if job.kind == "Pod":
            return 1
        key = pod.namespace, f"{job.kind}/{job.name}"
        if key not in self._sizes:
            self._sizes[key] = await self._asked(pod)
        return self._sizes[key]

    async def _asked(self, pod: Pod) -> int | None:
        job = root_of(pod)
        if (resource := resource_of(job)) is None:
            return None
        try:
            body = await self._client.get(
                resource, job.name, namespace=pod.namespace, timeout_s=_TIMEOUT_S
            )
        except KubeError:
            return None
        return pods_of(body.get("spec") or {})


def pods_of(spec: Body) -> int | None:
    """How many pods at a time a job with this spec has, of any kind of job that is known; None for
    a spec of another form."""
    try:
        return sum(_counts(spec)) or None
    except (TypeError, ValueError, AttributeError):
        return None


def _counts(spec: Body) -> Iterator[int]:
    for name, replicas in spec.items():
        if name.endswith("ReplicaSpecs"):  # of Kubeflow's kinds
            yield from (_number(one.get("replicas")) for one in replicas.values())
    if "replicatedJobs" in spec:  # JobSet
        for one in spec["replicatedJobs"]:
            job = (one.get("template") or {}).get("spec") or {}
            yield _number(one.get("replicas")) * _of_job(job)
    elif "leaderWorkerTemplate" in spec:
        yield _number(spec.get("replicas")) * _number(spec["leaderWorkerTemplate"].get("size"))
    elif "tasks" in spec:  # Volcano
        yield from (_number(one.get("replicas")) for one in spec["tasks"])
    elif "serviceName" in spec or "podManagementPolicy" in spec:  # StatefulSet
        yield _number(spec.get("replicas"))
    elif "template" in spec:  # Job
        yield _of_job(spec)


def _of_job(spec: Body) -> int:
    parallel = _number(spec.get("parallelism"))
    return min(parallel, _number(spec.get("completions"), parallel))


def _number(value: object, default: int = 1) -> int:
    return default if value is None else int(str(value))


def _level(namespace: Body) -> str:
    labels = (namespace.get("metadata") or {}).get("labels") or {}
    return str(labels.get(POD_SECURITY_LABEL) or "")


def _key(body: Body) -> _Key:
    """Namespace and name; a namespace is in itself."""
    metadata = body["metadata"]
    return metadata.get("namespace") or metadata["name"], metadata["name"]
