"""DCP's `Metadata` of a step, rebuilt from the headers of its images, and where each box lies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from keepstep.errors import CoverageError, FormatError, UsageError
from keepstep.image import fields, strictjson
from keepstep.restore.boxes import Box, cover
from keepstep.state.dtypes import DTYPE_OF
from keepstep.steps import StepId, shard_name

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A box at rest: bytes `[begin, end)` of the image of the saved rank `rank`. `dtype` in
    safetensors' spelling."""

    rank: int
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the image of one saved rank holds; `boxes` under the names of its entries."""

    rank: int
    tree: Tree
    boxes: Iterable[tuple[str, Stored]]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a step holds. `where`: for messages. `boxes`: per tensor, by offsets; equal boxes of
    several ranks count once. `values`: in whose image each value that is no tensor is."""

    where: str
    id: StepId
    world: int
    boxes: dict[str, dict[tuple[int, ...], Stored]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    foreign: bool = False
    """Whether a `Checkpointer` saved it: there are no values then that DCP could load."""

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        *,
        where: str,
        id: StepId,
        world: int,
        aliases: Mapping[str, str],
        problems: Sequence[str] = (),
    ) -> Contents:
        """Join the parts; of equal boxes the first part's counts, of values the lowest rank's.

        Raises CoverageError for boxes that are missing, overlap, or contradict each other, with all
        names and files; `problems`: what of that is known already.
        """
        trees = [one.tree for one in sorted(parts, key=lambda one: one.rank)]
        foreign = all(one.foreign for one in trees)
        contents = cls(where=where, id=id, world=world, paths=_paths(trees), foreign=foreign)
        found = list(problems)
        for part in parts:
            found += contents._add(part)
        for alias, name in aliases.items():
            contents.boxes.setdefault(alias, contents.boxes.get(name, {}))
        found += contents._uncovered()
        contents._raise(found)
        return contents

    def _raise(self, problems: Sequence[str]) -> None:
        if not problems:
            return
        more = f"\n  ... and {len(problems) - _SHOWN} more" if problems[_SHOWN:] else ""
        raise CoverageError(
            f"{self.where}: the shards of step {self.id} do not make up its tensors:\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
            + "\nUse another copy of this step, or load another step."
        )

    def _add(self, part: Part) -> Iterator[str]:
        for entry_name, stored in part.boxes:
            name = part.tree.boxes.get(entry_name, entry_name)
            held = self.boxes.setdefault(name, {})
            first = next(iter(held.values()), stored)
            if (first.dtype, first.global_shape) != (stored.dtype, stored.global_shape):
                yield f"{name}: {self._said(first)}, but {self._said(stored)}"
                continue
            other = held.setdefault(stored.offsets, stored)
            if 0 in other.shape:  # ranks without a part of it begin where the next does
                held[stored.offsets] = stored
            elif 0 not in stored.shape and other.shape != stored.shape:
                yield f"{name}: {self._said(other)} and {self._said(stored)} overlap"
        for name in part.tree.values:
            self.values[name] = min(part.rank, self.values.get(name, part.rank))

    def _uncovered(self) -> Iterator[str]:
        for name, held in self.boxes.items():
            first = next(iter(held.values()), None)
            if first is not None:
                yield from _gaps(name, first, held)

    def _said(self, one: Stored) -> str:
        return (
            f"{one.dtype}{list(one.shape)} at {list(one.offsets)} of {list(one.global_shape)}"
            f" in {shard_name(one.rank, self.world)}"
        )

    def metadata(self) -> Metadata:
        """For DCP's planners."""
        held: dict[str, STORAGE_TYPES] = {
            name: _tensor_metadata(list(boxes.values())) for name, boxes in self.boxes.items()
        }
        held |= {name: BytesStorageMetadata() for name in self.values}
        return Metadata(
            state_dict_metadata=held,
            planner_data=self.paths,
            storage_meta=StorageMeta(checkpoint_id=self.where),
        )

    def stored(self, index: MetadataIndex) -> Stored:
        """The box that a read item means. Raises FormatError."""
        box = self.boxes.get(index.fqn, {}).get(tuple(index.offset or ()))
        if box is None:
            raise FormatError(f"no box of {index.fqn} at {index.offset}", path=self.where)
        return box

    def holder(self, item: ReadItem) -> int:
        """The saved rank whose image holds what a read item means. Raises FormatError."""
        index = item.storage_index
        if item.type is not LoadItemType.BYTE_IO:
            return self.stored(index).rank
        if index.fqn not in self.values:
            raise FormatError(f"no value {index.fqn}", path=self.where)
        return self.values[index.fqn]


