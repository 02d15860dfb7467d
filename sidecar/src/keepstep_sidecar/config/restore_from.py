"""The step from which a run goes on at a person's request: `--restore-from`.

`STEP` of this run is a wish for one restart: it is fulfilled once an epoch has begun there.
`RUN/STEP` in another run's archive is a fork: this run's very first start. It needs no record of
whether it has happened, because a run with steps of its own goes on from these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from keepstep.errors import UsageError
from keepstep.steps import Epoch, StepId

NEWEST = "latest"

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A step's `number` or its full `id`. `since`: the newest epoch when the wish was made."""

    number: int | None = None
    id: StepId | None = None
    since: int = 0

    def names(self, id: StepId) -> bool:
        return id == self.id if self.id is not None else id.step == self.number

    def __str__(self) -> str:
        return str(self.number if self.id is None else self.id)


@dataclass(frozen=True, kw_only=True)
class Fork:
    """`run`: the other run. The step is given by `number` or by full `id`; without both it is the
    newest step there."""

    run: str
    number: int | None = None
    id: StepId | None = None

    def chosen(
        self, archived: Iterable[StepId], alive: Collection[StepId], epochs: Iterable[Epoch]
    ) -> list[StepId]:
        """Which of the other run's archived steps may be the chosen one. `alive`: steps that no
        later life of that run left behind; any other step must be named by its full id. `epochs`:
        of this run. An epoch that began from the other run says which step it was.
        """
        began = {one.parent for one in epochs if one.origin == self.run}
        meant = [id for id in archived if self._means(id, alive)]
        if self.number is not None:
            meant = [max(meant)] if meant else []
        return [id for id in meant if id in began] if began else meant

    def _means(self, id: StepId, alive: Collection[StepId]) -> bool:
        if self.id is not None:
            return id == self.id
        return id in alive and self.number in (None, id.step)

    def __str__(self) -> str:
        named = self.id if self.id is not None else self.number
        return f"{self.run}/{NEWEST if named is None else named}"


def parse(text: str, *, since: int = 0) -> Wish | Fork:
    """`STEP`: a number or an id. `RUN/STEP`: also `latest`. Raises UsageError for all else."""
    if "/" in text:
        return _fork(text)
    try:
        number, id = _step(text)
    except ValueError as error:
        raise UsageError(
            f"--restore-from {text}: give a step's number or its id, as `keepstep steps` shows them"
        ) from error
    return Wish(number=number, id=id, since=since)


def _step(text: str) -> tuple[int | None, StepId | None]:
    return (int(text), None) if _NUMBER.fullmatch(text) else (None, StepId.parse(text))


def _fork(text: str) -> Fork:
    run, _, step = text.partition("/")
    if "/" in step:
        raise UsageError(
            f"--restore-from {text}: a run of another namespace is out of reach, as each has an"
            " archive of its own; give RUN/STEP"
        )
    if run == ".":
        raise UsageError(
            f"--restore-from {step}: RUN/STEP of another run is what a new run begins from; to go"
            " back to a step of this one, set spec.restoreFrom of its CheckpointRun"
        )
    if not _RUN.fullmatch(run):
        raise UsageError(f"--restore-from {text}: {run!r} cannot name a run")
    try:
        number, id = (None, None) if step == NEWEST else _step(step)
    except ValueError as error:
        raise UsageError(
            f"--restore-from {text}: give RUN/STEP, where STEP is a number, an id as `keepstep"
            f" archive ls` shows them, or {NEWEST}"
        ) from error
    return Fork(run=run, number=number, id=id)
