"""What a pod's namespace leaves for its sidecar: LimitRanges, ResourceQuotas, Pod Security.

They are read for each namespace, and remembered for a second, since all pods of a job come at once.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cachetools import TTLCache

from keepstep_operator.injection.namespace_limits import NamespaceLimits, parse_quota, parse_ranges
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import NotFound
from keepstep_operator.kube.resources import LIMIT_RANGES, NAMESPACES, QUOTAS, Resource
from keepstep_operator.names import POD_SECURITY_LABEL
from keepstep_operator.object_body import Body

_REMEMBERED_S: Final = 1.0
_MOST_NAMESPACES: Final = 1000


class NamespaceLimitsReader:
    """Reads the rooms of namespaces through `client`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: TTLCache[str, NamespaceLimits] = TTLCache(_MOST_NAMESPACES, _REMEMBERED_S)

    async def of(self, namespace: str) -> NamespaceLimits:
        """The room of this namespace. Raises KubeError."""
        if (known := self._known.get(namespace)) is not None:
            return known
        limits, quotas, level = await asyncio.gather(
            self._listed(LIMIT_RANGES, namespace),
            self._listed(QUOTAS, namespace),
            self._level(namespace),
        )
        found = self._known[namespace] = NamespaceLimits(
            ranges=tuple(item for limit in limits for item in parse_ranges(limit)),
            quotas=tuple(map(parse_quota, quotas)),
            pod_security=level,
        )
        return found

    async def _listed(self, resource: Resource, namespace: str) -> list[Body]:
        return [body async for body in self._client.list(resource, namespace=namespace)]

    async def _level(self, namespace: str) -> str:
        try:
            body: Body = await self._client.get(NAMESPACES, namespace)
        except NotFound:  # it is about to be deleted
            return ""
        labels = (body.get("metadata") or {}).get("labels") or {}
        return str(labels.get(POD_SECURITY_LABEL) or "")
