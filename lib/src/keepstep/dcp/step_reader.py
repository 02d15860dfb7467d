"""Reads one step into what DCP's load planner wants of it.

The images come from the sidecar (`restore.images`) or from a directory (`path_reader`). From the
sidecar, an image is mapped if it is in memory, and is otherwise read in verified chunks through one
window. So at any world size, a rank needs only the memory of one window besides its tensors. Bytes
are moved as in any other restore.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from keepstep.client.session import Session
from keepstep.dcp.metadata import Path, Tree
from keepstep.dcp.path_reader import Folder
from keepstep.errors import CoverageError, FormatError, MismatchError
from keepstep.image import extras
from keepstep.restore import transfer
from keepstep.restore.boxes import Box, Index, Saved
from keepstep.restore.images import Images
from keepstep.restore.plan import Piece, Plan, Want, byte_range, make
from keepstep.state.dtypes import DTYPE_OF
from keepstep.steps import NEAREST_FIRST, StepId, Tier


class StepReader:
    """One step, for one load of one rank. `where`: for messages. `foreign`: a `Checkpointer` saved
    the step, so it has no values that DCP could load.
    """

    def __init__(self, images: Images | Folder, id: StepId, *, where: str, rank: int) -> None:
        """Choose the boxes to read.

        Of equal boxes, those of the nearest image are taken. Among equally near ones, each rank
        begins its search at another rank, so that the load is spread. Raises FormatError, and
        CoverageError, which names all boxes that are missing, overlap, or contradict each other.
        """
        self.id, self.where = id, where
        self._images = images
        self._index: Index = images.index
        self._values: dict[int, dict[str, bytes]] = {}
        ranks = (one for one in range(self._index.world) if one not in self._index.absent)
        trees = {one: Tree.parse(images.skeleton(one)) for one in ranks}
        self.foreign = all(tree.foreign for tree in trees.values())
        self._paths: dict[str, Path] | None = None
        self._holders: dict[str, int] = {}
        for holder, tree in trees.items():  # of two ranks, the first counts, as for DCP's planner
            if tree.paths is not None:
                self._paths = {**tree.paths, **(self._paths or {})}
            for name in tree.values:
                self._holders.setdefault(name, holder)
        self._boxes = self._chosen(rank, images.nearness)

    def _chosen(self, rank: int, nearness: list[int]) -> dict[str, dict[Path, Piece]]:
        """For each tensor, the saved boxes that make it up, by their offsets."""
        named = {one: self._index.find(one) for one in (*self._index.tensors, *self._index.aliases)}
        saved = {name: one for name, one in named.items() if one is not None}
        wants = [Want(name, Box.whole(one.shape)) for name, one in saved.items()]
        try:
            made = make(wants, self._index, rank=rank, nearness=nearness)
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
                at, sizes = (0,) * len(one.shape), one.shape
                boxes[name][at] = Piece(holder, begin, 0, sizes, at, sizes, at)
        return boxes

    def metadata(self) -> Metadata:
        """The `Metadata` for DCP's planners."""
        held: dict[str, STORAGE_TYPES] = {
            name: self._tensor_metadata(name, sorted(boxes)) for name, boxes in self._boxes.items()
        }
        held |= {name: BytesStorageMetadata() for name in self._holders}
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
        if index.fqn not in self._holders:
            raise FormatError(f"no value {index.fqn}", path=self.where)
        return self._holders[index.fqn]

    def _saved(self, name: str) -> Saved:
        saved = self._index.find(name)
        if saved is None:
            raise FormatError(f"no tensor {name}", path=self.where)
        return saved

    @classmethod
    def reach(cls, link: Session, id: StepId, *, timeout_s: float) -> StepReader:
        """Find the images through the sidecar, and read their headers. `timeout_s`: for one window
        of chunks. Raises SidecarError, ImageError, CoverageError.
        """
        images = Images.find(
            link, id, timeout_s, lambda skeleton: Tree.parse(skeleton).boxes, every=True
        )
        return cls(images, id, where=f"step {id}", rank=link.rank)

    @classmethod
    def open(cls, folder: Folder) -> StepReader:
        """Read the step from a directory. Raises CoverageError."""
        return cls(folder, folder.id, where=str(folder.path), rank=0)

    def check(self, plan: LoadPlan) -> None:
        """Check that everything in the plan exists, and verify what comes from a directory. What
        comes from a sidecar is verified as it arrives. Raises FormatError, DigestError.
        """
        tensors, values = _split(plan)
        moves, dtypes = self._moves(tensors)
        holders = {self.holder(one) for one in values}
        if isinstance(self._images, Folder):
            self._images.verify(
                [(one.rank, *byte_range(one, dtypes[one.want].itemsize)) for one in moves.pieces()]
                + [self._images.extras_range(rank) for rank in holders]
            )

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the planner's tensors, and hand it its values.

        Raises SidecarError if a chunk cannot be had; some tensors have changed by then. Raises
        MismatchError for a tensor that is not as planned, and ImageError, before any tensor is
        changed.
        """
        self.check(plan)  # a global plan may have added something
        tensors, values = _split(plan)
        targets = [planner.resolve_tensor(one).detach() for one in tensors]
        for item, target in zip(tensors, targets, strict=True):
            if tuple(target.shape) != tuple(item.lengths):
                raise MismatchError(
                    f"{item.storage_index.fqn}: {list(item.lengths)} planned,"
                    f" {list(target.shape)} here"
                )
        read = [self._value(one) for one in values]
        moves, dtypes = self._moves(tensors)
        transfer.run(moves, targets, self._images, dtypes)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(values, read, strict=True):
            planner.load_bytes(item, io.BytesIO(value))

    def tier(self, plan: LoadPlan) -> Tier:
        """The farthest tier from which this plan reads."""
        if isinstance(self._images, Folder):
            return Tier.LOCAL
        found = self._images.found
        tiers = {found[self.holder(one)].tier for one in plan.items}
        return max(tiers, key=NEAREST_FIRST.index, default=Tier.MEMORY)

    def close(self) -> None:
        """Release the window and the mapped images."""
        self._images.close()

    def _moves(self, items: Sequence[ReadItem]) -> tuple[Plan, list[torch.dtype]]:
        """DCP's plan as a plan of `restore.plan`: one want for each item, filled by one piece."""
        wants, rows = [], []
        dims = max((len(one.lengths) for one in items), default=0)
        for number, item in enumerate(items):
            box, sizes = self.stored(item.storage_index), tuple(item.lengths)
            want = Want(item.storage_index.fqn, Box.whole(sizes))
            wants.append(want)
            if not want.box.empty:
                padding = [0] * (dims - len(sizes))
                parts = (box.sizes, item.storage_offsets, sizes, want.box.offsets)
                rows.append(
                    [box.rank, box.begin, number, *(n for part in parts for n in (*padding, *part))]
                )
        rows.sort()  # by rank and first byte: the order of the files
        columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3 + 4 * dims)
        return Plan(wants, columns, dims), [self.dtype(one.storage_index) for one in items]

    def _value(self, item: ReadItem) -> bytes:
        name, rank = item.storage_index.fqn, self.holder(item)
        if rank not in self._values:
            tree = extras.decode(self._images.extras(rank))
            values = tree.get("dcp") if isinstance(tree, dict) else None
            self._values[rank] = values if isinstance(values, dict) else {}
        value = self._values[rank].get(name)
        if not isinstance(value, bytes):
            where = f"{self.where}, rank {rank}"
            raise FormatError(f"{name}: the header names it, the extras lack it", path=where)
        return value


def _split(plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
    """The items that are tensors, and the items that are not."""
    values = [one for one in plan.items if one.type is LoadItemType.BYTE_IO]
    return [one for one in plan.items if one.type is not LoadItemType.BYTE_IO], values
