"""Which helper pods a run needs now: one on each node with a needed shard that no pod serves.

Pure and level-triggered: the shell compares the plan with the existing helper pods, and creates or
deletes pods. A helper begins only after every pod of the run has reported what it holds, so that a
reconciler that has just started begins none by a guess. It ends once the run holds a newer commit
without it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from keepstep.wire.reports import Peer
from keepstep_operator.api.model import RunKey
from keepstep_operator.reconcile.state.orphaned_shards import OrphanedShard

if TYPE_CHECKING:
    from keepstep_operator.reconcile.state.run import Run

FIRST_NUMBER = 100_000_000
"""The lowest number of a helper, which it has instead of a node rank: far above the node ranks of
pods, and of at most nine digits."""
_NUMBERS = 800_000_000


@dataclass(frozen=True, kw_only=True)
class Helper:
    """One helper pod. `paths`: hostPaths of the run, below which the run's directories lie."""

    run: RunKey
    node: str
    node_ranks: tuple[int, ...]
    paths: tuple[str, ...]

    @property
    def number(self) -> int:
        """Its number instead of a node rank, in its certificate and in the ledger. It is derived
        from the node's name."""
        return number_of(self.node)

    @property
    def name(self) -> str:
        """The pod's name. Other directories give another name, since a pod's mounts cannot
        change."""
        what = f"{self.run}/{self.node}/{self.node_ranks}/{self.paths}"
        return f"keepstep-helper-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def number_of(node: str) -> int:
    """See `Helper.number`. Two nodes of a run have the same number once in a hundred million."""
    return FIRST_NUMBER + zlib.crc32(node.encode()) % _NUMBERS


@lru_cache(maxsize=1024)  # asked with each report; most runs have the same directories
def allowed(paths: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The directories of a node that lie below a prefix that the administrator allows."""
    below = [PurePosixPath(one) for one in prefixes]
    return tuple(
        path
        for path in paths
        if ".." not in PurePosixPath(path).parts
        and any(PurePosixPath(path).is_relative_to(one) for one in below)
    )


def wanted(run: Run) -> list[Helper]:
    """The helpers that this run needs, sorted by node."""
    paths = run.helper_paths
    if not paths or run.finished_at is not None or run.object is None:
        return []
    by_node: dict[str, list[int]] = {}
    for left in needed(run):
        by_node.setdefault(left.node, []).append(left.node_rank)
    return [
        Helper(run=run.key, node=node, node_ranks=tuple(sorted(ranks)), paths=paths)
        for node, ranks in sorted(by_node.items())
    ]


def needed(run: Run) -> Iterator[OrphanedShard]:
    """The orphaned shards that lie on a node that is up, and without which no step as new as theirs
    can be restored."""
    told = _all_told(run)
    orphans = [one for one in _reachable(run) if told or number_of(one.node) in run.ledger.helpers]
    if not orphans:
        return
    without = run.ledger.unaided()  # walks all copies
    yield from (one for one in orphans if without is None or without < one.step)


def _reachable(run: Run) -> Iterator[OrphanedShard]:
    """The orphaned shards that a helper could serve, needed or not."""
    for left in run.ledger.orphans:
        if _went_on(run, left) and _is_up(run, left.node):
            yield left


def peers(run: Run) -> tuple[Peer, ...]:
    """The helper pods that serve now, as peers."""
    return tuple(
        Peer(node_rank=number, address=place.sidecar.peer_address)
        for number, place in sorted(run.ledger.helpers.items())
        if place.sidecar.peer_address
    )


def awaits(run: Run, node_rank: int) -> str:
    """Why the vote of this place's pod must wait; '': it need not. The pod has left shards on
    another node and will soon have them back, or it is not known yet whether it needs them."""
    if not any(run.ledger.orphans):
        return ""
    if run.helper_paths and not _all_told(run):
        for left in _reachable(run):
            if left.node_rank == node_rank:
                return (
                    f"shards of node rank {node_rank} lie on node {left.node}, and not all pods of"
                    " the run have told what they hold"
                )
    for helper in wanted(run):
        if node_rank in helper.node_ranks and helper.number not in run.ledger.helpers:
            return (
                f"shards of node rank {node_rank} lie on node {helper.node}, where a helper pod"
                " that serves them is being started"
            )
    return ""


def served(helpers: Iterable[Helper], serving: Container[int]) -> str:
    """A message: which shards are served from which node. `serving`: numbers of the helpers that
    have reported."""
    return "; ".join(
        f"shards of node ranks {', '.join(map(str, one.node_ranks))} are served from node"
        f" {one.node} by pod {one.name}"
        for one in helpers
        if one.number in serving
    )


def _all_told(run: Run) -> bool:
    pods = [pod for pod in run.pods.values() if pod.stays]
    places = run.ledger.places
    return bool(pods) and all(
        (place := places.get(pod.node_rank)) is not None
        and place.pod == pod.uid
        and place.sidecar.ready
        for pod in pods
    )


def _went_on(run: Run, left: OrphanedShard) -> bool:
    """Whether the place has a pod on another node and none on the shards' node. Pods that have
    ended do not count: they serve nothing."""
    pods = [pod for pod in run.pods.values() if pod.node_rank == left.node_rank]
    nodes = {pod.node for pod in pods if not pod.over}
    return bool(nodes - {""}) and left.node not in nodes


def _is_up(run: Run, node: str) -> bool:
    """Whether the node is up. If nodes are not watched, every node counts as up."""
    known = run.nodes.get(node)
    return known.ready if known is not None else not run.nodes
