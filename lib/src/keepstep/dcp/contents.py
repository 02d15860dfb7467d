"""DCP's `Metadata` of a step, rebuilt from the headers of its shards, and where each box lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from keepstep.dcp.folder import Folder, Shard
from keepstep.dtypes import DTYPE_OF
from keepstep.errors import CoverageError, FormatError
from keepstep.image import Entry
from keepstep.resharding.boxes import Box, cover

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A box at rest: the entry of a shard."""

    shard: Shard
    entry: Entry

    @property
    def offsets(self) -> tuple[int, ...]:
        spec = self.entry.spec
        return spec.offsets or (0,) * len(spec.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        spec = self.entry.spec
        return spec.shape if spec.global_shape is None else spec.global_shape


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a step holds. `boxes`: per tensor, by offsets; equal boxes of several ranks count
    once. `values`: in which shard each value that is no tensor is."""

    folder: Folder
    boxes: dict[str, dict[tuple[int, ...], Stored]] = field(default_factory=dict)
    values: dict[str, Shard] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] | None = None

    @classmethod
    def of(cls, folder: Folder) -> Contents:
        """Join the headers. Raises CoverageError for boxes that are missing, overlap, or contradict
        each other, with all names and files."""
        contents = cls(folder=folder, paths=_paths(folder))
        problems: list[str] = []
        for shard in folder.shards:
            problems += contents._add(shard)
        problems += contents._uncovered()
        if problems:
            more = f"\n  ... and {len(problems) - _SHOWN} more" if problems[_SHOWN:] else ""
            raise CoverageError(
                f"{folder.path}: the shards of step {folder.id} do not make up its tensors:\n  "
                + "\n  ".join(problems[:_SHOWN])
                + more
                + "\nUse another copy of this step, or load another step."
            )
        return contents

    def _add(self, shard: Shard) -> Iterator[str]:
        for entry_name, entry in shard.layout.entries.items():
            stored = Stored(shard, entry)
            name = shard.tree.boxes.get(entry_name, entry_name)
            held = self.boxes.setdefault(name, {})
            first = next(iter(held.values()), stored)
            if (first.entry.spec.dtype, first.global_shape) != (
                entry.spec.dtype,
                stored.global_shape,
            ):
                yield f"{name}: {_said(first)}, but {_said(stored)}"
                continue
            other = held.setdefault(stored.offsets, stored)
            if 0 in other.entry.spec.shape:  # ranks without a part of it begin where the next does
                held[stored.offsets] = stored
            elif 0 not in entry.spec.shape and other.entry.spec.shape != entry.spec.shape:
                yield f"{name}: {_said(other)} and {_said(stored)} overlap"
        for alias, name in shard.layout.aliases.items():
            self.boxes.setdefault(alias, self.boxes.get(name, {}))
        for name in shard.tree.values:
            self.values.setdefault(name, shard)

    def _uncovered(self) -> Iterator[str]:
        for name, held in self.boxes.items():
            first = next(iter(held.values()), None)
            if first is not None:
                yield from _gaps(name, first, held)

    def metadata(self) -> Metadata:
        """For DCP's planners."""
        held: dict[str, STORAGE_TYPES] = {
            name: _tensor_metadata(list(boxes.values())) for name, boxes in self.boxes.items()
        }
        held |= {name: BytesStorageMetadata() for name in self.values}
        return Metadata(state_dict_metadata=held, planner_data=self.paths)

    def stored(self, index: MetadataIndex) -> Stored:
        """The box that a read item means. Raises FormatError."""
        box = self.boxes.get(index.fqn, {}).get(tuple(index.offset or ()))
        if box is None:
            raise FormatError(f"no box of {index.fqn} at {index.offset}", path=self.folder.path)
        return box


def _paths(folder: Folder) -> dict[str, tuple[str | int, ...]] | None:
    """As DefaultSavePlanner merges the mappings of all ranks: the first rank's counts."""
    given = [shard.tree.paths for shard in folder.shards if shard.tree.paths is not None]
    if not given:
        return None
    merged: dict[str, tuple[str | int, ...]] = {}
    for paths in reversed(given):
        merged |= paths
    return merged


def _tensor_metadata(boxes: list[Stored]) -> TensorStorageMetadata:
    spec = boxes[0].entry.spec
    dtype: Any = DTYPE_OF.get(spec.dtype, torch.uint8)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(boxes[0].global_shape),
        chunks=[
            ChunkStorageMetadata(
                offsets=torch.Size(one.offsets), sizes=torch.Size(one.entry.spec.shape)
            )
            for one in boxes
        ],
    )


def _gaps(name: str, first: Stored, held: dict[tuple[int, ...], Stored]) -> Iterator[str]:
    whole = Box((0,) * len(first.global_shape), first.global_shape)
    boxes = [one for one in held.values() if 0 not in one.entry.spec.shape]
    if whole.empty or (len(boxes) == 1 and boxes[0].entry.spec.shape == whole.sizes):
        return
    dims = len(whole.sizes)
    lows = torch.tensor([one.offsets for one in boxes], dtype=torch.int64).view(-1, dims)
    sizes = torch.tensor([one.entry.spec.shape for one in boxes], dtype=torch.int64)
    found = cover(lows, lows + sizes.view(-1, dims), whole)
    if found is None:
        yield f"{name}: cut so irregularly that nobody can tell whether all of it is there"
        return
    for box in found.gaps():
        yield f"{name}: nobody holds {list(box.sizes)} at {list(box.offsets)}"
    for box in found.overlaps():
        yield f"{name}: held twice: {list(box.sizes)} at {list(box.offsets)}"


def _said(one: Stored) -> str:
    spec = one.entry.spec
    return (
        f"{spec.dtype}{list(spec.shape)} at {list(one.offsets)} of {list(one.global_shape)}"
        f" in {one.shard.path.name}"
    )
