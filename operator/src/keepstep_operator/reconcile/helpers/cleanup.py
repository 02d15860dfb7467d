"""Where runs have directories on nodes, so that they can be removed once a run is gone. Pure.

One entry a run, kept in a ConfigMap from when a pod of the run is on a node, so that it outlives
the run's object, its namespace, and a reconciler that was away when they were deleted. In doubt
nothing is removed: while a CheckpointRun or a pod of that name exists, whatever its uid (it goes on
in the same directories), and until a time of grace has passed without either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from keepstep_operator.api.model import NodeRecord, PodRecord, RunKey
from keepstep_operator.api.pod import is_run_key
from keepstep_operator.bodies import Body

LABEL: Final = "keepstep.dev/run-directories"
FORGET_S: Final = 7 * 24 * 3600.0
"""After that what lies on a node that is no part of the cluster any more is not waited for."""
MOST_NODES: Final = 1024
_KEY: Final = "run"


@dataclass(frozen=True, kw_only=True)
class RunDirectories:
    """Of one run: node -> hostPaths below which its directories lie. `gone_since`: unix seconds
    when neither object nor pod of it was there for the first time, None while it is alive."""

    run: RunKey
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gone_since: float | None = None

    @property
    def name(self) -> str:
        """Of its ConfigMap."""
        return f"keepstep-run-{_digest(str(self.run))}"


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """One pod that removes the directories of a run from one node. `gone_since`: as in `Grave`."""

    run: RunKey
    node: str
    paths: tuple[str, ...]
    gone_since: float

    @property
    def name(self) -> str:
        return f"keepstep-clean-{_digest(f'{self.run}/{self.node}/{self.paths}')}"


def visited(grave: RunDirectories, pods: Iterator[PodRecord]) -> RunDirectories:
    """With the nodes that these pods of the run are on; alive, as it has pods."""
    nodes = dict(grave.nodes)
    for pod in pods:
        if pod.injected and pod.node and pod.host_paths and _fits(nodes, pod.node):
            nodes[pod.node] = tuple(sorted({*nodes.get(pod.node, ()), *pod.host_paths}))
    return grave if nodes == grave.nodes else replace(grave, nodes=nodes)


def judged(grave: RunDirectories, alive: Container[RunKey], *, at: float) -> RunDirectories:
    """Since when it is gone."""
    if grave.run in alive:
        return replace(grave, gone_since=None)
    return grave if grave.gone_since is not None else replace(grave, gone_since=at)


def due(
    grave: RunDirectories, nodes: Mapping[str, NodeRecord], *, grace_s: float, at: float
) -> Iterator[Cleaning]:
    """What may be cleaned now: on nodes that are up. A node that is down is waited for. `nodes`:
    empty where they are not followed; then every one is taken to be up."""
    if grave.gone_since is None or at - grave.gone_since < grace_s:
        return
    for node, paths in sorted(grave.nodes.items()):
        known = nodes.get(node)
        if known.ready if known is not None else not nodes:
            yield Cleaning(run=grave.run, node=node, paths=paths, gone_since=grave.gone_since)


def without_lost_nodes(
    grave: RunDirectories, nodes: Mapping[str, NodeRecord], *, at: float
) -> RunDirectories:
    """Nodes that left the cluster long ago will not come back with what they held."""
    if not nodes or grave.gone_since is None or at - grave.gone_since < FORGET_S:
        return grave
    return replace(grave, nodes={name: one for name, one in grave.nodes.items() if name in nodes})


def cleaned(grave: RunDirectories, node: str) -> RunDirectories:
    """Nothing is left on this node."""
    return replace(grave, nodes={name: one for name, one in grave.nodes.items() if name != node})


def still_used(grave: RunDirectories, *, at: float) -> RunDirectories:
    """It lived while nobody watched: the time of grace begins anew."""
    return replace(grave, gone_since=at)


def render(grave: RunDirectories, *, namespace: str) -> Body:
    """As a ConfigMap."""
    told = {
        "namespace": grave.run.namespace,
        "run": grave.run.name,
        "nodes": {node: list(paths) for node, paths in sorted(grave.nodes.items())},
        "goneSince": grave.gone_since,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": grave.name, "namespace": namespace, "labels": {LABEL: "true"}},
        "data": {_KEY: json.dumps(told, sort_keys=True)},
    }


def parse(body: Body) -> RunDirectories | None:
    """Inverse of `render`; None for what is none, which is left alone."""
    try:
        told: dict[str, Any] = json.loads((body.get("data") or {})[_KEY])
        if not is_run_key(str(told["run"])) or not is_run_key(str(told["namespace"])):
            return None
        since = told.get("goneSince")
        return RunDirectories(
            run=RunKey(str(told["namespace"]), str(told["run"])),
            nodes={str(node): tuple(map(str, at)) for node, at in told["nodes"].items()},
            gone_since=None if since is None else float(since),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _fits(nodes: Mapping[str, object], node: str) -> bool:
    return node in nodes or len(nodes) < MOST_NODES


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
