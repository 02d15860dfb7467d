"""Reads one step into what DCP's load planner wants of it.

The images come from the sidecar (`restore.images`) or from a directory (`path_reader`). From the
sidecar, an image is mapped if it is in memory, and is otherwise read in verified chunks through one
window. So at any world size, a rank needs only the memory of one window besides its tensors. Bytes
are moved as in any other restore.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from keepstep.client.session import Session
from keepstep.dcp.metadata import Contents, Tree
from keepstep.dcp.path_reader import Folder
from keepstep.errors import FormatError, MismatchError
from keepstep.image import extras
from keepstep.restore import transfer
from keepstep.restore.blocks import byte_range
from keepstep.restore.boxes import Box
from keepstep.restore.images import Images
from keepstep.restore.plan import Plan, Want
from keepstep.steps import NEAREST_FIRST, StepId, Tier


class StepReader:
    """One step, for one load of one rank."""

    def __init__(self, images: Images | Folder, id: StepId, *, where: str, rank: int) -> None:
        """Choose the boxes to read. Raises FormatError, CoverageError: see `Contents`."""
        self.id = id
        self.contents = Contents(images, where=where, rank=rank)
        self._images = images
        self._values: dict[int, dict[str, bytes]] = {}

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
        holders = {self.contents.holder(one) for one in values}
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
        tiers = {found[self.contents.holder(one)].tier for one in plan.items}
        return max(tiers, key=NEAREST_FIRST.index, default=Tier.MEMORY)

    def close(self) -> None:
        """Release the window and the mapped images."""
        self._images.close()

    def _moves(self, items: Sequence[ReadItem]) -> tuple[Plan, list[torch.dtype]]:
        """DCP's plan as a plan of `restore.plan`: one want for each item, filled by one piece."""
        wants, rows = [], []
        dims = max((len(one.lengths) for one in items), default=0)
        for number, item in enumerate(items):
            box, sizes = self.contents.stored(item.storage_index), tuple(item.lengths)
            want = Want(item.storage_index.fqn, Box((0,) * len(sizes), sizes))
            wants.append(want)
            if not want.box.empty:
                padding = [0] * (dims - len(sizes))
                parts = (box.sizes, item.storage_offsets, sizes, want.box.offsets)
                rows.append(
                    [box.rank, box.begin, number, *(n for part in parts for n in (*padding, *part))]
                )
        rows.sort()  # by rank and first byte: the order of the files
        columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3 + 4 * dims)
        return Plan(wants, columns, dims), [self.contents.dtype(one.storage_index) for one in items]

    def _value(self, item: ReadItem) -> bytes:
        name, rank = item.storage_index.fqn, self.contents.holder(item)
        if rank not in self._values:
            tree = extras.decode(self._images.extras(rank))
            values = tree.get("dcp") if isinstance(tree, dict) else None
            self._values[rank] = values if isinstance(values, dict) else {}
        value = self._values[rank].get(name)
        if not isinstance(value, bytes):
            where = f"{self.contents.where}, rank {rank}"
            raise FormatError(f"{name}: the header names it, the extras lack it", path=where)
        return value


def _split(plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
    """The items that are tensors, and the items that are not."""
    values = [one for one in plan.items if one.type is LoadItemType.BYTE_IO]
    return [one for one in plan.items if one.type is not LoadItemType.BYTE_IO], values
