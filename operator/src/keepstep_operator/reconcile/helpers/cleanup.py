"""Where runs have directories on nodes, so that these can be removed once a run is gone. Pure.

Each run has one entry in a ConfigMap, from the time when a pod of it is on a node. The entry
outlives the run's object, its namespace, and a reconciler that was away when these were deleted. In
doubt nothing is removed: not while a CheckpointRun or a pod of the same run key exists, whatever
its uid, since it uses the same directories; and not before a time of grace without either has
passed.
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
"""How long after the end of a run to wait for nodes that are no longer part of the cluster."""
MOST_NODES: Final = 1024
_KEY: Final = "run"


@dataclass(frozen=True, kw_only=True)
class RunDirectories:
    """The directories of one run. `nodes`: node -> hostPaths below which they lie. `gone_since`:
    when it was first seen, in unix seconds, that neither its object nor a pod of it exists; None
    while the run is alive."""

    run: RunKey
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gone_since: float | None = None

    @property
    def name(self) -> str:
        """The name of its ConfigMap."""
        return f"keepstep-run-{_digest(str(self.run))}"


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """One pod that removes the directories of a run from one node. `gone_since`: see
    `RunDirectories`."""

    run: RunKey
    node: str
    paths: tuple[str, ...]
    gone_since: float

    @property
    def name(self) -> str:
        return f"keepstep-clean-{_digest(f'{self.run}/{self.node}/{self.paths}')}"


def visited(grave: RunDirectories, pods: Iterator[PodRecord]) -> RunDirectories:
    """The entry, plus the nodes that these pods of the run are on."""
    nodes = dict(grave.nodes)
    for pod in pods:
        if pod.injected and pod.node and pod.host_paths and _fits(nodes, pod.node):
            nodes[pod.node] = tuple(sorted({*nodes.get(pod.node, ()), *pod.host_paths}))
    return grave if nodes == grave.nodes else replace(grave, nodes=nodes)


def judged(grave: RunDirectories, alive: Container[RunKey], *, at: float) -> RunDirectories:
    """The entry, with `gone_since` set if the run is not in `alive`, and None if it is."""
    if grave.run in alive:
        return replace(grave, gone_since=None)
    return grave if grave.gone_since is not None else replace(grave, gone_since=at)


def due(
    grave: RunDirectories, nodes: Mapping[str, NodeRecord], *, grace_s: float, at: float
) -> Iterator[Cleaning]:
    """What may be cleaned now: directories on nodes that are up. A node that is down is waited for.
    `nodes`: empty if nodes are not watched; every node then counts as up."""
    if grave.gone_since is None or at - grave.gone_since < grace_s:
        return
    for node, paths in sorted(grave.nodes.items()):
        known = nodes.get(node)
        if known.ready if known is not None else not nodes:
            yield Cleaning(run=grave.run, node=node, paths=paths, gone_since=grave.gone_since)


def without_lost_nodes(
    grave: RunDirectories, nodes: Mapping[str, NodeRecord], *, at: float
) -> RunDirectories:
    """The entry without nodes that left the cluster, once the run is gone for `FORGET_S`: such
    nodes will not come back with their drives."""
    if not nodes or grave.gone_since is None or at - grave.gone_since < FORGET_S:
        return grave
    return replace(grave, nodes={name: one for name, one in grave.nodes.items() if name in nodes})


def cleaned(grave: RunDirectories, node: str) -> RunDirectories:
    """The entry without this node, on which nothing is left."""
    return replace(grave, nodes={name: one for name, one in grave.nodes.items() if name != node})


def still_used(grave: RunDirectories, *, at: float) -> RunDirectories:
    """The entry of a run that was alive while no reconciler watched: the time of grace begins
    anew."""
    return replace(grave, gone_since=at)


def render(grave: RunDirectories, *, namespace: str) -> Body:
    """The entry as a ConfigMap."""
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
    """Inverse of `render`; None for a ConfigMap that is no entry, which is left alone."""
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
