"""Which epochs belong to this run, and which run a fork comes from.

A fork's step of the other run takes the place of step 0 and is held to the same rule: it is a
candidate only when every tier has answered that this run has no commit of its own. The run's own
steps are always newer. So once this run has a commit, the other run's steps are no longer asked
for, offered or reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from keepstep.core.shard import ShardFacts
from keepstep.steps import Epoch, StepId, Tier
from keepstep_sidecar.commit.inventory import RemoteInventory
from keepstep_sidecar.volume.volume_set import VolumeSet

Row = TypeVar("Row", bound=ShardFacts)


class Epochs:
    """The epochs of one run. `current`: the one in which a live trainer works, None while unknown.
    What concerns another run does nothing when the run is not a fork."""

    def __init__(
        self,
        remotes: RemoteInventory,
        volumes: VolumeSet,
        *,
        commits: Callable[[], Iterable[StepId]],
        known: Callable[[], Iterable[Epoch]],
    ) -> None:
        """`commits`: returns every step that is known to be committed and may be restored.
        `known`: returns every epoch that anything within reach names."""
        self.current: Epoch | None = None
        self._remotes = remotes
        self._ancestor = remotes.ancestor
        self._volumes = volumes
        self._commits = commits
        self._known = known

    def own(self, *begun: Epoch) -> tuple[Epoch, ...]:
        """All epochs that are certainly this run's own: those recorded here, told by the run's
        other pods, or in `begun`. Includes their ancestors, whichever source knows them."""
        own = (*self._remotes.told_by(Tier.PEER), *self._volumes.epochs(), *begun)
        return line(own, self._known())

    def unrecorded(self, epoch: Epoch) -> tuple[Epoch, ...]:
        """All epochs to be recorded before this one begins; none if the volumes have them.

        What the ledger knows does not count: other pods told of epochs that lie only in memory.
        """
        own = self.own(epoch)
        return () if set(own) <= set(self._volumes.epochs()) else own

    def see(self, epoch: Epoch) -> None:
        """A live trainer works in this epoch (it restored before this sidecar started)."""
        if self.current is None or self.current.id < epoch.id:
            self.current = epoch

    def outgrown(self) -> bool:
        """Whether the run has a commit of its own."""
        return self._newest() is not None

    def _newest(self) -> StepId | None:
        return max((id for id in self._commits() if not self.foreign(id)), default=None)

    def foreign(self, id: StepId) -> bool:
        """Whether this step belongs to the other run."""
        if self._ancestor is None:
            return False
        return id in self._ancestor.ids or any(one.parent == id for one in self.own() if one.origin)

    def writes(self, id: StepId) -> bool:
        """Whether an image in memory may be written to the drives. It must certainly belong to this
        run: a new sidecar may find the other run's step in a slot before it knows whose it is."""
        if self._ancestor is None:
            return True
        return not self.foreign(id) and any(one.id == id.epoch for one in self.own())

    def without_foreign(self, held: Iterable[Row]) -> tuple[Row, ...]:
        """`held` without the other run's steps: what may be reported as this run's own."""
        return tuple(one for one in held if not self.foreign(one.step_id))

    def hides(self, id: StepId, *, in_doubt: bool) -> bool:
        """Whether this step must not be offered. `in_doubt`: what this run has is not certain."""
        return self.foreign(id) and (in_doubt or self.outgrown())

    def refusal(self) -> str:
        """Why the run cannot begin although no step was found; '' when the run is not a fork."""
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
        """`epoch`, with the other run as its origin if its parent belongs to that run."""
        if self._ancestor is None or epoch.parent is None or not self.foreign(epoch.parent):
            return epoch
        return replace(epoch, origin=self._ancestor.ancestor)


# --- epochs of one run -----------------------------------------------------------------------
#
# The record of a pod begins with the epoch in which the pod was new. A pod that meets steps of
# older epochs must still recognize them as steps of the same run. So whatever is known of the
# line goes on record.


def line(own: Iterable[Epoch], known: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """The epochs `own` and their ancestors, as far as `known` contains them; oldest first. The line
    of a fork ends where it left the other run."""
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
