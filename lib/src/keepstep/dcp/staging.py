"""`async_save` without a second copy of the state: tensors go straight into the slot.

DCP stages before it plans. But if a state dict looks like the last one, its plan is the last plan.
So its tensors are copied at once to their places in a slot, and DCP gets a state dict of views of
that slot. When DCP's plan comes, `Staged.check` proves that every planned tensor is such a view.
Nothing else may get into the image, because the live tensors change in the meantime. A state dict
that looks different is staged in the trainer's own memory (`BlockingAsyncStager`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from keepstep.client.slot import Slot
from keepstep.dcp.plan_items import Items
from keepstep.dcp.session import Session
from keepstep.errors import KeepstepError
from keepstep.image import Entry, TensorSpec
from keepstep.state import accelerator
from keepstep.state.dtypes import DTYPE_OF


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
        planned = [tensor for _, tensor in items.resolved(planner) if tensor.numel()]
        return not planned or any(one.untyped_storage()._cdata == mine for one in planned)

    def check(self, items: Items, planner: SavePlanner, *, extras_bytes: int) -> None:
        """Check that this plan is the one that was staged. Raises KeepstepError, and the step is
        lost.
        """
        slot = self.taken.mapping
        fits = (items.specs, items.tree) == (self.items.specs, self.items.tree)
        if not fits or extras_bytes > slot.layout.extras_capacity_bytes:
            raise KeepstepError("the plan is not the one of the save before")
        for spec, tensor in items.resolved(planner):
            target = slot.view(slot.layout.entries[spec.name])
            if tensor.numel() and tensor.data_ptr() != target.data_ptr():
                raise KeepstepError(f"{spec.name} was planned, but not staged")


def refuse_stale(session: Session, items: Items, planner: SavePlanner) -> None:
    """Raise KeepstepError for views of a slot that was taken back, because its contents may have
    changed.
    """
    mapped = session.staged_ranges()
    if not mapped:
        return
    for spec, tensor in items.resolved(planner):
        at = tensor.data_ptr()
        if tensor.numel() and any(a <= at < a + size for a, size in mapped):
            raise KeepstepError(
                f"{spec.name}: this save was overtaken by the next; wait for the future of one"
                " async_save before the next"
            )


def stage(session: Session, last: LastSave, state_dict: dict[str, Any]) -> tuple[Any, Any] | None:
    """A `Staged` and the state dict over it; None for a state dict that looks different."""
    flat, paths = flatten_state_dict(state_dict)
    if flat.keys() != last.names or last.items.tree.boxes:
        return None
    mine = dict(zip((one.index.fqn for one in last.items.tensors), last.items.specs, strict=True))
    if not all(_is_box(flat[name], spec) for name, spec in mine.items()):
        return None
    taken = session.slot(last.items.specs, last.items.tree.render(), last.extras_bytes)
    try:
        slot = taken.mapping
        accelerator.here().synchronize()
        slot.erase()
        last.items.copy_resolved(slot, _local_of(flat))
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        for name, one in flat.items():
            if name in mine:
                flat[name] = _over(one, _view(memory, slot.layout.entries[name]))
            elif not isinstance(one, Tensor):
                flat[name] = copy.deepcopy(one)
    except BaseException:
        session.agent.put_back()
        raise
    session.note_staged(slot)
    return Staged(taken=taken, items=last.items, flat=memory), unflatten_state_dict(flat, paths)


def _view(memory: Tensor, entry: Entry) -> Tensor:
    dtype = DTYPE_OF[entry.spec.dtype]
    if entry.begin == entry.end:
        return torch.empty(entry.spec.shape, dtype=dtype)
    return memory[entry.begin : entry.end].view(dtype).view(entry.spec.shape)


def _local_of(flat: dict[str, Any]) -> Any:
    def resolve(item: WriteItem) -> Tensor:
        one = flat[item.index.fqn]
        return one.to_local() if isinstance(one, DTensor) else one

    return resolve


def _is_box(one: Any, spec: TensorSpec) -> bool:
    """Whether this is a plain tensor or DTensor of which this rank has the box `spec`."""
    whole = spec.shape if spec.global_shape is None else spec.global_shape
    if isinstance(one, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            one.shape, one.device_mesh, one.placements
        )
        local = one.to_local()
        fits = (tuple(shape), tuple(offsets)) == (spec.shape, spec.offsets)
    elif type(one) in (Tensor, torch.nn.Parameter):
        local, fits = one, not any(spec.offsets)
    else:
        return False
    same = (tuple(local.shape), local.dtype) == (spec.shape, DTYPE_OF[spec.dtype])
    return fits and same and tuple(one.shape) == whole


def _over(one: Tensor, view: Tensor) -> Tensor:
    # from_local would move the view to the mesh's device
    return DTensor(view, one._spec, requires_grad=False) if isinstance(one, DTensor) else view
