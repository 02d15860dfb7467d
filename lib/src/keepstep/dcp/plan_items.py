"""Turns one rank's save plan into an image: its entries, its values, and the copy into a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from keepstep.client import copying
from keepstep.client.slot import Slot, SlotMapping
from keepstep.dcp.metadata import Tree, paths_of
from keepstep.errors import KeepstepError, UsageError
from keepstep.image import Entry, Section, TensorSpec
from keepstep.state.dtypes import DTYPE_OF, code_of

Resolve = Callable[[WriteItem], Any]
"""Gives the tensor of an item, as `resolve_data` of a planner does."""

_BATCH_BYTES = 256 << 20
"""Resolving an item may allocate memory, so at most about this much is resolved before it is
copied.
"""


@dataclass(frozen=True, kw_only=True)
class Items:
    """A save plan, taken apart. `tensors` and `specs` correspond one to one, in the plan's
    order.
    """

    tensors: tuple[WriteItem, ...]
    specs: tuple[TensorSpec, ...]
    values: tuple[WriteItem, ...]
    tree: Tree

    @classmethod
    def of(cls, plan: SavePlan) -> Items:
        """Take a plan apart. Raises UsageError for an item that an image cannot hold."""
        tensors = tuple(one for one in plan.items if one.type is not WriteItemType.BYTE_IO)
        values = tuple(one for one in plan.items if one.type is WriteItemType.BYTE_IO)
        names = _entry_names(tensors)
        tree = Tree(
            values=tuple(one.index.fqn for one in values),
            boxes={
                name: one.index.fqn
                for name, one in zip(names, tensors, strict=True)
                if name != one.index.fqn
            },
            paths=paths_of(plan.planner_data),
        )
        specs = tuple(_spec(name, one) for name, one in zip(names, tensors, strict=True))
        return cls(tensors=tensors, specs=specs, values=values, tree=tree)

    def read_values(self, planner: SavePlanner) -> dict[str, bytes]:
        """For each value that is not a tensor, the bytes that DCP's planner makes of it."""
        read = {}
        for item in self.values:
            stream: Any = planner.resolve_data(item)
            read[item.index.fqn] = bytes(stream.getbuffer())
        return read

    def copy_into(self, slot: SlotMapping, resolve: Resolve) -> None:
        """Copy every tensor into its place in the slot. Raises UsageError: see `resolved`."""
        moves: list[copying.Move] = []
        copies: list[copying.Copy] = []
        held: list[Tensor] = []
        batch = 0
        for spec, tensor in self.resolved(resolve):
            entry = slot.layout.entries[spec.name]
            target, size = slot.view(entry), entry.end - entry.begin
            if size:
                if type(tensor) in (Tensor, torch.nn.Parameter) and copying.is_plain(tensor):
                    source = tensor.data_ptr()
                    moves.append(copying.Move(slot.address + entry.begin, source, size))
                else:
                    copies.append(copying.Copy(target, tensor))
                held.append(tensor)
                batch += size
            if batch >= _BATCH_BYTES:
                copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
                moves, copies, held, batch = [], [], [], 0
        copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())

    def resolved(self, resolve: Resolve) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Every tensor as `resolve` gives it. Raises UsageError for a tensor that is not as
        planned.
        """
        for spec, item in zip(self.specs, self.tensors, strict=True):
            tensor: Any = resolve(item)
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPE_OF[spec.dtype]:
                raise UsageError(
                    f"{spec.name}: planned as {spec.dtype}{list(spec.shape)}, but it is"
                    f" {tensor.dtype} of {list(tensor.shape)} when it is saved"
                )
            yield spec, tensor.detach()


def _entry_names(items: Sequence[WriteItem]) -> list[str]:
    """The name of each entry: the tensor's name, or `name@0`, `name@1` for several boxes of one
    tensor in this rank.
    """
    counts = Counter(one.index.fqn for one in items)
    used: Counter[str] = Counter()
    names = []
    for item in items:
        name = item.index.fqn
        if counts[name] > 1:
            used[name] += 1
            name = f"{name}@{used[name] - 1}"
        names.append(name)
    return names


def _spec(name: str, item: WriteItem) -> TensorSpec:
    data = item.tensor_data
    if data is None:
        raise UsageError(f"{item.index.fqn}: the planner plans a tensor without its box")
    return TensorSpec(
        name=name,
        dtype=code_of(data.properties.dtype, name=item.index.fqn),
        shape=tuple(data.chunk.sizes),
        section=Section.REST,
        offsets=tuple(data.chunk.offsets),
        global_shape=tuple(data.size),
    )


# --- staged before it is planned -------------------------------------------------------------
#
# `async_save` without a second copy of the state: tensors go straight into the slot.
#
# DCP stages before it plans. But if a state dict looks like the last one, its plan is the last
# plan. So its tensors are copied at once to their places in a slot, and DCP gets a state dict of
# views of that slot. When DCP's plan comes, `Staged.check` proves that every planned tensor is such
# a view. Nothing else may get into the image, because the live tensors change in the meantime. A
# state dict that looks different is staged in the trainer's own memory (`BlockingAsyncStager`).


@dataclass(frozen=True, kw_only=True)
class LastSave:
    """What the next state dict must look like. `names`: everything that this rank offered to the
    plan. `items`: the part of it that this rank had to write.
    """

    names: frozenset[str]
    items: Items
    extras_bytes: int


@dataclass(kw_only=True, eq=False)
class Staged:
    """A slot that holds the tensors of `items` and is not yet sealed.

    `flat`: its bytes. The tensors that DCP got share its storage. The tensors of other saves do
    not, even if the slot is the same.
    """

    taken: Slot
    items: Items
    flat: Tensor

    def is_for(self, items: Items, planner: SavePlanner) -> bool:
        """Whether the planned tensors were staged by this very `stage`."""
        mine = self.flat.untyped_storage()._cdata
        planned = [tensor for _, tensor in items.resolved(planner.resolve_data) if tensor.numel()]
        return not planned or any(one.untyped_storage()._cdata == mine for one in planned)

    def check(self, items: Items, planner: SavePlanner, *, extras_bytes: int) -> None:
        """Check that this plan is the one that was staged. Raises KeepstepError, and the step is
        lost.
        """
        slot = self.taken.mapping
        fits = (items.specs, items.tree) == (self.items.specs, self.items.tree)
        if not fits or extras_bytes > slot.layout.extras_capacity_bytes:
            raise KeepstepError("the plan is not the one of the save before")
        for spec, tensor in items.resolved(planner.resolve_data):
            target = slot.view(slot.layout.entries[spec.name])
            if tensor.numel() and tensor.data_ptr() != target.data_ptr():
                raise KeepstepError(f"{spec.name} was planned, but not staged")


def view_of(memory: Tensor, entry: Entry) -> Tensor:
    dtype = DTYPE_OF[entry.spec.dtype]
    if entry.begin == entry.end:
        return torch.empty(entry.spec.shape, dtype=dtype)
    return memory[entry.begin : entry.end].view(dtype).view(entry.spec.shape)


def local_of(one: Any) -> Any:
    return one.to_local() if isinstance(one, DTensor) else one


def is_box(one: Any, spec: TensorSpec) -> bool:
    """Whether this is a plain tensor or DTensor of which this rank has the box `spec`."""
    whole = spec.shape if spec.global_shape is None else spec.global_shape
    if isinstance(one, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            one.shape, one.device_mesh, one.placements
        )
        fits = (tuple(shape), tuple(offsets)) == (spec.shape, spec.offsets)
    elif type(one) in (Tensor, torch.nn.Parameter):
        fits = not any(spec.offsets)
    else:
        return False
    local = local_of(one)
    same = (tuple(local.shape), local.dtype) == (spec.shape, DTYPE_OF[spec.dtype])
    return fits and same and tuple(one.shape) == whole


def over(one: Tensor, view: Tensor) -> Tensor:
    # from_local would move the view to the mesh's device
    return DTensor(view, one._spec, requires_grad=False) if isinstance(one, DTensor) else view
