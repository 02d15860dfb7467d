"""CheckpointRun.status.holders: what each node holds of the run on drives that outlive pods.

Admission reads it for the next pods of the run. So it names places, which a pod has from its
creation, and not ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.core.commit_rule import bits
from keepstep.leader.node_rank import Place
from keepstep.leader.orphaned_shards import OrphanedShard
from keepstep_operator.api.run import MOST_HOLDERS, HolderStatus
from keepstep_operator.reconcile.state.run_view import RunView
from keepstep_operator.spans import spans


def holders(run: RunView) -> list[HolderStatus]:
    """The holders, sorted by node name. Nodes that pods have left come first, because nothing else
    remembers what lies there."""
    place_of = {one: rank for rank, place in run.places.items() for one in bits(place.own)}
    by_node: dict[str, dict[int, Place]] = {}
    for node_rank, place in run.places.items():
        if place.stays and place.node and not place.dropped:
            by_node.setdefault(place.node, {})[node_rank] = place
    left: dict[str, list[OrphanedShard]] = {}
    for one in run.orphans:
        by_node.setdefault(one.node, {})
        left.setdefault(one.node, []).append(one)
    found = (
        _holder(run, node, places, place_of, left.get(node, ()))
        for node, places in sorted(by_node.items(), key=lambda one: (one[0] not in left, one[0]))
    )
    return [one for one in found if one.node_ranks or one.copies][:MOST_HOLDERS]


def _holder(
    run: RunView,
    node: str,
    places: dict[int, Place],
    place_of: dict[int, int],
    left: Iterable[OrphanedShard],
) -> HolderStatus:
    """One node. `left`: the shards on it of places that are elsewhere now."""
    steps = [run.on_drives[node_rank] for node_rank in places if node_rank in run.on_drives]
    newest = max((*steps, *(one.step for one in left)), default=None)
    return HolderStatus(
        node=node,
        node_ranks=spans(
            {rank for rank, place in places.items() if place.own and rank in run.own_drives}
            | {one.node_rank for one in left}
        ),
        copies=spans(
            place_of[rank]
            for place in places.values()
            for rank in bits(place.copied)
            if rank in place_of
        ),
        step=None if newest is None else newest.step,
    )
