"""The tensors that a running rank must fill: its live tensors as boxes, under the names that images
use, and the saved tensors that fill them.

If every rank has a tensor of its own, one of them is stored under the bare name, and the others as
`name@rank-00001`. This module decides which of them a rank takes, because other ranks may run now
than at the save.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.errors import MismatchError, few
from keepstep.image import FlatBox, TensorRole, add_rank_suffix, extras_codec, split_local_name
from keepstep.image.codecs import ViewForm
from keepstep.restore.fill_plan import Box, ImageIndex, SavedTensor, TensorRequest
from keepstep.restore.images import StepImages
from keepstep.state import sharding
from keepstep.state.accelerator import parse_device_name
from keepstep.state.refill import LiveObjectIndex
from keepstep.state.taken_state import (
    DTYPE_OF,
    Node,
    TensorLeaf,
    build_tree,
    check_values_exist,
    decode_state_dict_metadata,
    empty_tensor,
    leaves_of,
    parse_skeleton,
    values_from_extras,
)

_SHOWN = 20


class TensorTarget(NamedTuple):
    """A local tensor, and the box of the global tensor that it is. `shape`: of the global tensor.

    `name`: the name that the tensor would be saved under. `first`: the first of the names that are
    tied to one tensor. `live`: the user's tensor, perhaps a DTensor; None for a new tensor. `own`:
    see `TensorRequest`. `flat`: see `TensorSpec`.
    """

    name: str
    first: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    own: bool = False
    live: Tensor | None = None
    flat: FlatBox | None = None

    @property
    def whole(self) -> bool:
        """Whether the whole global tensor is here."""
        return self.tensor.shape == self.shape


def target_of(leaf: TensorLeaf, name: str) -> TensorTarget:
    """The whole local part of a leaf, even if this rank stages only a part of it.

    `name` differs from the leaf's own name if the tensor is tied to another one.
    """
    first = split_local_name(leaf.name)[0]
    return TensorTarget(
        name=first if name == leaf.name else split_local_name(name)[0],
        first=first,
        tensor=leaf.whole,
        offsets=leaf.whole_offsets,
        shape=tuple(leaf.whole.shape) if leaf.sharing is None else leaf.sharing.full_shape,
        own=leaf.section is TensorRole.REST,
        live=leaf.live,
        flat=leaf.flat_box,
    )


def boxes_of_tensor(
    tensor: Tensor, offsets: tuple[int, ...], flat: FlatBox | None
) -> Iterator[tuple[Tensor, Box]]:
    """The boxes of the global tensor that a local one consists of, each with its part of it."""
    if flat is None:
        yield tensor, Box(offsets, tuple(tensor.shape))
        return
    vector, at = tensor.view(-1), 0
    for box in itertools.starmap(Box, flat.boxes(offsets[-1], tensor.numel())):
        end = at + math.prod(box.sizes)
        yield vector[at:end].view(box.sizes), box
        at = end


class SavedTensorFinder:
    """Finds the saved tensor that a live tensor continues. `rank`: the saved rank whose own values
    this rank takes."""

    def __init__(self, index: ImageIndex, rank: int) -> None:
        self._index = index
        self._rank = rank
        self._used: set[str] = set()
        self._locals: dict[str, list[int]] = {}
        for name in (*index.tensors, *index.aliases):
            base, owner = split_local_name(name)
            if owner is not None:
                self._locals.setdefault(base, []).append(owner)

    @property
    def names_without_rank(self) -> set[str]:
        """All names, without ranks."""
        return {split_local_name(tensor)[0] for tensor in self._index.tensors}

    @property
    def unused(self) -> set[str]:
        """Those of `names_without_rank` under which nothing was found."""
        left = {split_local_name(tensor)[0] for tensor in self._index.tensors.keys() - self._used}
        return left - {split_local_name(name)[0] for name in self._used} if left else left

    def find_saved_tensor(self, name: str, *, whole: bool = True) -> SavedTensor | None:
        """The saved tensor for a live one; None if there is none.

        `whole` is False if only a box of the tensor is wanted here and other ranks want other
        boxes. All boxes must then come from the same rank's tensor.
        """
        owners = self._locals.get(name, ())
        own = whole and self._rank in owners
        saved = self._index.find_tensor(add_rank_suffix(name, self._rank)) if own else None
        saved = saved or self._index.find_tensor(name)
        if saved is None and owners:
            saved = self._index.find_tensor(add_rank_suffix(name, min(owners)))
        if saved is not None:
            self._used.add(saved.name)
        return saved


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Shape and dtype as text, for messages."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_saved(saved: SavedTensor) -> str:
    """Shape and dtype of a saved tensor as text, for messages."""
    return describe_tensor(saved.shape, DTYPE_OF[saved.dtype])


Path = tuple[Any, ...]


Live = dict[Path, TensorTarget]
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
        value."""
        values = self._load()
        check_values_exist(self.node, count=len(values))
        return values

    def branches_of(self, node: Node) -> Sequence[tuple[Any, Node]]:
        """Keys and nodes of a dict. A dict without any tensor is stored as a single value; its
        items are then added to the values, and become value nodes."""
        if node[0] == "v" and isinstance(value := self.values[node[1]], dict):
            first = len(self.values)
            self.values.extend(value.values())
            return [(key, ("v", first + at)) for at, key in enumerate(value)]
        return node[1] if node[0] == "d" else ()

    def without_tensors(self) -> Any:
        """The tree with None in place of tensors."""
        return build_tree(self.node, lambda _: None, self.values.__getitem__)


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


