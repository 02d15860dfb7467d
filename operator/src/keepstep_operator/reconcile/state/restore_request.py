"""`spec.restoreFrom`: a person wants the next epoch of the run to begin from a certain step.

The request is for one restart. It is done once an epoch has begun whose parent is that step; the
status records this. Later epochs go on from the newest step again, until the field gets another
value.
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
    """How far the request is. `UNRESOLVED`: the step is not found. `WAITING`: for the restart."""

    NONE = "none"
    UNRESOLVED = "unresolved"
    WAITING = "waiting"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A parsed request: either the `number` of a step or its full `id`. `run`: the run that the
    step belongs to; '' for this run."""

    run: str = ""
    number: int | None = None
    id: StepId | None = None


def parse_wanted(text: str) -> Wanted | None:
    """Parse the field; None if the schema should have refused it."""
    match = _WANTED.fullmatch(text)
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
    """The request, the step that it means, and whether it is done."""

    def __init__(self) -> None:
        self.asked = ""
        self.id: StepId | None = None
        self.run = ""
        self.epoch: EpochId | None = None
        self._since = 0
        self._told: set[str] = set()

    def resume(self, status: RestoreFromStatus | None) -> None:
        """Go on from what an earlier reconciler wrote down."""
        if status is not None:
            self.asked, self.run = status.asked, status.run
            self.id = next(parse_steps([status.step]), None)
            self.epoch = parse_epoch(status.epoch)
            self._since = status.since

    def ask(self, text: str, *, own: str, newest: EpochId | None) -> None:
        """The present value of the field. `own`: the run's name. `newest`: its present epoch."""
        if text == self.asked:
            return
        wanted = parse_wanted(text)
        self.asked, self.id, self.epoch = text, None, None
        self._told.clear()
        self.run = wanted.run if wanted is not None and wanted.run != own else ""
        self._since = newest.number if newest is not None else 0

    def look(self, held: Iterable[StepId], epochs: Iterable[Epoch]) -> bool:
        """Find the step, and whether an epoch began from it. Returns True when such an epoch is
        new.

        `held`: the committed steps.
        """
        if self.stage is Stage.UNRESOLVED:
            self.id = self._resolve(held)
        if self.stage is not Stage.WAITING:
            return False
        began = [one.id for one in epochs if one.parent == self.id and one.id.number > self._since]
        self.epoch = max(began, default=None)
        return self.epoch is not None

    def tell(self, pod: str) -> StepId | None:
        """Returns `wanted`, and notes that the sidecar of this pod now knows it."""
        if self.wanted is not None:
            self._told.add(pod)
        return self.wanted

    def is_known_by(self, pods: Iterable[str]) -> bool:
        """Whether the sidecars of all these pods know what is wanted."""
        return self._told.issuperset(pods)

    def _resolve(self, held: Iterable[StepId]) -> StepId | None:
        wanted = parse_wanted(self.asked)
        if wanted is None or self.run:
            return None  # no sidecar can bring a step of another run yet
        found = [id for id in held if wanted.id == id or wanted.number == id.step]
        return max(found, default=None)

    @property
    def stage(self) -> Stage:
        """How far the request is."""
        if not self.asked:
            return Stage.NONE
        if self.epoch is not None:
            return Stage.DONE
        return Stage.UNRESOLVED if self.id is None else Stage.WAITING

    @property
    def wanted(self) -> StepId | None:
        """The step that the next restart must begin from; None: the newest."""
        return self.id if self.stage is Stage.WAITING else None

    def status(self) -> RestoreFromStatus | None:
        """The request as CheckpointRun.status shows it; None: there is none."""
        if not self.asked:
            return None
        return RestoreFromStatus(
            asked=self.asked,
            run=self.run,
            step=str(self.id or ""),
            epoch=str(self.epoch or ""),
            since=self._since,
        )
