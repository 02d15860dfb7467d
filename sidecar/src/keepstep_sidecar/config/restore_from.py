"""`--restore-from`: the step that a person wants the next epoch to go on from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keepstep.errors import UsageError
from keepstep.steps import StepId

_NUMBER = re.compile(r"^[0-9]{1,18}$")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A step's `number` or its full `id`. `since`: the newest epoch when this was asked for."""

    number: int | None = None
    id: StepId | None = None
    since: int = 0

    def names(self, id: StepId) -> bool:
        return id == self.id if self.id is not None else id.step == self.number

    def __str__(self) -> str:
        return str(self.number if self.id is None else self.id)


def parse(text: str, *, since: int = 0) -> Wish:
    """Raises UsageError for what names no step."""
    if _NUMBER.match(text):
        return Wish(number=int(text), since=since)
    try:
        return Wish(id=StepId.parse(text), since=since)
    except ValueError as error:
        raise UsageError(
            f"--restore-from {text}: give a step's number or its id, as `keepstep steps` shows them"
        ) from error
