"""`spec.restoreFrom`: a person wants the next life of the run to begin from a certain step.

It is a wish about one restart. It is done with when an epoch began whose parent is that step, which
is written down in the status; what comes later goes on from the newest step again, until somebody
writes something else there.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.steps import Epoch, EpochId, StepId
from keepstep_operator.api.run import RestoreFromStatus
from keepstep_operator.reconcile.state.previous_status import parse_epoch, parse_steps

_WANTED = re.compile(
    r"^(?:([a-z0-9][-a-z0-9]*)/)?(?:([0-9]{1,18})|([0-9]{4,9}\.[0-9a-f]{8}-[0-9]+))$"
)


class Stage(str, enum.Enum):
    """How far it is. `WAITING`: for the restart."""

    NONE = "none"
    UNRESOLVED = "unresolved"
    WAITING = "waiting"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`run`: '' for the run's own steps. Either a number or a full id."""

    run: str = ""
    number: int | None = None
    id: StepId | None = None


def parse_wanted(text: str) -> Wanted | None:
    """None for what the schema should have refused."""
    match = _WANTED.match(text)
    if match is None:
        return None
    ids = list(parse_steps([match[3]])) if match[3] else []
    if match[3] and not ids:
        return None
    return Wanted(
        run=match[1] or "",
        number=int(match[2]) if match[2] else None,
        id=ids[0] if ids else None,
    )


class RestoreRequest:
    """What is wanted, which step that is, and whether it came about."""

    def __init__(self) -> None:
        self.asked = ""
        self.id: StepId | None = None
        self.run = ""
        self.epoch: EpochId | None = None
        self._since = 0
        self._told: set[str] = set()

    def resume(self, status: RestoreFromStatus | None) -> None:
        """What an earlier reconciler wrote down."""
        if status is not None:
            self.asked, self.run = status.asked, status.run
            self.id = next(parse_steps([status.step]), None)
            self.epoch = parse_epoch(status.epoch)
            self._since = status.since

    def ask(self, text: str, *, own: str, newest: EpochId | None) -> None:
        """The field says this now. `own`: the run's name; `newest`: its present epoch."""
        if text == self.asked:
            return
        wanted = parse_wanted(text)
        self.asked, self.id, self.epoch = text, None, None
        self._told.clear()
        self.run = wanted.run if wanted is not None and wanted.run != own else ""
        self._since = newest.number if newest is not None else 0

    def look(self, held: Iterable[StepId], epochs: Iterable[Epoch]) -> bool:
        """Find the step, and see whether a life of the run began from it. True when that is new."""
        if self.stage is Stage.UNRESOLVED:
            self.id = self._resolve(held)
        if self.stage is not Stage.WAITING:
            return False
        began = [one.id for one in epochs if one.parent == self.id and one.id.number > self._since]
        self.epoch = max(began, default=None)
        return self.epoch is not None

    def tell(self, pod: str) -> StepId | None:
        """`wanted`, which the sidecar of this pod hears now."""
        if self.wanted is not None:
            self._told.add(pod)
        return self.wanted

    def is_known_by(self, pods: Iterable[str]) -> bool:
        """Whether the sidecars of all these have heard what is wanted."""
        return self._told.issuperset(pods)

    def _resolve(self, held: Iterable[StepId]) -> StepId | None:
        wanted = parse_wanted(self.asked)
        if wanted is None or self.run:
            return None  # a step of another run: no sidecar can bring it yet
        found = [id for id in held if wanted.id == id or wanted.number == id.step]
        return max(found, default=None)

    @property
    def stage(self) -> Stage:
        """How far it is."""
        if not self.asked:
            return Stage.NONE
        if self.epoch is not None:
            return Stage.DONE
        return Stage.UNRESOLVED if self.id is None else Stage.WAITING

    @property
    def wanted(self) -> StepId | None:
        """The step that the next restart must begin from; None: whatever is newest."""
        return self.id if self.stage is Stage.WAITING else None

    def status(self) -> RestoreFromStatus | None:
        """For CheckpointRun.status."""
        if not self.asked:
            return None
        return RestoreFromStatus(
            asked=self.asked,
            run=self.run,
            step=str(self.id or ""),
            epoch=str(self.epoch or ""),
            since=self._since,
        )
