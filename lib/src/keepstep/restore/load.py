"""Loads a step into modules, optimizers, dicts and schedulers; every restore goes this way.

Tensors are found by name and box, in whatever images hold them: only in this rank's own image, if
it fits (`alone`), else in those of all ranks that saved. Values (parameter groups, a scheduler's
counters, plain dicts) come from the saved rank of the same number, or from its stand-in. Everything
is compared before anything is changed: one MismatchError lists all differences.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.client import copying
from keepstep.errors import KeepstepError, MismatchError
from keepstep.image import base_of, extras
from keepstep.image.arrays import ArrayForm
from keepstep.image.forms import ViewForm
from keepstep.restore import transfer
from keepstep.restore.boxes import Box, Saved
from keepstep.restore.images import Images
from keepstep.restore.modules import ModuleLoader
from keepstep.restore.optimizers import OptimizerLoader
from keepstep.restore.pairing import group_numbers
from keepstep.restore.plan import Want, make
from keepstep.restore.targets import (
    ADVICE,
    Live,
    Names,
    Path,
    SavedTree,
    Target,
    describe,
    describe_saved,
    raise_differences,
    target_of,
)
from keepstep.state import sharding
from keepstep.state.accelerator import device_of
from keepstep.state.dtypes import DTYPE_OF
from keepstep.state.leaves import (
    Node,
    Taken,
    build,
    empty,
    formed_tensors,
    leaves_of,
    metadata_of,
    parse,
    values_of,
)
from keepstep.state.refill import Refill, put_back
from keepstep.state.rng import is_generator, suits
from keepstep.state.wrappers import is_zero, unwrap
from keepstep.wire.trainer import ChunkRun


class Loader:
    """One rank's share of a restore.

    `plan` changes nothing, `unused` gives the saved names that it has no place for, `copy` fills
    tensors, and `finish` hands each component its values. `difference`: what was known of replicas
    that differ when the step was saved. `rng`: the random states of the saved
    rank of the same number; None if there are none.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        taken: Taken,
        images: Images,
        *,
        rank: int,
        reader: int | None = None,
        trusted: bool = False,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """`reader`: see `plan.make`. `kept`: the decoded non-tensor part of this rank's own image,
        if it was decoded already.
        """
        self._components = components
        self._images = images
        self._rank, self._reader, self._trusted = rank, reader, trusted
        self.names = Names(images.index, images.stand_in(rank))
        self._taken = taken
        self._targets: list[Tensor] = []
        self._wants: list[Want] = []
        self._finishers: list[tuple[str, Callable[[], None]]] = []
        self._differences: list[str] = []
        self._trees: dict[int, dict[str, SavedTree]] = {}
        self._kept: dict[int, Mapping[str, Any]] = {} if kept is None else {rank: kept}
        self._made: dict[str, Tensor] = {}
        self._filled: dict[str, tuple[str, Saved | None]] = {}
        self.rng: dict[str, Any] | None = None
        self.refill = Refill()
        self._shared: dict[int, Any] = {}
        self._given: dict[str, Tensor] = {}
        self._lives: dict[str, Live] = {}
        self.difference = ""

    @property
    def alone(self) -> bool:
        """Whether this rank's own image is the only one. It must then hold exactly what is here,
        and nothing else.
        """
        return self._images.alone

    def plan(self, *, whole: bool = True) -> None:
        """Compare and plan. Raises MismatchError, CoverageError, FormatError, SidecarError.

        `whole` False: the step may have components that are not here, and the other way round.
        """
        own = self._images.stand_in(self._rank)
        trees, live = self._trees_of(own), self._live()
        self._lives = {name: live[name] for name in live if self._is_refilled(name)}
        if own == self._rank:
            self.rng = self._extras(own).get("rng")
            self.difference = str(self._extras(own).get("difference", ""))
        for name in sorted(trees.keys() - self._components.keys()) if whole else ():
            self.differ(f"{name}: in the checkpoint, but not given to Checkpointer")
        keys = self._live_keys()
        # modules first: a dict may hold the same tensors, and must not keep them from the modules.
        # Then in the order of the save: what stands in two places is found at its first place
        order = {name: at for at, name in enumerate(trees)}
        names = sorted(self._components, key=lambda name: order.get(name, len(order)))
        for name in sorted(names, key=self._is_no_module):
            if name in trees:
                component = unwrap(self._components[name])
                self._component(name, component, trees[name], live.get(name, {}), keys.get(name))
            elif whole:
                self.differ(f"{name}: given to Checkpointer, but not in the checkpoint")
        if self.alone:
            for name in self._unused():
                self.differ(_missing(name))
        raise_differences(self._differences)
        self._plan = make(
            self._wants,
            self._images.index,
            rank=self._rank,
            nearness=self._images.nearness,
            reader=self._reader,
        )
        # announced before any rank begins to copy, so that the ranks of a node know of each other's
        # chunks
        self._images.announce(transfer.chunk_runs(self._plan, self._targets, self._images))

    def _unused(self) -> list[str]:
        """Saved names that a module here could hold and does not."""
        keyed = tuple(f"{name}." for name in self._components if not self._is_no_module(name))
        return sorted(one for one in self.names.unused if one.startswith(keyed))

    def unused(self) -> bytes:
        """The saved names that a module here could hold and does not, compressed. Some other rank
        must have a place for each of them. Empty if this rank's own image was already compared with
        its state.
        """
        if self.alone:
            return b""
        return zlib.compress("\n".join(self._unused()).encode("utf-8", "surrogatepass"))

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that `copy` fills."""
        return self._targets

    def receive(self, chunks: Iterator[tuple[ChunkRun, Tensor]]) -> None:
        """`copy` reads images that are lent from these chunks."""
        self._images.comes(chunks)

    def copy(self) -> int:
        """Fill all tensors; returns the bytes copied.

        Raises SidecarError; some tensors have changed by then, see `transfer.run`.
        """
        try:
            with torch.no_grad():
                return transfer.run(self._plan, self._targets, self._images)
        except BaseException:
            self._images.retract()
            raise

    def finish(self) -> None:
        """Hand each component its values."""
        for name, finish in self._finishers:
            _load(name, finish)
        # the finishers and this loader refer to each other: release window and slots now, not at
        # some later garbage collection
        self._finishers.clear()
        self._images.close()

    def differ(self, text: str) -> None:
        """Note a difference between checkpoint and model."""
        self._differences.append(text)

    def _want(self, target: Target, saved: Saved | None) -> None:
        dtype = target.tensor.dtype
        if saved is None:
            here = describe(target.shape, dtype)
            self.differ(f"{target.name}: {here} here, missing in the checkpoint")
        elif saved.shape != target.shape or DTYPE_OF[saved.dtype] != dtype:
            self.differ(
                f"{target.name}: {describe_saved(saved)} in the checkpoint,"
                f" {describe(target.shape, dtype)} here"
            )
        else:
            self._targets.append(target.tensor)
            box = Box(target.offsets, tuple(target.tensor.shape))
            self._wants.append(Want(saved.name, box, own=target.own))

    def kept(self, name: str, here: Target | None) -> Tensor | None:
        """The live tensor, to be filled in place, if it is like the saved one; else a new tensor to
        replace it.
        """
        if here is None:
            return self._kept_anywhere(name)
        saved = self.names.find(name, whole=here.whole)
        if saved is not None and here.whole and saved.name in self._given:
            return self._given[saved.name]
        first, other = self._first(here, name, saved)
        if saved is not None and first != name and other is saved:  # tied, and already planned
            return here.live
        if saved is not None and here.whole:
            dtype = DTYPE_OF[saved.dtype]
            same = saved.shape == here.shape and dtype == here.tensor.dtype
            if not same or self._were_two(saved, other):
                made = self.made(saved, here.tensor.device)
                return self._given.setdefault(saved.name, made)
        self._want(here._replace(name=name), saved)
        self._give(saved, here)
        return here.live

    def _kept_anywhere(self, name: str) -> Tensor | None:
        """The same where nothing is live: of a tied tensor, another place may have it live."""
        saved = self.names.find(name)
        if saved is None:
            return self.fresh(name)  # notes the difference
        if saved.name not in self._given and saved.name in self._tied:
            for tensor, (component, path) in self._places.items():
                here = self._lives[component].get(path)
                if here is not None and self.names.find(base_of(tensor)[0]) is saved:
                    return self.kept(base_of(tensor)[0], here)
        if saved.name not in self._given:
            self._given[saved.name] = self.made(saved, None)
        return self._given[saved.name]

    @functools.cached_property
    def _tied(self) -> frozenset[str]:
        """The saved tensors that have several names."""
        return frozenset(self._images.index.aliases.values())

    def _give(self, saved: Saved | None, here: Target) -> None:
        """Note that this live tensor holds the whole saved one: whatever was tied to it, or was a
        view of it, is so again.
        """
        if saved is not None and here.whole and here.live is not None:
            self._given.setdefault(saved.name, here.live)

    def _base(self, name: str) -> Tensor | None:
        """The tensor that holds the memory of views: a live one, filled in place, or a new one."""
        component, path = self._places.get(name, ("", ()))
        return self.kept(base_of(name)[0], self._lives.get(component, {}).get(path))

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, Path]]:
        """Where in a dict each saved tensor stands itself, and not a view of it."""
        trees = self._trees_of(self._images.stand_in(self._rank))
        return {
            tensor: (name, path)
            for name in self._lives.keys() & trees.keys()
            for path, tensor in _plain_places(trees[name].node, trees[name].values)
        }

    def handed(self, name: str, here: Target | None) -> Tensor | None:
        """A new tensor for the saved one of that name, as `torch.load` makes it: with the saved
        shape and dtype. If there is a live tensor, it is placed like that.
        """
        saved = None if here is None else self.names.find(name, whole=here.whole)
        if here is None or saved is None:
            return self.fresh(name)
        return self.made(saved, here.tensor.device, like=here.live, own=here.own)

    def fresh(
        self, name: str, device: torch.device | None = None, *, like: Tensor | None = None
    ) -> Tensor | None:
        """A new tensor for the saved tensor of that name, see `made`; None if there is no such
        saved tensor.
        """
        saved = self.names.find(name)
        if saved is None:
            self.differ(f"{name}: named by the checkpoint's tree, but in none of its images")
            return None
        return self.made(saved, device, like=like)

    def made(
        self,
        saved: Saved,
        device: torch.device | None,
        *,
        like: Tensor | None = None,
        own: bool = True,
    ) -> Tensor:
        """A new tensor to be filled.

        If `like` is a DTensor of the saved shape, the new tensor is placed like it and gets a box
        of the saved tensor. Otherwise it gets the whole saved tensor. `own`: see `Want`.
        """
        if like is not None and sharding.is_dtensor(like) and saved.shape == tuple(like.shape):
            sharing = sharding.sharing_of(like, saved.name)
            local = self._new(saved, tuple(sharding.local_of(like).shape), sharing.offsets, device)
            return sharding.like(like, local)
        tensor = self._made.get(saved.name)
        if tensor is None:
            at = (0,) * len(saved.shape)
            tensor = self._made[saved.name] = self._new(saved, saved.shape, at, device, own=own)
        return tensor

    def _new(
        self,
        saved: Saved,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        device: torch.device | None,
        *,
        own: bool = False,
    ) -> Tensor:
        """A new tensor for a box of a saved tensor."""
        device = device_of(saved.device) if device is None else device
        strides = saved.strides if shape == saved.shape else None
        tensor = empty(
            shape, saved.dim_order, strides=strides, dtype=DTYPE_OF[saved.dtype], device=device
        )
        copying.prefer_huge_pages(tensor)
        self._targets.append(tensor)
        self._wants.append(Want(saved.name, Box(offsets, shape), own=own))
        return tensor

    def _first(self, target: Target, name: str, saved: Saved | None) -> tuple[str, Saved | None]:
        """The name and saved tensor under which this live tensor was first planned. If this is its
        first use, it is planned under `name` with `saved`.
        """
        return self._filled.setdefault(target.first, (name, saved))

    def _are_two(self, one: Saved, other: Saved | None) -> bool:
        """Whether `one` and `other` are different tensors in the checkpoint.

        They are different if a rank that has both did not find them to be one tensor, and their
        bytes differ as far as can be seen. Stages of a pipeline may each have a copy of a tied
        weight; these copies are equal.
        """
        if other is None or one.name == other.name:
            return False
        here, there = _spans(one), _spans(other)
        return not all(
            self._same_bytes(rank, here[rank], there[rank]) for rank in here.keys() & there.keys()
        )

    def _were_two(self, one: Saved, other: Saved | None) -> bool:
        """The same of what is no module's, which may be two again: equal bytes do not make it one,
        where a rank had both.
        """
        if other is None or one.name == other.name:
            return False
        return not _spans(one).keys().isdisjoint(_spans(other)) or self._are_two(one, other)

    def _same_bytes(self, rank: int, one: slice, other: slice) -> bool:
        flat = self._images.flat(rank)
        return flat is not None and torch.equal(flat[one], flat[other])

    def elsewhere(self, name: str, key: Any) -> tuple[SavedTree, Node] | None:
        """What another saved rank has under this key of a component; None if none has it."""
        index = self._images.index
        for rank in range(0 if self.alone else index.world):
            tree = None
            if rank not in index.absent and rank not in index.left_out:
                tree = self.tree(rank, name)
            node = None if tree is None else dict(tree.branches(tree.node)).get(key)
            if tree is not None and node is not None:
                return tree, node
        return None

    def tree(self, rank: int, name: str) -> SavedTree | None:
        """The tree of a component in the image of a saved rank; None if the image has none."""
        return self._trees_of(rank).get(name)

    # --- live and saved trees ------------------------------------------------------------------

    def _trees_of(self, rank: int) -> dict[str, SavedTree]:
        if rank not in self._trees:
            branches = parse(self._images.skeleton(rank))
            self._trees[rank] = {
                name: SavedTree(
                    node,
                    lambda: values_of(self._extras(rank)),
                    functools.partial(self._metadata, rank, name),
                )
                for name, node in branches.items()
            }
        return self._trees[rank]

    def _extras(self, rank: int) -> Mapping[str, Any]:
        """Everything in the image of a saved rank that is not a tensor."""
        if rank not in self._kept:
            kept = extras.decode(self._images.extras(rank), trusted=self._trusted)
            values_of(kept)  # raises if keepstep did not make it
            self._kept[rank] = kept
        return self._kept[rank]

    def _is_refilled(self, name: str) -> bool:
        return isinstance(self._components[name], dict)

    def _metadata(self, rank: int, name: str) -> Mapping[str, Any] | None:
        return metadata_of(self._extras(rank)).get(name, {})

    def _is_no_module(self, name: str) -> bool:
        return not isinstance(unwrap(self._components[name]), nn.Module)

    def _live(self) -> dict[str, Live]:
        """The live tensors of each component, by the keys that lead to them."""
        leaves = {leaf.name: leaf for leaf in self._taken.tensors if not leaf.fresh}
        aliases = self._taken.aliases
        live: dict[str, Live] = {}
        for component, node in self._taken.skeleton[1]:
            of_component: Live = {}
            live[component] = of_component
            views = set()
            for path, (kind, name) in leaves_of(node):
                if kind == "v" and type(self._taken.values[name]) is ViewForm:
                    views.add(path)
                if (
                    kind == "t"
                    and path not in views
                    and (leaf := leaves.get(str(aliases.get(name, name)))) is not None
                ):
                    of_component[path] = target_of(leaf, name)
        return live

    def _live_keys(self) -> dict[str, frozenset[Any]]:
        """The keys of each component that was taken."""
        values = self._taken.values
        return {
            name: frozenset(
                values[node[1]] or () if node[0] == "v" else (key for key, _ in node[1])
            )
            for name, node in self._taken.skeleton[1]
            if not self._is_no_module(name)
        }

    # --- components ----------------------------------------------------------------------------

    def _component(
        self,
        name: str,
        component: Any,
        saved: SavedTree,
        live: Live,
        keys: frozenset[Any] | None,
    ) -> None:
        if isinstance(component, nn.Module):
            ModuleLoader(self, name, component).plan(saved, live, keys or frozenset())
        elif isinstance(component, torch.optim.Optimizer):
            self._optimizer(name, component, saved, live)
        elif isinstance(component, dict) or is_generator(component):
            tree = self._tree(saved, live)
            if is_generator(component) and not suits(component, tree):
                self.differ(f"{name}: {_kind(tree)} in the checkpoint, {_kind(component)} here")
            self.refill.pair(component, tree, whatever=True)
            self.finish_with(name, lambda: put_back(name, component, tree, self.refill))
        else:
            tree = self._tree(saved, {})
            self.finish_with(name, lambda: component.load_state_dict(self.refill.placed(tree)))

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, saved: SavedTree, live: Live
    ) -> None:
        groups = group_numbers(saved.without_tensors())
        if groups is None:  # a custom state_dict: only its load_state_dict can read it
            tree = self.built(
                saved, saved.node, lambda path, tensor: self.handed(tensor, live.get(path))
            )
            self.finish_with(name, lambda: optimizer.load_state_dict(tree))
        else:
            movable = not is_zero(self._components[name])
            loader = OptimizerLoader(
                self, self._images, name, optimizer, self._components, movable=movable
            )
            loader.plan(saved, groups, live, rank=self._images.stand_in(self._rank))

    def fill(self, here: Target) -> None:
        """Plan to fill a module's tensor in place."""
        saved = self.names.find(here.name, whole=here.whole)
        first, other = self._first(here, here.name, saved)
        if first == here.name:
            self._want(here, saved)
            self._give(saved, here)
        elif saved is not None and self._are_two(saved, other):
            self.differ(f"{here.name}: one tensor with {first} here, but not in the checkpoint")

    def _tree(self, saved: SavedTree, live: Live) -> Any:
        """A saved tree whose tensors are the live ones, filled in place, where possible, and new
        ones otherwise.
        """
        values = saved.values
        arrays = {
            base_of(name)[0]
            for name, form in formed_tensors(saved.node, values)
            if type(form) is ArrayForm
        }
        return self.built(
            saved,
            saved.node,
            lambda path, name: self.kept(name, None if name in arrays else live.get(path)),
        )

    def built(
        self, saved: SavedTree, node: Node, tensor: Callable[[Path, str], Tensor | None]
    ) -> Any:
        """A part of a saved tree over tensors that `copy` fills. `tensor` provides these
        tensors.
        """
        leaves = list(leaves_of(node))
        names = [leaf[1] for _, leaf in leaves if leaf[0] == "t"]
        values = saved.values if len(names) < len(leaves) else []
        made = {name: tensor(path, base_of(name)[0]) for path, name in _plain_places(node, values)}
        made |= {name: self._base(name) for name in names if name not in made}
        # raises if it makes no sense
        return build(node, made.__getitem__, values.__getitem__, self._shared)

    def finish_with(self, name: str, finish: Callable[[], None]) -> None:
        """Call `finish` once all tensors are filled. `name`: of the component."""
        self._finishers.append((name, finish))


