"""Rollback: a person names the step that the next epoch goes on from. Later steps are then dead.

Or the script names it (`restore(step=...)`), each time that it is started. So that step is kept as
long as scripts ask for it: until an epoch begins for which none was asked, or another one.

The wish covers one restart: it is fulfilled once an epoch has begun from that step. The operator
notices this itself, but hears of the new epoch a moment later. For `--restore-from`, the epochs
recorded since the wish decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from keepstep.steps import Epoch, StepId
from keepstep.wire.reports import ReportReply
from keepstep_sidecar.config.restore_from import Wish


class Rollback:
    """The step to go back to, if one was named at the sidecar's start or by the operator.

    `begin_again`: a person asked, through the operator, to begin at step 0 if no step can be
    restored. `gone_for_good`: the operator knows that what no pod can reach cannot come back.
    """

    def __init__(
        self,
        wish: Wish | None,
        recorded: Callable[[], Iterable[Epoch]],
        *,
        asked: StepId | None = None,
    ) -> None:
        """`recorded`: returns the epochs on this machine's record. `asked`: the step that the
        script asked for in the newest of them."""
        self.begin_again = self.gone_for_good = False
        self.asked = asked
        self._wish = wish
        self._recorded = recorded
        self._told: StepId | None = None
        self._began: StepId | None = None

    def hear(self, reply: ReportReply) -> None:
        """Take in the operator's reply, which holds until the next one."""
        self._told = reply.restore_from
        self.begin_again = reply.begin_again
        self.gone_for_good = reply.gone_for_good
        if self._told != self._began:
            self._began = None

    def began(self, epoch: Epoch) -> None:
        """This epoch begins now. The operator will hear of it later."""
        if epoch.parent is not None and epoch.parent == self._told:
            self._began = epoch.parent

    @property
    def wish(self) -> Wish | None:
        """The wish that is not yet fulfilled. None: restore the newest step."""
        if self._told is not None:
            return Wish(id=self._told) if self._told != self._began else None
        return self._wish if self._wish is not None and not self._is_done(self._wish) else None

    def _is_done(self, wish: Wish) -> bool:
        return any(
            one.id.number > wish.since and one.parent is not None and wish.names(one.parent)
            for one in self._recorded()
        )

    def asked_for(self, parent: StepId | None, asked: int | None) -> StepId | None:
        """The step to keep once an epoch goes on from `parent`, where the script asked for the step
        of number `asked`. A person may have named another one: then the script's is kept, too."""
        if asked is None:
            return None
        known = (id for id in (parent, self.asked) if id is not None and id.step == asked)
        return next(known, None)

    def names(self, id: StepId) -> bool:
        """Whether this may be the wanted step, which must not be deleted."""
        if id == self.asked:
            return True
        return (wish := self.wish) is not None and wish.names(id)

    def resolve(self, whole: Iterable[StepId], held: Collection[StepId]) -> StepId | None:
        """The wanted step; of several with its number, the newest. Prefers steps in `whole`."""
        if (wish := self.wish) is None:
            return None
        if wish.id is not None:
            return wish.id
        found = [id for id in whole if wish.names(id)] or [id for id in held if wish.names(id)]
        return max(found, default=None)
