"""Which epochs are this run's own, and where a fork comes from.

A step of another run stands in for step 0, so it is held to the same rule: it is a candidate only
when every tier has said that this run has nothing committed of its own. What is the run's own is
always newer, so once there is a commit nothing of the fork is asked, offered or reported any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from keepstep.core.shard import Told
from keepstep.steps import Epoch, StepId
from keepstep_sidecar.commit.inventory import RemoteInventory

Row = TypeVar("Row", bound=Told)


class Ancestry:
    """Of one run. Does nothing where the run is no fork."""

    def __init__(
        self,
        remotes: RemoteInventory,
        commits: Callable[[], Iterable[StepId]],
        epochs: Callable[[], Iterable[Epoch]],
    ) -> None:
        """`commits`: every step that is known to be committed and may be restored. `epochs`: those
        that are surely this run's own."""
        self._ancestor = remotes.ancestor
        self._commits = commits
        self._epochs = epochs

    def outgrown(self) -> bool:
        """The run has a commit of its own."""
        return self._newest() is not None

    def _newest(self) -> StepId | None:
        return max((id for id in self._commits() if not self.foreign(id)), default=None)

    def foreign(self, id: StepId) -> bool:
        """Whether this is a step of the other run."""
        if self._ancestor is None:
            return False
        return id in self._ancestor.ids or any(
            one.parent == id for one in self._epochs() if one.origin
        )

    def writes(self, id: StepId) -> bool:
        """Whether an image in memory may go to the drives: only what is surely the run's own. A new
        sidecar finds the other run's step in a slot before it has asked whose that is."""
        if self._ancestor is None:
            return True
        return not self.foreign(id) and any(one.id == id.epoch for one in self._epochs())

    def own(self, held: Iterable[Row]) -> tuple[Row, ...]:
        """Without the other run's steps: what may be reported as this run's."""
        return tuple(one for one in held if not self.foreign(one.step_id))

    def hides(self, id: StepId, *, in_doubt: bool) -> bool:
        """Whether this step must not be offered. `in_doubt`: it could not be seen what is here."""
        return self.foreign(id) and (in_doubt or self.outgrown())

    def refusal(self) -> str:
        """Why nothing can be begun although nothing was found; '' where the run is no fork."""
        if self._ancestor is None:
            return ""
        name = self._ancestor.ancestor
        if (newest := self._newest()) is None:
            named = ", ".join(map(str, sorted(self._ancestor.ids))) or "a step"
            return f"this run shall begin from {named} of run {name}: no sound copy is within reach"
        return (
            f"step {newest} of this run was committed, so it does not begin from run {name} again;"
            " but nothing of it is within reach. Bring its storage back, or give the run another"
            " name to fork anew"
        )

    def named(self, epoch: Epoch) -> Epoch:
        """The epoch with the run that its parent is of, where that is another one."""
        if self._ancestor is None or epoch.parent is None or not self.foreign(epoch.parent):
            return epoch
        return replace(epoch, origin=self._ancestor.ancestor)


# --- epochs of one run -----------------------------------------------------------------------
#
# Each pod's record begins with the epoch in which the pod was new. Whoever meets steps of older
# epochs must still see that they are of the same run, so what is known of the line goes on
# record.


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
