"""Which epochs are surely this run's own. Pure.

Each pod's record begins with the epoch in which the pod was new. Whoever meets steps of older
epochs must still see that they are of the same run, so what is known of the line goes on record.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.steps import Epoch


def line(own: Iterable[Epoch], known: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """`own` and what they went on from, as far as `known` tells; oldest first. A fork's line ends
    where it left the other run."""
    by_id = {epoch.id: epoch for epoch in known}
    found = {epoch.id: epoch for epoch in own}
    waiting = list(found.values())
    while waiting:
        one = waiting.pop()
        if one.parent is None or one.origin or one.parent.epoch in found:
            continue
        if (parent := by_id.get(one.parent.epoch)) is not None:
            found[parent.id] = parent
            waiting.append(parent)
    return tuple(found[id] for id in sorted(found))
