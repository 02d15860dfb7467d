"""Tensors over the same memory: a ring buffer and its newest row, a flat buffer and its pieces.

`torch.save` keeps storages, so such tensors overlap again after a load. An image keeps tensors. So
of those that overlap, outside of modules, one is kept, the base, and the others as views of it
(`ViewForm`). The base is a tensor that holds the memory of the others; if there is none, a vector
of bytes over all of them. A module's own tensors are filled where they are, and are only bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.image.forms import ViewForm
from keepstep.state.leaves import TensorLeaf

_CONJ, _NEG = -2, -1  # in a mark


class _Span(NamedTuple):
    """Where a leaf lies: `begin` to `end` in bytes. `fixed`: it is a module's."""

    begin: int
    end: int
    leaf: TensorLeaf
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
                views[one.leaf.name] = (
                    base.leaf.name,
                    form_of(one.leaf.tensor, one.begin - base.begin),
                )
            elif not one.fixed:
                left.append(one)
        for rest in _groups(left):
            name, begin = _base(rest, is_kept, make_base)
            for one in rest:
                if one.leaf.name != name:
                    views[one.leaf.name] = name, form_of(one.leaf.tensor, one.begin - begin)
    return views


def _spans(leaves: Iterable[TensorLeaf], is_fixed: Callable[[TensorLeaf], bool]) -> list[_Span]:
    """The leaves that can be views or bases, where they lie."""
    spans = []
    for leaf in leaves:
        tensor = leaf.tensor
        if leaf.fresh or leaf.live is not tensor or leaf.whole is not tensor or not leaf.mark[0]:
            continue
        if leaf.mark[_CONJ] or leaf.mark[_NEG] or not (size := tensor.nbytes):
            continue
        fixed = is_fixed(leaf)
        if leaf.sharing is not None and not fixed:
            continue
        if not tensor.is_contiguous():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            size = (sum((many - 1) * step for many, step in steps) + 1) * tensor.element_size()
        spans.append(_Span(leaf.mark[0], leaf.mark[0] + size, leaf, fixed))
    return spans


def _groups(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Those that overlap, at least two together, at least one of which is no module's."""
    groups: list[list[_Span]] = []
    end, last = 0, None
    for one in sorted(spans, key=itemgetter(0)):
        if last is not None and one.begin < end:
            if groups and groups[-1][-1] is last:
                groups[-1].append(one)
            else:
                groups.append([last, one])
            end = max(end, one.end)
        else:
            end = one.end
        last = one
    found = [group for group in groups if not all(one.fixed for one in group)]
    return [part for group in found for part in _of_one_storage(group)]


def _of_one_storage(group: Sequence[_Span]) -> list[list[_Span]]:
    """Memory that several storages share (of numpy's arrays, say) is not followed: `torch.save`
    does not, either."""
    parts: dict[Any, list[_Span]] = {}
    for one in group:
        storage = one.leaf.tensor.untyped_storage()
        place = one.leaf.tensor.device, storage.data_ptr(), storage.nbytes()
        parts.setdefault(place, []).append(one)
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


def form_of(tensor: Tensor, offset_bytes: int = 0) -> ViewForm:
    """How the tensor lies in the memory of a base that begins so many bytes before it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ViewForm(dtype, offset_bytes, tuple(tensor.shape), tensor.stride())
