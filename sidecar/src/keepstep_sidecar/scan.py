"""What a volume holds, as told by the shards themselves: header and control page of each.

Read-only: no lock, nothing is moved or repaired (`Volume.scan` does that with what it is told
here), so that `keepstep steps` can look at a volume beside a live sidecar or without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import ImageError
from keepstep.image import Layout
from keepstep.steps import StepId


@dataclass(frozen=True, kw_only=True)
class Found:
    """A sealed shard. `layout` is the parsed header; `root` and `params_digest` are hex.

    `params_digest` is None when the image has no parameters. `published`: the step's directory is
    visible to readers, because the step was committed.
    """

    path: Path
    id: StepId
    rank: int
    world: int
    run: str
    bytes: int
    layout: Layout
    root: str
    params_digest: str | None
    published: bool


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A file that is no shard of this run, and why. `moved_to`: where quarantine keeps it.

    A `VersionError` leaves the file where it is: a newer keepstep will read it.
    """

    path: Path
    error: ImageError
    moved_to: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Everything on a volume, in the order of steps and ranks."""

    shards: tuple[Found, ...] = ()
    problems: tuple[Refused, ...] = ()


def survey(root: Path, *, run: str) -> Scan:
    """Look at every shard below `root` (`<dir>/<run>`); a missing root is an empty scan."""
    raise NotImplementedError