class TensorRestorePlanner:
    """Finds and makes the tensors that a restore fills, and notes what differs. A `Loader` plans
    by it for whole components."""

    def __init__(
        self,
        images: StepImages,
        *,
        rank: int,
        trusted: bool,
        kept: Mapping[str, Any] | None,
    ) -> None:
        """`kept`: the decoded non-tensor part of this rank's own image, if it was decoded already.
        `targets`: the tensors to fill, each with its want."""
        self._images, self._rank, self._trusted = images, rank, trusted
        self.names = SavedTensorFinder(images.index, images.choose_source_rank(rank))
        self.refill = LiveObjectIndex()
        self.targets: list[Tensor] = []
        self._requests: list[TensorRequest] = []
        self._finishers: list[tuple[str, Callable[[], None]]] = []
        self._differences: list[str] = []
        self._trees: dict[int, dict[str, SavedTree]] = {}
        self._kept: dict[int, Mapping[str, Any]] = {} if kept is None else {rank: kept}
        self._made: dict[str, Tensor] = {}
        self._filled: dict[str, tuple[str, SavedTensor | None]] = {}
        self._shared: dict[int, Any] = {}
        self._given: dict[str, Tensor] = {}
        self._lives: dict[str, Live] = {}

    @property
    def is_only_saved_image(self) -> bool:
        """Whether this rank's own image is the only one. It must then hold exactly what is here,
        and nothing else."""
        return self._images.has_only_own_image

    def note_diff(self, text: str) -> None:
        """Note a difference between checkpoint and model."""
        self._differences.append(text)

    def call_after_fill(self, name: str, finish: Callable[[], None]) -> None:
        """Call `finish` once all tensors are filled. `name`: of the component."""
        self._finishers.append((name, finish))

    def plan_fill(self, here: TensorTarget) -> None:
        """Plan to fill a module's tensor in place."""
        saved = self.names.find_saved_tensor(here.name, whole=here.whole)
        first, other = self._first(here, here.name, saved)
        if first == here.name:
            self._request(here, saved)
            self._give(saved, here)
        elif saved is not None and self._are_two(saved, other):
            self.note_diff(f"{here.name}: one tensor with {first} here, but not in the checkpoint")

    def reuse_or_create_tensor(self, name: str, here: TensorTarget | None) -> Tensor | None:
        """The live tensor, to be filled in place, if it is like the saved one; else a new tensor to
        replace it."""
        if here is None:
            return self._kept_anywhere(name)
        saved = self.names.find_saved_tensor(name, whole=here.whole)
        if saved is not None and here.whole and saved.name in self._given:
            return self._given[saved.name]
        first, other = self._first(here, name, saved)
        if saved is not None and first != name and other is saved:  # tied, and already planned
            return here.live
        if saved is not None and here.whole:
            dtype = DTYPE_OF[saved.dtype]
            same = saved.shape == here.shape and dtype == here.tensor.dtype
            if not same or self._were_two(saved, other):
                made = self.make_tensor(saved, here.tensor.device)
                return self._given.setdefault(saved.name, made)
        self._request(here._replace(name=name), saved)
        self._give(saved, here)
        return here.live

    def _kept_anywhere(self, name: str) -> Tensor | None:
        """The live tensor of another place of a tied tensor, because this place has none."""
        saved = self.names.find_saved_tensor(name)
        if saved is None:
            return self.fresh(name)  # notes the difference
        if saved.name not in self._given and saved.name in self._tied:
            for tensor, (component, path) in self._places.items():
                here = self._lives[component].get(path)
                if (
                    here is not None
                    and self.names.find_saved_tensor(split_local_name(tensor)[0]) is saved
                ):
                    return self.reuse_or_create_tensor(split_local_name(tensor)[0], here)
        if saved.name not in self._given:
            self._given[saved.name] = self.make_tensor(saved, None)
        return self._given[saved.name]

    @cached_property
    def _tied(self) -> frozenset[str]:
        """The saved tensors that have several names."""
        return frozenset(self._images.index.aliases.values())

    def _request(self, target: TensorTarget, saved: SavedTensor | None) -> None:
        dtype = target.tensor.dtype
        if saved is None:
            here = describe_tensor(target.shape, dtype)
            self.note_diff(f"{target.name}: {here} here, missing in the checkpoint")
        elif saved.shape != target.shape or DTYPE_OF[saved.dtype] != dtype:
            self.note_diff(
                f"{target.name}: {describe_saved(saved)} in the checkpoint,"
                f" {describe_tensor(target.shape, dtype)} here"
            )
        else:
            for tensor, box in boxes_of_tensor(target.tensor, target.offsets, target.flat):
                self.targets.append(tensor)
                self._requests.append(TensorRequest(saved.name, box, own=target.own))

    def _give(self, saved: SavedTensor | None, here: TensorTarget) -> None:
        """Note that this live tensor holds the whole saved one: whatever was tied to it, or was a
        view of it, is so again."""
        if saved is not None and here.whole and here.live is not None:
            self._given.setdefault(saved.name, here.live)

    def _base(self, name: str) -> Tensor | None:
        """The tensor that holds the memory of views: a live one, filled in place, or a new one."""
        component, path = self._places.get(name, ("", ()))
        return self.reuse_or_create_tensor(
            split_local_name(name)[0], self._lives.get(component, {}).get(path)
        )

    @cached_property
    def _places(self) -> dict[str, tuple[str, Path]]:
        """Where in a dict each saved tensor stands itself, and not a view of it."""
        trees = self._trees_of(self._images.choose_source_rank(self._rank))
        return {
            tensor: (name, path)
            for name in self._lives.keys() & trees.keys()
            for path, tensor in iterate_non_view_tensors(trees[name].node, trees[name].values)
        }

    def new_tensor(self, name: str, here: TensorTarget | None) -> Tensor | None:
        """A new tensor for the saved one of that name, as `torch.load` makes it: with the saved
        shape and dtype. If there is a live tensor, it is placed like that."""
        saved = None if here is None else self.names.find_saved_tensor(name, whole=here.whole)
        if here is None or saved is None:
            return self.fresh(name)
        return self.make_tensor(saved, here.tensor.device, like=here.live, own=here.own)

    def fresh(self, name: str) -> Tensor | None:
        """A new tensor for the saved tensor of that name, see `made`; None if there is no such
        saved tensor."""
        saved = self.names.find_saved_tensor(name)
        if saved is None:
            self.note_diff(f"{name}: named by the checkpoint's tree, but in none of its images")
            return None
        return self.make_tensor(saved, None)

    def make_tensor(
        self,
        saved: SavedTensor,
        device: torch.device | None,
        *,
        like: Tensor | None = None,
        own: bool = True,
    ) -> Tensor:
        """A new tensor to be filled.

        If `like` is a DTensor of the saved shape, the new tensor is placed like it and gets a box
        of the saved tensor. Otherwise it gets the whole saved tensor. `own`: see `TensorRequest`.
        """
        if like is not None and sharding.is_dtensor(like) and saved.shape == tuple(like.shape):
            sharing = sharding.sharing_of(like, saved.name)
            shape = tuple(sharding.local_tensor_of(like).shape)
            local = self._new(saved, shape, sharing.offsets, device, flat=sharing.flat)
            return sharding.dtensor_like(like, local)
        tensor = self._made.get(saved.name)
        if tensor is None:
            at = (0,) * len(saved.shape)
            tensor = self._made[saved.name] = self._new(saved, saved.shape, at, device, own=own)
        return tensor

    def _new(
        self,
        saved: SavedTensor,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        device: torch.device | None,
        *,
        own: bool = False,
        flat: FlatBox | None = None,
    ) -> Tensor:
        """A new tensor for a box of a saved tensor."""
        device = parse_device_name(saved.device) if device is None else device
        strides = saved.strides if shape == saved.shape else None
        order = saved.dim_order if flat is None else None
        tensor = empty_tensor(
            shape, order, strides=strides, dtype=DTYPE_OF[saved.dtype], device=device
        )
        copying.prefer_huge_pages(tensor)
        for part, box in boxes_of_tensor(tensor, offsets, flat):
            self.targets.append(part)
            self._requests.append(TensorRequest(saved.name, box, own=own))
        return tensor

    def build_part(
        self, saved: SavedTree, node: Node, tensor: Callable[[Path, str], Tensor | None]
    ) -> Any:
        """A part of a saved tree over tensors that `copy` fills. `tensor` provides these
        tensors."""
        leaves = list(leaves_of(node))
        names = [leaf[1] for _, leaf in leaves if leaf[0] == "t"]
        values = saved.values if len(names) < len(leaves) else []
        made = {
            name: tensor(path, split_local_name(name)[0])
            for path, name in iterate_non_view_tensors(node, values)
        }
        made |= {name: self._base(name) for name in names if name not in made}
        # raises if it makes no sense
        return build_tree(node, made.__getitem__, values.__getitem__, self._shared)

    def _first(
        self, target: TensorTarget, name: str, saved: SavedTensor | None
    ) -> tuple[str, SavedTensor | None]:
        """The name and saved tensor under which this live tensor was first planned. If this is its
        first use, it is planned under `name` with `saved`."""
        return self._filled.setdefault(target.first, (name, saved))

    def _are_two(self, first: SavedTensor, other: SavedTensor | None) -> bool:
        """Whether `one` and `other` are different tensors in the checkpoint.

        They are different if a rank that has both did not find them to be one tensor, and their
        bytes differ as far as can be seen. Stages of a pipeline may each have a copy of a tied
        weight; these copies are equal.
        """
        if other is None or first.name == other.name:
            return False
        here, there = _spans(first), _spans(other)
        for rank in here.keys() & there.keys():
            flat = self._images.mapped_bytes(rank)
            if flat is None or not torch.equal(flat[here[rank]], flat[there[rank]]):
                return True
        return False

    def _were_two(self, first: SavedTensor, other: SavedTensor | None) -> bool:
        """The same of what is no module's, which may be two again: equal bytes do not make it one,
        where a rank had both."""
        if other is None or first.name == other.name:
            return False
        return not _spans(first).keys().isdisjoint(_spans(other)) or self._are_two(first, other)

    def find_on_other_ranks(self, name: str, key: Any) -> tuple[SavedTree, Node] | None:
        """What another saved rank has under this key of a component; None if none has it."""
        index = self._images.index
        for rank in range(0 if self.is_only_saved_image else index.world):
            tree = None
            if rank not in index.absent and rank not in index.left_out:
                tree = self.find_saved_tree(rank, name)
            node = None if tree is None else dict(tree.branches_of(tree.node)).get(key)
            if tree is not None and node is not None:
                return tree, node
        return None

    def find_saved_tree(self, rank: int, name: str) -> SavedTree | None:
        """The tree of a component in the image of a saved rank; None if the image has none."""
        return self._trees_of(rank).get(name)

    def _trees_of(self, rank: int) -> dict[str, SavedTree]:
        if rank not in self._trees:
            branches = parse_skeleton(self._images.skeleton(rank))
            self._trees[rank] = {
                name: SavedTree(
                    node,
                    lambda: values_from_extras(self._extras(rank)),
                    functools.partial(self._metadata, rank, name),
                )
                for name, node in branches.items()
            }
        return self._trees[rank]

    def _extras(self, rank: int) -> Mapping[str, Any]:
        """Everything in the image of a saved rank that is not a tensor."""
        if rank not in self._kept:
            kept = extras_codec.decode(self._images.extras(rank), trusted=self._trusted)
            values_from_extras(kept)  # raises if keepstep did not make it
            self._kept[rank] = kept
        return self._kept[rank]

    def _metadata(self, rank: int, name: str) -> Mapping[str, Any] | None:
        return decode_state_dict_metadata(self._extras(rank)).get(name, {})


def iterate_non_view_tensors(node: Node, values: Sequence[Any]) -> Iterator[tuple[Path, str]]:
    """The paths and names of tensors that are not views of other ones."""
    views: set[Path] = set()
    for path, (kind, at) in leaves_of(node):
        if kind == "v" and type(values[at]) is ViewForm:
            views.add(path)
        elif kind == "t" and path not in views:
            yield path, at


def _spans(saved: SavedTensor) -> dict[int, slice]:
    """The bytes of a saved tensor in the image of each rank that holds any of it: from the first of
    its rows there to the last, which are adjacent."""
    itemsize = DTYPE_OF[saved.dtype].itemsize
    sizes = (saved.box_sizes.prod(dim=1) * itemsize).tolist()
    found: dict[int, slice] = {}
    for rank, begin, size in zip(
        saved.box_ranks.tolist(), saved.begins.tolist(), sizes, strict=True
    ):
        if size:
            known = found.get(rank, slice(begin, begin + size))
            found[rank] = slice(min(known.start, begin), max(known.stop, begin + size))
    return found
