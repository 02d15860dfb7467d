"""The control page: the last 4096 bytes of an image, which say what it is and that it is complete.

The control page is written last, and zeroed before any other byte of the image changes. So a page
with a valid seal means that every byte before it was in place. In memory, the trainer writes it
without digests. For the drive, the sidecar adds `root` and `sections` and writes the page after the
data was flushed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.errors import FormatError, TornError
from keepstep.image import fields, strictjson
from keepstep.image.fields import quoted, reason
from keepstep.image.layout import FORMAT_VERSION, PAGE_BYTES, Layout, check_version
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import Epoch, EpochId, StepId

_SEAL_BEGIN = PAGE_BYTES - 32
"""Up to here, JSON padded with spaces; then the seal in hex. Both can be read with `tail -c`."""

_ZERO_PAGE = bytes(PAGE_BYTES)


def _seal_of(text: bytes) -> bytes:
    return xxh3_128(text).hex().encode()


@dataclass(frozen=True, kw_only=True)
class ControlPage:
    """What an image is. Times in unix seconds; digests in hex.

    `layout`: the layout's id. `root`: the digest of the digest table. `sections`: a digest for each
    section, see `keepstep.image.manifest.section_digests`. Both are None in an image that was only
    staged.
    """

    run: str
    layout: str
    epoch: Epoch
    rank: int
    world: int
    step: int
    extras_bytes: int
    staged_at: float
    format_version: int = FORMAT_VERSION
    written_at: float | None = None
    root: str | None = None
    sections: Mapping[str, str] | None = None

    @classmethod
    def staged(
        cls,
        layout: Layout,
        *,
        run: str,
        epoch: Epoch,
        step: int,
        extras_bytes: int,
        staged_at: float,
    ) -> ControlPage:
        """The control page of a staged image of this layout, without digests."""
        return cls(
            run=run,
            layout=layout.id,
            epoch=epoch,
            rank=layout.rank,
            world=layout.world,
            step=step,
            extras_bytes=extras_bytes,
            staged_at=staged_at,
        )

    @property
    def id(self) -> StepId:
        """The step, with its epoch."""
        return StepId(self.epoch.id, self.step)

    def to_bytes(self) -> bytes:
        """The whole page. Raises FormatError if the content does not fit (a run's name of
        kilobytes)."""
        parent = self.epoch.parent
        text = json.dumps(
            {
                "format_version": self.format_version,
                "run": self.run,
                "epoch": str(self.epoch.id),
                "parent": None if parent is None else str(parent),
                "step": self.step,
                "rank": self.rank,
                "world": self.world,
                "layout": self.layout,
                "extras_bytes": self.extras_bytes,
                "staged_at": self.staged_at,
                "written_at": self.written_at,
                "root": self.root,
                "sections": None if self.sections is None else dict(self.sections),
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        if len(text) > _SEAL_BEGIN:
            raise FormatError(f"a control page of {len(text)} bytes: the run's name is too long")
        text = text.ljust(_SEAL_BEGIN)
        return text + _seal_of(text)

    @classmethod
    def from_bytes(cls, buffer: bytes | memoryview) -> ControlPage:
        """Inverse of `to_bytes`.

        Raises TornError without a valid seal; VersionError for a newer format; FormatError for a
        page with a valid seal whose content is not of this format.
        """
        page = bytes(buffer[:PAGE_BYTES])
        if page == _ZERO_PAGE:
            raise TornError("no image: the control page is zeroed")
        if page[_SEAL_BEGIN:] != _seal_of(page[:_SEAL_BEGIN]):
            raise TornError("no valid seal: the image was never completed")
        tree = strictjson.loads(page[:_SEAL_BEGIN], what="control page")
        if not isinstance(tree, dict):
            raise FormatError("control page: not a JSON object")
        check_version(tree.get("format_version"))
        try:
            return _from_tree(tree)
        except FormatError as error:
            raise FormatError(f"control page: {error.reason}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"control page: {reason(error)}") from None


def _from_tree(tree: dict[str, Any]) -> ControlPage:
    parent, sections, written_at = tree["parent"], tree["sections"], tree["written_at"]
    world = _count(tree, "world")
    rank = _count(tree, "rank")
    if rank >= world:
        raise ValueError(f"rank {rank} of {world}")
    epoch = EpochId.parse(fields.text(tree["epoch"], "epoch"))
    return ControlPage(
        run=_run(tree["run"]),
        layout=fields.digest(tree["layout"], "layout"),
        epoch=Epoch(
            epoch,
            None if parent is None else StepId.parse(fields.text(parent, "parent")),
        ),
        rank=rank,
        world=world,
        step=StepId(epoch, _count(tree, "step")).step,
        extras_bytes=_count(tree, "extras_bytes"),
        staged_at=fields.time(tree["staged_at"], "staged_at"),
        format_version=_count(tree, "format_version"),
        written_at=None if written_at is None else fields.time(written_at, "written_at"),
        root=None if tree["root"] is None else fields.digest(tree["root"], "root"),
        sections=None
        if sections is None
        else {name: fields.digest(one, name) for name, one in dict.items(sections)},
    )


def _run(value: object) -> str:
    """The run's name, checked because it becomes the name of a directory and is printed."""
    text = fields.text(value, "run")
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise ValueError(f"{quoted(value)} is not the name of a run")
    return text


def _count(tree: dict[str, Any], key: str) -> int:
    return fields.integer(tree[key], key, 0, fields.MAX_BYTES)