def _load(name: str, finish: Callable[[], None]) -> None:
    try:
        finish()
    except KeepstepError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise MismatchError(
            f"{name}: its load_state_dict() refuses what was saved: {error!r}.\n{ADVICE}"
        ) from error


def _plain_places(node: Node, values: Sequence[Any]) -> Iterator[tuple[Path, str]]:
    """The paths and names of tensors that are not views of other ones."""
    views: set[Path] = set()
    for path, (kind, at) in leaves_of(node):
        if kind == "v" and type(values[at]) is ViewForm:
            views.add(path)
        elif kind == "t" and path not in views:
            yield path, at


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _spans(saved: Saved) -> dict[int, slice]:
    """The bytes of a saved tensor in the image of each rank that holds any of it."""
    itemsize = DTYPE_OF[saved.dtype].itemsize
    sizes = (saved.sizes.prod(dim=1) * itemsize).tolist()
    rows = zip(saved.ranks.tolist(), saved.begins.tolist(), sizes, strict=True)
    return {rank: slice(begin, begin + size) for rank, begin, size in rows if size}


def _missing(name: str) -> str:
    return f"{name}: in the checkpoint, missing here"


def check_unused(everyone: Sequence[bytes]) -> None:
    """Raise MismatchError for names that no rank has a place for. `everyone`: `unused()` of all
    ranks.
    """
    left: set[str] | None = None
    for one in everyone:
        names = set(zlib.decompress(one).decode("utf-8", "surrogatepass").split("\n")) - {""}
        left = names if left is None else left & names
    raise_differences([_missing(one) for one in sorted(left or ())])
