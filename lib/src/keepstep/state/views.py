"""Tensors over the same memory: a ring buffer and its newest row, a flat buffer and its pieces.

`torch.save` keeps storages, so such tensors overlap again after a load. An image keeps tensors. So
of those that overlap, outside of modules, one is kept, the base, and the others as views of it
(`ViewForm`). The base is a tensor that holds the memory of the others; if there is none, a vector
of bytes over all of them. A module's own tensors are filled where they are, and are only bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepstep.image.forms import ViewForm
from keepstep.state.leaves import TensorLeaf


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a leaf lies: `begin` to `end` in bytes. `fixed`: it is a module's."""

    leaf: TensorLeaf
    begin: int
    end: int
    fixed: bool

    def holds(self, other: _Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def find(
    leaves: Iterable[TensorLeaf],
    *,
    is_fixed: Callable[[TensorLeaf], bool],
    is_kept: Callable[[TensorLeaf], bool],
    make_base: Callable[[TensorLeaf, Tensor], str],
) -> dict[str, tuple[str, ViewForm]]:
    """The base and the form of each leaf that is a view, by its name.

    `is_fixed`: whether a leaf is a module's. `is_kept`: whether a restore can find a leaf in its
    place, so that it may be a base. `make_base(leaf, tensor)`: adds a new base beside this leaf,
    and returns its name.
    """
    views: dict[str, tuple[str, ViewForm]] = {}
    for group in _groups(_spans(leaves, is_fixed)):
        bases = [one for one in group if one.fixed and one.leaf.tensor.is_contiguous()]
        left = []
        for one in group:
            base = next((base for base in bases if base.holds(one)), None)
            if base is not None and not one.fixed:
                views[one.leaf.name] = base.leaf.name, _form(one, base.begin)
            elif not one.fixed:
                left.append(one)
        for rest in _groups(left):
            name, begin = _base(rest, is_kept, make_base)
            for one in rest:
                if one.leaf.name != name:
                    views[one.leaf.name] = name, _form(one, begin)
    return views


def _spans(leaves: Iterable[TensorLeaf], is_fixed: Callable[[TensorLeaf], bool]) -> list[_Span]:
    """The leaves that can be views or bases, where they lie."""
    spans = []
    for leaf in leaves:
        tensor = leaf.tensor
        fixed = is_fixed(leaf)
        if leaf.fresh or leaf.live is not leaf.whole or (leaf.sharing is not None and not fixed):
            continue
        if leaf.whole is not tensor or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            continue
        begin = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        end = begin + (last + 1) * tensor.element_size()
        spans.append(_Span(leaf, begin, end, fixed))
    return spans


def _groups(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Those that overlap, at least two together, at least one of which is no module's."""
    groups: list[list[_Span]] = []
    end: tuple[Any, int] = (None, 0)
    for one in sorted(
        spans, key=lambda span: (str(span.leaf.tensor.device), span.begin, -span.end)
    ):
        device = one.leaf.tensor.device
        if groups and end[0] == device and one.begin < end[1]:
            groups[-1].append(one)
            end = device, max(end[1], one.end)
        else:
            groups.append([one])
            end = device, one.end
    found = [group for group in groups if len(group) > 1 and not all(one.fixed for one in group)]
    return [part for group in found for part in _of_one_storage(group)]


def _of_one_storage(group: Sequence[_Span]) -> list[list[_Span]]:
    """Memory that several storages share (of numpy's arrays, say) is not followed: `torch.save`
    does not, either."""
    parts: dict[Any, list[_Span]] = {}
    for one in group:
        storage = one.leaf.tensor.untyped_storage()
        parts.setdefault((storage.data_ptr(), storage.nbytes()), []).append(one)
    return [part for part in parts.values() if len(part) > 1]


def _base(
    group: Sequence[_Span],
    is_kept: Callable[[TensorLeaf], bool],
    make_base: Callable[[TensorLeaf, Tensor], str],
) -> tuple[str, int]:
    """The name of the base, and where it begins."""
    begin, end = min(one.begin for one in group), max(one.end for one in group)
    if all(is_kept(one.leaf) for one in group):
        for one in group:
            if (one.begin, one.end) == (begin, end) and one.leaf.tensor.is_contiguous():
                return one.leaf.name, begin
    first = min(group, key=lambda one: one.begin).leaf
    storage = first.tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=first.tensor.device)
    with torch.no_grad():
        whole = whole.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))
    return make_base(first, whole), begin


def _form(one: _Span, begin: int) -> ViewForm:
    tensor = one.leaf.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ViewForm(dtype, one.begin - begin, tuple(tensor.shape), tensor.stride())
