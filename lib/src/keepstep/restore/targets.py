"""The tensors that a running rank must fill: its live tensors as boxes, under the names that images
use.

If every rank has a tensor of its own, one of them is stored under the bare name, and the others as
`name@rank-00001`. This module decides which of them a rank takes, because other ranks may run now
than at the save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.errors import MismatchError, few
from keepstep.image import Section, base_of, local_name
from keepstep.restore.boxes import Index, Saved
from keepstep.state.dtypes import DTYPE_OF
from keepstep.state.leaves import Node, TensorLeaf, build, check_values

_SHOWN = 20


class Target(NamedTuple):
    """A local tensor, and the box of the global tensor that it is. `shape`: of the global tensor.

    `name`: the name that the tensor would be saved under. `first`: the first of the names that are
    tied to one tensor. `live`: the user's tensor, perhaps a DTensor; None for a new tensor. `own`:
    see `Want`.
    """

    name: str
    first: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    own: bool = False
    live: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether the whole global tensor is here."""
        return self.tensor.shape == self.shape


def target_of(leaf: TensorLeaf, name: str) -> Target:
    """The whole local part of a leaf, even if this rank stages only a part of it.

    `name` differs from the leaf's own name if the tensor is tied to another one.
    """
    first = base_of(leaf.name)[0]
    return Target(
        name=first if name == leaf.name else base_of(name)[0],
        first=first,
        tensor=leaf.whole,
        offsets=leaf.whole_offsets,
        shape=tuple(leaf.whole.shape) if leaf.sharing is None else leaf.sharing.global_shape,
        own=leaf.section is Section.REST,
        live=leaf.live,
    )


class Names:
    """Finds the saved tensor that a live tensor continues. `rank`: the saved rank whose own values
    this rank takes.
    """

    def __init__(self, index: Index, rank: int) -> None:
        self._index = index
        self._rank = rank
        self._used: set[str] = set()
        self._locals: dict[str, list[int]] = {}
        for name in (*index.tensors, *index.aliases):
            base, owner = base_of(name)
            if owner is not None:
                self._locals.setdefault(base, []).append(owner)

    @property
    def bases(self) -> set[str]:
        """All names, without ranks."""
        return {base_of(one)[0] for one in self._index.tensors}

    @property
    def unused(self) -> set[str]:
        """Those of `bases` under which nothing was found."""
        left = {base_of(one)[0] for one in self._index.tensors.keys() - self._used}
        return left - {base_of(one)[0] for one in self._used} if left else left

    def find(self, name: str, *, whole: bool = True) -> Saved | None:
        """The saved tensor for a live one; None if there is none.

        `whole` is False if only a box of the tensor is wanted here and other ranks want other
        boxes. All boxes must then come from the same rank's tensor.
        """
        saved = self._own(name) if whole and self._locals else None
        saved = saved or self._index.find(name) or self._anybody(name)
        if saved is not None:
            self._used.add(saved.name)
        return saved

    def _own(self, name: str) -> Saved | None:
        mine = self._rank in self._locals.get(name, ())
        return self._index.find(local_name(name, self._rank)) if mine else None

    def _anybody(self, name: str) -> Saved | None:
        owners = self._locals.get(name)
        return self._index.find(local_name(name, min(owners))) if owners else None


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Shape and dtype as text, for messages."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_saved(saved: Saved) -> str:
    """Shape and dtype of a saved tensor as text, for messages."""
    return describe(saved.shape, DTYPE_OF[saved.dtype])


Path = tuple[Any, ...]


Live = dict[Path, Target]
"""The tensors of a component, by the keys that lead to them."""


class SavedTree:
    """The tree of a component in the image of one saved rank. `load`: returns all values of that
    image, `metadata` what the state dict of a module says of itself; called when they are needed.
    """

    def __init__(
        self,
        node: Node,
        load: Callable[[], list[Any]],
        metadata: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self.node, self._load, self.metadata = node, load, metadata

    @cached_property
    def values(self) -> list[Any]:
        """The values that the tree's value nodes number. Raises FormatError for a number without a
        value.
        """
        values = self._load()
        check_values(self.node, count=len(values))
        return values

    def branches(self, node: Node) -> Sequence[tuple[Any, Node]]:
        """Keys and nodes of a dict. A dict without any tensor is stored as a single value; its
        items are then added to the values, and become value nodes.
        """
        if node[0] == "v" and isinstance(value := self.values[node[1]], dict):
            first = len(self.values)
            self.values.extend(value.values())
            return [(key, ("v", first + at)) for at, key in enumerate(value)]
        return node[1] if node[0] == "d" else ()

    def without_tensors(self) -> Any:
        """The tree with None in place of tensors."""
        return build(self.node, lambda _: None, self.values.__getitem__)


ADVICE = (
    "Build what the saved step has before restore(): latest_step() says from which step it goes on"
    " (docs/add-keepstep.md, Models that change). Or train with the code that saved it, or start a"
    " new run (keepstep run --run NAME)."
)


def raise_differences(differences: Sequence[str]) -> None:
    """Raise MismatchError with the list of differences, if there are any."""
    if not differences:
        return
    raise MismatchError(
        "model and checkpoint disagree, nothing was changed:\n  "
        + few(differences, _SHOWN, by="\n  ", rest="\n  ... and ")
        + f"\n{ADVICE}"
    )
