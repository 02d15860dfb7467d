"""Which step a checkpoint id means."""

from __future__ import annotations

import os
import re

from keepstep.errors import UsageError

_STEP = re.compile(r"^(?:.*[^0-9])?([0-9]{1,18})$")


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The number that an id is or ends with: `1200`, `"1200"`, `"out/step-1200/"`.

    Raises UsageError for an id without one.
    """
    text = ""
    if isinstance(checkpoint_id, str | os.PathLike):
        text = os.path.basename(os.fspath(checkpoint_id).rstrip("/"))
    elif isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        text = str(checkpoint_id)
    if not (match := _STEP.match(text)):
        raise UsageError(
            f"no step in the checkpoint id {checkpoint_id!r}: let it end with the step's number,"
            ' such as "step-1200", or give the step: StorageWriter(step=1200)'
        )
    return int(match[1])


def names_step(checkpoint_id: object) -> bool:
    """Whether `step_of` finds one."""
    try:
        step_of(checkpoint_id)  # type: ignore[arg-type]
    except UsageError:
        return False
    return True
