"""What a running rank must fill: its live tensors as boxes, under the names that images use.

Of a tensor that every rank has for itself, one is stored under the bare name and the others as
`name@rank-00001`; which of those a rank takes is decided here, as other ranks may run now than did
then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from keepstep.errors import MismatchError
from keepstep.image import Section, local_name
from keepstep.restore.boxes import Box, Index, Saved
from keepstep.state.dtypes import DTYPE_OF
from keepstep.state.leaves import Node, TensorLeaf, build, check_values

_LOCAL = re.compile(r"^(.*)@rank-(\d{5,})$", re.DOTALL)
_SHOWN = 20


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A local tensor, and which box of the global tensor `shape` it is."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    own: bool = False

    @property
    def box(self) -> Box:
        """What to fill."""
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def whole(self) -> bool:
        """Whether all of the global tensor is here."""
        return tuple(self.tensor.shape) == self.shape


def target_of(leaf: TensorLeaf) -> Target:
    """All of a leaf that lies here, also where this rank stages only a part of it."""
    name, _ = base_of(leaf.name)
    return Target(
        name=name,
        tensor=leaf.whole.detach(),
        offsets=leaf.whole_offsets,
        shape=tuple(leaf.whole.shape) if leaf.sharing is None else leaf.sharing.global_shape,
        own=leaf.section is Section.REST,
    )


def base_of(name: str) -> tuple[str, int | None]:
    """A stored name without its rank, and that rank if it has one."""
    match = _LOCAL.match(name)
    return (match[1], int(match[2])) if match else (name, None)


class Names:
    """Finds the saved tensor that a live one continues. `rank`: the saved rank whose own values
    this rank takes."""

    def __init__(self, index: Index, rank: int) -> None:
        self._index = index
        self._rank = rank
        self.used: set[str] = set()
        self._locals: dict[str, list[int]] = {}
        for name in (*index.tensors, *index.aliases):
            base, owner = base_of(name)
            if owner is not None:
                self._locals.setdefault(base, []).append(owner)

    @property
    def bases(self) -> set[str]:
        """All names, without ranks."""
        return {base_of(one)[0] for one in self._index.tensors}

    def find(self, name: str, *, whole: bool = True) -> Saved | None:
        """`whole` False: only a box of it is wanted here and others by other ranks, which must all
        come from the same rank's tensor."""
        saved = self._own(name) if whole else None
        saved = saved or self._index.find(name) or self._anybody(name)
        if saved is not None:
            self.used.add(base_of(saved.name)[0])
        return saved

    def _own(self, name: str) -> Saved | None:
        mine = self._rank in self._locals.get(name, ())
        return self._index.find(local_name(name, self._rank)) if mine else None

    def _anybody(self, name: str) -> Saved | None:
        owners = self._locals.get(name)
        return self._index.find(local_name(name, min(owners))) if owners else None


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """For messages."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_saved(saved: Saved) -> str:
    """For messages."""
    return describe(saved.shape, DTYPE_OF[saved.dtype])


Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Here:
    """A live tensor of a component: what is to be filled, the object that the user has (a DTensor
    perhaps), and the name that it would be saved under, which of a tied one is not the target's."""

    target: Target
    live: Tensor
    name: str


Live = dict[Path, Here]
"""A component's tensors by the keys that lead to them."""


class SavedTree:
    """A component's tree in the image of one saved rank. `load`: all values of that image, asked
    for when the first one is needed."""

    def __init__(self, node: Node, load: Callable[[], list[Any]]) -> None:
        self.node, self._load = node, load

    @cached_property
    def values(self) -> list[Any]:
        """What the tree's value nodes number. Raises FormatError for a number that is none."""
        values = self._load()
        check_values(self.node, count=len(values))
        return values

    def without_tensors(self) -> Any:
        """The tree with None for tensors."""
        return build(self.node, lambda _: None, self.values.__getitem__)


def raise_differences(differences: Sequence[str]) -> None:
    """Raises MismatchError that lists them, if there are any."""
    if not differences:
        return
    shown = "\n  ".join(differences[:_SHOWN])
    more = len(differences) - _SHOWN
    raise MismatchError(
        "model and checkpoint disagree, nothing was changed:\n  "
        + shown
        + (f"\n  ... and {more} more" if more > 0 else "")
        + "\nTrain with the code that saved it, or start a new run (keepstep run --run NAME)."
    )
