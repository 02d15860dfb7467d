"""Which of the two ways to save made an image: `Checkpointer`, or `keepstep.dcp`.

Both make the same images, of other names and trees. The header's skeleton tells them apart: a list
of a `Checkpointer`, an object of a `dcp.save` (docs/format.md).
"""

from __future__ import annotations

from keepstep.errors import MismatchError
from keepstep.steps import StepId

_DCP = '{"dcp"'


def refuse_dcp(skeleton: str, id: StepId) -> None:
    """Raises MismatchError for an image that a `Checkpointer` cannot restore."""
    if skeleton.startswith(_DCP):
        raise MismatchError(
            f"step {id} was saved by dcp.save (keepstep.dcp.StorageWriter), which keepstep."
            "Checkpointer cannot restore; nothing was changed. Load it with dcp.load and"
            " keepstep.dcp.StorageReader(), or start a new run (keepstep run --run NAME)"
        )
