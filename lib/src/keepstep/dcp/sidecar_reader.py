"""A step within the sidecar's reach, for `StorageReader()`: in memory, on volumes of this machine,
on other pods, in the archive.

The sidecar says where the images of all ranks are (`restore.images`). Those in shared memory
are mapped; of all others the chunks that a plan needs come through one window, each verified by the
sidecar before it is handed over. So a rank holds one window beside its tensors, at whatever world
size, and a directory need not be visible to the training process.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from keepstep.client.session import Link
from keepstep.core.ledger import NEAREST_FIRST
from keepstep.dcp.metadata import Contents, Part, Stored, Tree, dtype_of
from keepstep.errors import FormatError, MismatchError
from keepstep.image import extras
from keepstep.restore import transfer
from keepstep.restore.boxes import Box
from keepstep.restore.images import Images
from keepstep.restore.plan import Plan, Want
from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import Sources


class Reached:
    """One step, for one load of one rank. `tier`: the farthest that was read."""

    def __init__(self, link: Link, id: StepId, *, rank: int, timeout_s: float) -> None:
        """Find the images and read their headers. `timeout_s`: for one window of chunks.

        Raises SidecarError, ImageError, CoverageError.
        """
        self._images = Images.find(link, id, timeout_s)
        found = self._images.sources
        self.tier = Tier.MEMORY
        self._tiers = {one.rank: one.tier for one in found.sources}
        self._values: dict[int, dict[str, bytes]] = {}
        self.contents = _contents(self._images, found, rank)

    def check(self, plan: LoadPlan) -> None:
        """See that every box of the plan is there; its bytes are verified as they come.

        Raises FormatError.
        """
        for item in plan.items:
            self.contents.holder(item)

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the planner's tensors, and hand it its values.

        Raises SidecarError when a chunk cannot be had: some tensors are changed then. MismatchError
        for a tensor that is not as planned, before any is changed.
        """
        tensors = [one for one in plan.items if one.type is not LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(one).detach() for one in tensors]
        for item, target in zip(tensors, targets, strict=True):
            _check_size(item, target)
        values = [one for one in plan.items if one.type is LoadItemType.BYTE_IO]
        read = [self._value(one) for one in values]
        self._fill(tensors, targets)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(values, read, strict=True):
            planner.load_bytes(item, io.BytesIO(value))
        self._note_tier(plan)
        self.close()

    def close(self) -> None:
        """Let go of the window and of what is mapped."""
        self._images.close()

    def _fill(self, items: list[ReadItem], targets: list[Tensor]) -> None:
        boxes = [self.contents.stored(one.storage_index) for one in items]
        dtypes = [dtype_of(one, self.contents.where) for one in boxes]
        # bytes are moved, so a target of another dtype gets its values by way of a copy
        raw = [
            target if target.dtype == dtype else torch.empty(target.shape, dtype=dtype)
            for target, dtype in zip(targets, dtypes, strict=True)
        ]
        transfer.run(_plan(items, boxes), raw, self._images)
        for target, filled in zip(targets, raw, strict=True):
            if filled is not target:
                target.copy_(filled)

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

    def _note_tier(self, plan: LoadPlan) -> None:
        read = {self._tiers[self.contents.holder(one)] for one in plan.items}
        self.tier = max(read, key=NEAREST_FIRST.index, default=Tier.MEMORY)


def _contents(images: Images, found: Sources, rank: int) -> Contents:
    """Of equal boxes that of the nearest image; among equally near ones each rank prefers others,
    so that the load is spread."""
    index, nearness = images.index, images.nearness
    boxes: dict[int, list[tuple[str, Stored]]] = {one.rank: [] for one in found.sources}
    for name, saved in index.tensors.items():
        dims = len(saved.shape)
        for row in saved.rows.tolist():
            stored = _stored(row, dims, saved.dtype, saved.shape)
            boxes[stored.rank].append((name, stored))
    near = sorted(boxes, key=lambda one: (nearness[one], (one - rank) % found.world))
    return Contents.of(
        [Part(rank=one, tree=Tree.parse(images.skeleton(one)), boxes=boxes[one]) for one in near],
        where=f"step {found.id}",
        id=found.id,
        world=found.world,
        aliases=index.aliases,
        problems=[f"{name}: {text}" for name, text in index.conflicts.items()],
    )


def _stored(row: list[int], dims: int, dtype: str, shape: tuple[int, ...]) -> Stored:
    return Stored(
        rank=row[0],
        begin=row[1],
        end=row[1],  # only a file's reader asks where a box ends
        dtype=dtype,
        shape=tuple(row[2 + dims :]),
        offsets=tuple(row[2 : 2 + dims]),
        global_shape=shape,
    )


def _plan(items: list[ReadItem], boxes: list[Stored]) -> Plan:
    """DCP's plan in the terms of `restore.plan`: a want for each item, filled by one piece."""
    wants = [
        Want(one.storage_index.fqn, Box((0,) * len(one.lengths), tuple(one.lengths)))
        for one in items
    ]
    dims = max((len(one.box.sizes) for one in wants), default=0)
    rows = [
        _row(number, item, box, dims)
        for number, (item, box) in enumerate(zip(items, boxes, strict=True))
        if not wants[number].box.empty
    ]
    rows.sort()  # by rank and first byte: the order of the files
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3 + 4 * dims)
    return Plan(wants, columns, dims)


def _row(number: int, item: ReadItem, box: Stored, dims: int) -> list[int]:
    padding = [0] * (dims - len(box.shape))
    parts: Iterable[Iterable[int]] = (
        box.shape,
        item.storage_offsets,
        item.lengths,
        [0] * len(box.shape),
    )
    row = [box.rank, box.begin, number]
    for part in parts:
        row += [*padding, *part]
    return row


def _check_size(item: ReadItem, target: Tensor) -> None:
    if tuple(target.shape) != tuple(item.lengths):
        raise MismatchError(
            f"{item.storage_index.fqn}: {list(item.lengths)} planned, {list(target.shape)} here"
        )