def dtype_of(stored: Stored, where: object) -> torch.dtype:
    """Raises FormatError for one that this torch lacks."""
    dtype: torch.dtype | None = DTYPE_OF.get(stored.dtype)
    if dtype is None:
        raise FormatError(f"{where}: this torch has no dtype for {stored.dtype}")
    return dtype


def _paths(trees: Sequence[Tree]) -> dict[str, tuple[str | int, ...]] | None:
    """As DefaultSavePlanner merges the mappings of all ranks: the first rank's counts."""
    given = [tree.paths for tree in trees if tree.paths is not None]
    if not given:
        return None
    merged: dict[str, tuple[str | int, ...]] = {}
    for paths in reversed(given):
        merged |= paths
    return merged


def _tensor_metadata(boxes: list[Stored]) -> TensorStorageMetadata:
    dtype: Any = DTYPE_OF.get(boxes[0].dtype, torch.uint8)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(boxes[0].global_shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(one.offsets), sizes=torch.Size(one.shape))
            for one in boxes
        ],
    )


def _gaps(name: str, first: Stored, held: dict[tuple[int, ...], Stored]) -> Iterator[str]:
    whole = Box((0,) * len(first.global_shape), first.global_shape)
    boxes = [one for one in held.values() if 0 not in one.shape]
    if whole.empty or (len(boxes) == 1 and boxes[0].shape == whole.sizes):
        return
    dims = len(whole.sizes)
    lows = torch.tensor([one.offsets for one in boxes], dtype=torch.int64).view(-1, dims)
    sizes = torch.tensor([one.shape for one in boxes], dtype=torch.int64)
    found = cover(lows, lows + sizes.view(-1, dims), whole)
    if found is None:
        yield f"{name}: cut so irregularly that nobody can tell whether all of it is there"
        return
    for box in found.gaps():
        yield f"{name}: nobody holds {list(box.sizes)} at {list(box.offsets)}"
    for box in found.overlaps():
        yield f"{name}: held twice: {list(box.sizes)} at {list(box.offsets)}"


# --- the skeleton of an image ----------------------------------------------------------------
#
# What an image of a `dcp.save` says besides its tensors: the header's skeleton.
#
# DCP's `Metadata` is rebuilt from the headers alone. Boxes, shapes and dtypes stand there anyway;
# the skeleton adds the names of the values that are no tensors (their bytes are in the extras),
# which entries are boxes of one tensor (`name@0`, `name@1`), and the planner's mapping from flat
# names to paths. All of it is constant while the keys of the state dict are.


_MARK = "dcp"

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Tree:
    """`values`: names of what is no tensor. `boxes`: the tensor's name of each entry that has
    another one. `paths`: where each flat name stands in the nested state dict, None if the planner
    did not flatten it. `foreign`: a `Checkpointer` made the image; its tree is another one."""

    values: tuple[str, ...] = ()
    boxes: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] | None = None
    foreign: bool = False

    def render(self) -> str:
        """For the header. Raises UsageError for a path that JSON would change."""
        if self.paths is not None:
            _check_paths(self.paths)
        tree = {
            _MARK: 1,
            "values": list(self.values),
            "boxes": dict(self.boxes),
            "paths": None if self.paths is None else {k: list(p) for k, p in self.paths.items()},
        }
        return json.dumps(tree, separators=(",", ":"))

    @classmethod
    def parse(cls, skeleton: str) -> Tree:
        """Inverse of `render`; empty and `foreign` for an image of a `Checkpointer`.

        Raises FormatError.
        """
        try:
            tree = strictjson.loads(skeleton, what="the tree of this image") if skeleton else None
            if not isinstance(tree, dict) or _MARK not in tree:
                return cls(foreign=True)
            paths = tree["paths"]
            return cls(
                values=tuple(map(_text, tree["values"])),
                boxes={_text(k): _text(v) for k, v in tree["boxes"].items()},
                paths=None if paths is None else {k: _path(p) for k, p in paths.items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"the tree of this image makes no sense ({error})") from error


def paths_of(planner_data: Any) -> Mapping[str, Path] | None:
    """The mapping that the stock planner leaves in a plan, None for none.

    Raises UsageError for the data of another planner: it could only be pickled.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise UsageError(
            f"the planner's data is a {type(planner_data).__name__}, which keepstep does not keep:"
            " only the mapping of names to paths that DefaultSavePlanner makes"
        )
    return planner_data


def _check_paths(paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        if type(name) is not str or any(type(one) not in (str, int) for one in path):
            raise UsageError(f"the planner maps {name!r} to {path!r}: only strings and numbers can")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{fields.quoted(value)} is not a string")
    return value


def _path(value: object) -> Path:
    if not isinstance(value, list) or any(type(one) not in (str, int) for one in value):
        raise TypeError(f"{fields.quoted(value)} is not a path")
    return tuple(value)
