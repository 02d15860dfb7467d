"""What an image of a `dcp.save` holds besides its tensors, and DCP's `Metadata` of a step.

DCP's `Metadata` is rebuilt from the headers alone, which contain boxes, shapes and dtypes anyway.
The skeleton adds three things: the names of the values that are not tensors (their bytes are in the
extras), which entries are boxes of one tensor (`name@0`, `name@1`), and the planner's mapping from
flat names to paths. All of it stays the same as long as the keys of the state dict do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from keepstep.restore import plan
from keepstep.restore.boxes import Box, Index, Saved
from keepstep.restore.images import StepImages
from keepstep.restore.plan import Piece, Want
from keepstep.state.dtypes import DTYPE_OF

_MARK = "dcp"

Path = tuple[str | int, ...]


class Contents:
    """Everything that a step holds. `where`: for messages. `foreign`: a `Checkpointer` saved the
    step, so it has no values that DCP could load.
    """

    def __init__(self, images: StepImages, *, where: str, rank: int) -> None:
        """Choose the boxes to read.

        Of equal boxes, those of the nearest image are taken. Among equally near ones, each rank
        begins its search at another rank, so that the load is spread. Raises FormatError, and
        CoverageError, which names all boxes that are missing, overlap, or contradict each other.
        """
        self.where = where
        self._index: Index = images.index
        ranks = (one for one in range(self._index.world) if one not in self._index.absent)
        trees = {one: Tree.parse(images.skeleton(one)) for one in ranks}
        self.foreign = all(tree.foreign for tree in trees.values())
        self._paths = _merged_paths(trees.values())
        self._values: dict[str, int] = {}
        for holder, tree in trees.items():
            for name in tree.values:
                self._values.setdefault(name, holder)
        self._boxes = self._chosen(rank, images.nearness)

    def _chosen(self, rank: int, nearness: list[int]) -> dict[str, dict[Path, Piece]]:
        """For each tensor, the saved boxes that make it up, by their offsets."""
        named = {one: self._index.find(one) for one in (*self._index.tensors, *self._index.aliases)}
        saved = {name: one for name, one in named.items() if one is not None}
        wants = [Want(name, _whole(one)) for name, one in saved.items()]
        try:
            made = plan.make(wants, self._index, rank=rank, nearness=nearness)
        except CoverageError as error:
            raise CoverageError(
                f"{self.where}: {error}\nUse another copy of this step, or load another step."
            ) from error
        boxes: dict[str, dict[Path, Piece]] = {name: {} for name in saved}
        for piece in made.pieces():
            boxes[wants[piece.want].name][piece.at] = piece
        for name, one in saved.items():
            if not boxes[name]:  # no elements: any of its boxes is the whole tensor
                holder, begin = one.rows[0, :2].tolist()
                at, sizes = _whole(one).offsets, one.shape
                boxes[name][at] = Piece(holder, begin, 0, sizes, at, sizes, at)
        return boxes

    def metadata(self) -> Metadata:
        """The `Metadata` for DCP's planners."""
        held: dict[str, STORAGE_TYPES] = {
            name: self._tensor_metadata(name, sorted(boxes)) for name, boxes in self._boxes.items()
        }
        held |= {name: BytesStorageMetadata() for name in self._values}
        return Metadata(
            state_dict_metadata=held,
            planner_data=self._paths,
            storage_meta=StorageMeta(checkpoint_id=self.where),
        )

    def _tensor_metadata(self, name: str, places: list[Path]) -> TensorStorageMetadata:
        saved, boxes = self._saved(name), self._boxes[name]
        dtype: Any = DTYPE_OF.get(saved.dtype, torch.uint8)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(saved.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(one), torch.Size(boxes[one].sizes))  # type: ignore[arg-type]
                for one in places
            ],
        )

    def dtype(self, index: MetadataIndex) -> torch.dtype:
        """The dtype of a saved tensor. Raises FormatError for a dtype that this torch does not
        have.
        """
        code = self._saved(index.fqn).dtype
        dtype: torch.dtype | None = DTYPE_OF.get(code)
        if dtype is None:
            raise FormatError(f"{self.where}: this torch has no dtype for {code}")
        return dtype

    def stored(self, index: MetadataIndex) -> Piece:
        """The saved box that a read item names. Raises FormatError."""
        box = self._boxes.get(index.fqn, {}).get(tuple(index.offset or ()))
        if box is None:
            raise FormatError(f"no box of {index.fqn} at {index.offset}", path=self.where)
        return box

    def holder(self, item: ReadItem) -> int:
        """The saved rank whose image holds what a read item names. Raises FormatError."""
        index = item.storage_index
        if item.type is not LoadItemType.BYTE_IO:
            return self.stored(index).rank
        if index.fqn not in self._values:
            raise FormatError(f"no value {index.fqn}", path=self.where)
        return self._values[index.fqn]

    def _saved(self, name: str) -> Saved:
        saved = self._index.find(name)
        if saved is None:
            raise FormatError(f"no tensor {name}", path=self.where)
        return saved


def _whole(saved: Saved) -> Box:
    return Box((0,) * len(saved.shape), saved.shape)


def _merged_paths(trees: Iterable[Tree]) -> dict[str, Path] | None:
    """Merge the mappings of all ranks as DefaultSavePlanner does: the first rank's entry counts."""
    given = [tree.paths for tree in trees if tree.paths is not None]
    merged: dict[str, Path] = {}
    for paths in reversed(given):
        merged |= paths
    return merged if given else None


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The tree of one rank's image of a `dcp.save`.

    `values`: names of the values that are not tensors. `boxes`: for each entry that is not named
    after its tensor, the name of the tensor. `paths`: the path of each flat name in the nested
    state dict; None if the planner did not flatten it. `foreign`: a `Checkpointer` made the image,
    which has another kind of tree.
    """

    values: tuple[str, ...] = ()
    boxes: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] | None = None
    foreign: bool = False

    def render(self) -> str:
        """The skeleton for the header. Raises UsageError for a path that JSON would change."""
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
        """The inverse of `render`; empty and `foreign` for an image of a `Checkpointer`.

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
    """The mapping that the stock planner leaves in a plan; None if there is none.

    Raises UsageError for the data of another planner, which could only be pickled.
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
