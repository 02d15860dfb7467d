"""Going back: a person wants the next epoch to go on from a certain step, and later ones dead.

The wish is about one restart, and done with once an epoch began from that step. The operator knows
that by itself, but hears of it a moment later; for `--restore-from` it is what is on record since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from keepstep.steps import Epoch, StepId
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.config.restore_from import Wish


class Rollback:
    """What this sidecar was told to go back to, at its start or by the operator."""

    def __init__(self, wish: Wish | None, recorded: Callable[[], Iterable[Epoch]]) -> None:
        """`recorded`: the epochs on this machine's record."""
        self.run = ""
        self._wish = wish
        self._recorded = recorded
        self._told: StepId | None = None
        self._began: StepId | None = None

    def hear(self, reply: ReportReply) -> None:
        """The operator's word, for as long as it holds."""
        self._told, self.run = reply.restore_from, reply.restore_run
        if self._told != self._began:
            self._began = None

    def began(self, epoch: Epoch) -> None:
        """This epoch begins now; the operator will hear of it."""
        if epoch.parent is not None and epoch.parent == self._told:
            self._began = epoch.parent

    @property
    def wish(self) -> Wish | None:
        """What is still wanted; None: whatever is newest."""
        if self._told is not None:
            return Wish(id=self._told) if self._told != self._began else None
        return self._wish if self._wish is not None and not self._is_done(self._wish) else None

    def _is_done(self, wish: Wish) -> bool:
        return any(
            one.id.number > wish.since and one.parent is not None and wish.names(one.parent)
            for one in self._recorded()
        )

    def names(self, id: StepId) -> bool:
        """Whether this may be the step that is wanted: it stays."""
        return (wish := self.wish) is not None and not self.run and wish.names(id)

    def resolve(self, whole: Iterable[StepId], held: Collection[StepId]) -> StepId | None:
        """The step that is wanted, the newest one of that number; `whole` ones are preferred."""
        if (wish := self.wish) is None:
            return None
        if wish.id is not None:
            return wish.id
        found = [id for id in whole if wish.names(id)] or [id for id in held if wish.names(id)]
        return max(found, default=None)
