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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from keepstep.client import copying
from keepstep.client.slot import SlotMapping
from keepstep.dcp.metadata import Tree, paths_of
from keepstep.errors import UsageError
from keepstep.image import Section, TensorSpec
from keepstep.state.dtypes import DTYPE_OF, code_of

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

    def copy_into(self, slot: SlotMapping, planner: SavePlanner) -> None:
        """Copy every tensor into its place in the slot. Raises UsageError for a tensor that is not
        as planned.
        """
        self.copy_resolved(slot, planner.resolve_data)

    def copy_resolved(self, slot: SlotMapping, resolve: Callable[[WriteItem], Any]) -> None:
        """Like `copy_into`, with tensors from `resolve` instead of a planner."""
        moves: list[copying.Move] = []
        copies: list[copying.Copy] = []
        held: list[Tensor] = []
        batch = 0
        for spec, tensor in self._resolved(resolve):
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

    def resolved(self, planner: SavePlanner) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Every tensor as the planner gives it. Raises UsageError for a tensor that is not as
        planned.
        """
        return self._resolved(planner.resolve_data)

    def _resolved(self, resolve: Callable[[WriteItem], Any]) -> Iterator[tuple[TensorSpec, Tensor]]:
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
    data = _tensor_data(item)
    return TensorSpec(
        name=name,
        dtype=code_of(data.properties.dtype, name=item.index.fqn),
        shape=tuple(data.chunk.sizes),
        section=Section.REST,
        offsets=tuple(data.chunk.offsets),
        global_shape=tuple(data.size),
    )


def _tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise UsageError(f"{item.index.fqn}: the planner plans a tensor without its box")
    return item.tensor_data
