"""Checks, one by one, what keepstep needs to work in a cluster.

A check that the user has no right to make is neither good nor bad: it says whom to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from keepstep_operator import names
from keepstep_operator.kubectl.cluster import Body, Cluster, Refused

OK, BAD, UNKNOWN = "ok", "bad", "unknown"

_KINDS: Final = {"checkpointpolicies", "checkpointruns", "checkpoints"}
_OURS: Final = "app.kubernetes.io/name=keepstep"
_COMPONENTS: Final = ("admission", "reconcile", "certificates")
_WEBHOOKS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `said`: what was found and, if it is bad, what to do."""

    check: str
    result: str
    said: str


Told = tuple[str, str]
"""Result and message."""


def examine(cluster: Cluster) -> list[Finding]:
    """All checks, in an order in which each may depend on those before."""
    return [finding for check in _CHECKS for finding in _tried(check, cluster)]


def _tried(check: Callable[[Cluster], Iterator[Told]], cluster: Cluster) -> list[Finding]:
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return [Finding(name, *told) for told in check(cluster)]
    except Refused as error:
        if error.code in (401, 403):
            return [Finding(name, UNKNOWN, f"{error}; ask somebody who may look")]
        return [Finding(name, BAD, str(error))]


def _kinds(cluster: Cluster) -> Iterator[Told]:
    try:
        missing = sorted(_KINDS - cluster.served())
    except Refused as error:
        if error.code != 404:
            raise
        missing = sorted(_KINDS)
    if missing:
        said = f"not served: {', '.join(missing)}; install the chart, or apply crds/"
        yield BAD, said
    else:
        yield OK, f"{names.API_VERSION} is served"


def _webhook(cluster: Cluster) -> Iterator[Told]:
    found = cluster.list(_WEBHOOKS, labels=_OURS)
    if not found:
        yield BAD, "no webhook: no pod gets a sidecar; install the chart"
    for one in found:
        name = one["metadata"]["name"]
        if all(hook["clientConfig"].get("caBundle") for hook in one.get("webhooks", ())):
            yield OK, f"{name} has its CA"
        else:
            said = f"{name} has no caBundle: the log of the certificates component says why"
            yield BAD, said


def _operator(cluster: Cluster) -> Iterator[Told]:
    found = {
        _component(one): one for one in cluster.list("/apis/apps/v1/deployments", labels=_OURS)
    }
    for component in _COMPONENTS:
        deployment = found.get(component)
        if deployment is None:
            yield BAD, f"no Deployment of {component}; install the chart"
            continue
        place = f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"
        ready = deployment.get("status", {}).get("readyReplicas", 0)
        wanted = deployment.get("spec", {}).get("replicas", 1)
        said = f"{place}: {ready} of {wanted} Ready"
        hint = "" if ready else f"; kubectl -n {place.replace('/', ' describe deployment ')}"
        yield OK if ready else BAD, said + hint


def _component(deployment: Body) -> str:
    return str(deployment["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def _huge_pages(cluster: Cluster) -> Iterator[Told]:
    nodes = cluster.list("/api/v1/nodes")
    with_them = [
        str(one["metadata"]["name"])
        for one in nodes
        if one.get("status", {}).get("allocatable", {}).get(names.HUGE_PAGES, "0") != "0"
    ]
    hint = "" if with_them else "; memory.hugePages: 2Mi would keep pods Pending"
    said = f"{len(with_them)} of {len(nodes)} nodes have {names.HUGE_PAGES}{hint}"
    yield OK, said


_CHECKS: Final = (_kinds, _webhook, _operator, _huge_pages)
