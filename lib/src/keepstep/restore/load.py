"""What modules, optimizers, dicts and schedulers want from a step that others saved.

Tensors come by name and box, from whatever images hold them. Values (parameter groups, a
scheduler's counters, plain dicts) come from the saved rank of the same number, or stand-ins of it.
Everything is compared before anything is changed: a MismatchError lists all differences at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.client import pages
from keepstep.image import extras
from keepstep.restore import transfer
from keepstep.restore.boxes import Saved
from keepstep.restore.images import Images
from keepstep.restore.optimizers import OptimizerLoader
from keepstep.restore.pairing import group_numbers
from keepstep.restore.plan import Want, make
from keepstep.restore.targets import (
    Here,
    Live,
    Names,
    SavedTree,
    Target,
    base_of,
    describe,
    describe_saved,
    raise_differences,
    target_of,
)
from keepstep.state.dtypes import DTYPE_OF
from keepstep.state.leaves import (
    Taken,
    arrays_of,
    build,
    device_of,
    empty,
    is_extra,
    leaves_of,
    parse,
    put_back,
    values_of,
)
from keepstep.state.wrappers import is_zero, tree_of, unwrap


class Loader:
    """One rank's share of a restore into another world or layout.

    `plan` changes nothing; `unused` says what it left aside; `copy` fills tensors, and `finish`
    hands each component its values. `rng`: the random states of the saved rank of the same number,
    None when there is none.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        taken: Taken,
        images: Images,
        *,
        rank: int,
        reader: int | None = None,
    ) -> None:
        """`reader`: see `plan.make`."""
        self._components = components
        self._images = images
        self._rank, self._reader = rank, reader
        self.names = Names(images.index, images.stand_in(rank))
        self._taken = taken
        self._targets: list[Target] = []
        self._wants: list[Want] = []
        self._finishers: list[Callable[[], None]] = []
        self._differences: list[str] = []
        self._trees: dict[int, dict[str, SavedTree]] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._made: dict[str, Tensor] = {}
        self._filled: dict[str, tuple[str, Saved | None]] = {}
        self.rng: dict[str, Any] | None = None

    def plan(self, *, trusted: bool) -> None:
        """Compare and plan. Raises MismatchError, CoverageError, FormatError, SidecarError."""
        self._trusted = trusted
        own = self._images.stand_in(self._rank)
        trees, live = self._trees_of(own), self._live()
        if own == self._rank:
            self.rng = self._kept(own).get("rng")
        for name in sorted(trees.keys() - self._components.keys()):
            self.differ(f"{name}: in the checkpoint, but not given to Checkpointer")
        # modules first: what a dict has of them, too, must not keep their tensors from them
        for name in sorted(self._components, key=self._is_no_module):
            if name in trees:
                component = unwrap(self._components[name])
                self._component(name, component, trees[name], live[name])
            else:
                self.differ(f"{name}: given to Checkpointer, but not in the checkpoint")
        raise_differences(self._differences)
        self._plan = make(
            self._wants,
            self._images.index,
            rank=self._rank,
            nearness=self._images.nearness,
            reader=self._reader,
        )
        # before any rank begins to copy: all ranks of the node then know of each other
        self._images.announce(transfer.chunk_runs(self._plan, self.targets, self._images))

    def unused(self) -> bytes:
        """Names that a module or optimizer here could hold and does not, compressed."""
        keyed = tuple(
            f"{name}."
            for name, component in self._components.items()
            if isinstance(unwrap(component), nn.Module)
        )
        left = sorted(one for one in self.names.bases - self.names.used if one.startswith(keyed))
        return zlib.compress("\n".join(left).encode("utf-8", "surrogatepass"))

    @property
    def targets(self) -> list[Tensor]:
        """What `copy` fills."""
        return [one.tensor for one in self._targets]

    def copy(self) -> int:
        """Fill all tensors; returns the bytes. Raises SidecarError: then some of them are changed,
        see `transfer.run`."""
        try:
            return transfer.run(self._plan, self.targets, self._images)
        except BaseException:
            self._images.retract()
            raise

    def finish(self) -> None:
        """Hand each component its values."""
        for finish in self._finishers:
            finish()
        # finishers hold what holds them: let go of window and slots now, not at some collection
        self._finishers.clear()
        self._images.close()

    def differ(self, text: str) -> None:
        """Note a difference between checkpoint and model."""
        self._differences.append(text)

    def want(self, target: Target) -> None:
        """Fill `target`, if the checkpoint has it, and as it is here."""
        saved = self.names.find(target.name, whole=target.whole)
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
            self._targets.append(target)
            self._wants.append(Want(saved.name, target.box, own=target.own))

    def kept(
        self, name: str, here: Here | None, device: torch.device | None = None
    ) -> Tensor | None:
        """In place where the live tensor is like the saved one, else a new one instead of it."""
        if here is None:
            return self.fresh(name, device)
        target = here.target
        saved = self.names.find(name, whole=target.whole)
        if saved is not None and target.whole:
            dtype = DTYPE_OF[saved.dtype]
            same = saved.shape == target.shape and dtype == target.tensor.dtype
            _, other = self._filled.setdefault(target.name, (name, saved))
            if not same or (other is not None and other.name != saved.name):
                return self.fresh(name, target.tensor.device)
        self.want(replace(target, name=name))
        return here.live

    def fresh(
        self, name: str, device: torch.device | None = None, *, own: bool = True
    ) -> Tensor | None:
        """A new tensor to be filled with all of a saved one; None when there is none. `own`: see
        `Want`."""
        saved = self.names.find(name)
        if saved is None:
            self.differ(f"{name}: named by the checkpoint's tree, but in none of its images")
            return None
        tensor = self._made.get(saved.name)
        if tensor is None:
            tensor = self._made[saved.name] = self.empty(saved, saved.shape, device)
            self.want(Target(name, tensor, (0,) * tensor.dim(), tuple(saved.shape), own=own))
        return tensor

    def empty(
        self, saved: Saved, shape: tuple[int, ...], device: torch.device | None = None
    ) -> Tensor:
        """A new tensor for (a box of) a saved one."""
        device = device_of(saved.device) if device is None else device
        tensor = empty(shape, saved.dim_order, dtype=DTYPE_OF[saved.dtype], device=device)
        pages.prefer_huge_pages(tensor)
        return tensor

    def tree(self, rank: int, name: str) -> SavedTree | None:
        """A component's tree in the image of a saved rank."""
        return self._trees_of(rank).get(name)

    # --- what is there, here and there ---------------------------------------------------------

    def _trees_of(self, rank: int) -> dict[str, SavedTree]:
        if rank not in self._trees:
            branches = parse(self._images.skeleton(rank))
            self._trees[rank] = {
                name: SavedTree(node, lambda: values_of(self._kept(rank)))
                for name, node in branches.items()
            }
        return self._trees[rank]

    def _kept(self, rank: int) -> dict[str, Any]:
        """What is no tensor in the image of a saved rank."""
        if rank not in self._values:
            kept = extras.decode(self._images.extras(rank), trusted=self._trusted)
            values_of(kept)  # or it is not made as ours are
            self._values[rank] = kept
        return self._values[rank]

    def _is_no_module(self, name: str) -> bool:
        return not isinstance(unwrap(self._components[name]), nn.Module)

    def _live(self) -> dict[str, Live]:
        """What each component has now, by name; tied tensors have one target."""
        targets = {
            leaf.name: Here(target_of(leaf), leaf.live, base_of(leaf.name)[0])
            for leaf in self._taken.tensors
            if not leaf.fresh
        }
        targets |= {
            alias: replace(targets[first], name=base_of(alias)[0])
            for alias, first in self._taken.aliases.items()
            if first in targets
        }
        return {
            str(name): {
                path: targets[leaf[1]]
                for path, leaf in leaves_of(node)
                if leaf[0] == "t" and leaf[1] in targets
            }
            for name, node in self._taken.skeleton[1]
        }

    # --- components ----------------------------------------------------------------------------

    def _component(self, name: str, component: Any, saved: SavedTree, live: Live) -> None:
        if isinstance(component, nn.Module):
            self._module(component, saved, live)
        elif isinstance(component, torch.optim.Optimizer):
            self._optimizer(name, component, saved, live)
        elif isinstance(component, dict):
            tree = self._tree(saved, live)
            self._finishers.append(lambda: put_back(name, component, tree()))
        else:
            tree = self._tree(saved, {})
            self._finishers.append(lambda: component.load_state_dict(tree()))

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, saved: SavedTree, live: Live
    ) -> None:
        groups = group_numbers(saved.without_tensors())
        if groups is None:  # a state_dict of its own making: only its load_state_dict knows
            tree = self._tree(saved, live)
            self._finishers.append(lambda: optimizer.load_state_dict(tree()))
        else:
            movable = not is_zero(self._components[name])
            loader = OptimizerLoader(
                self, self._images, name, optimizer, self._components, movable=movable
            )
            loader.plan(saved, live, rank=self._images.stand_in(self._rank))

    def _module(self, module: nn.Module, saved: SavedTree, live: Live) -> None:
        for path, here in live.items():
            if is_extra(path):
                continue
            saved_as = self.names.find(here.name, whole=here.target.whole)
            first = self._filled.setdefault(here.target.name, (here.name, saved_as))
            if first[0] == here.name:
                self.want(replace(here.target, name=here.name))
            elif saved_as is not None and _are_two(saved_as, first[1]):
                self.differ(
                    f"{here.name}: one tensor with {first[0]} here, but not in the checkpoint"
                )
        keys = {path[0] for path, leaf in leaves_of(saved.node) if leaf[0] == "v" or is_extra(path)}
        if keys:  # extra state: only the module knows where it belongs
            nodes = tuple((key, node) for key, node in saved.node[1] if key in keys)
            tree = self._tree(SavedTree(("d", nodes), lambda: saved.values), {})
            self._finishers.append(lambda: module.load_state_dict({**tree_of(module), **tree()}))

    def _tree(self, saved: SavedTree, live: Live) -> Callable[[], Any]:
        """A saved tree: tensors in place where there are some, else new ones."""
        arrays = set(arrays_of(saved.node))
        made = {
            leaf[1]: self.kept(base_of(leaf[1])[0], None if leaf[1] in arrays else live.get(path))
            for path, leaf in leaves_of(saved.node)
            if leaf[0] == "t"
        }
        tree = build(saved.node, made.__getitem__, saved.values.__getitem__)  # or it makes no sense
        return lambda: tree

    def finish_with(self, finish: Callable[[], None]) -> None:
        """Do this once all tensors are filled."""
        self._finishers.append(finish)


def _are_two(one: Saved, other: Saved | None) -> bool:
    """Whether a rank that has both has not found them to be one. Stages of a pipeline may each
    have a copy of a tied weight; those are equal."""
    if other is None or one.name == other.name:
        return False
    ranks = [set(it.ranks[(it.sizes > 0).all(1)].tolist()) for it in (one, other)]
    return bool(ranks[0] & ranks[1])


def check_unused(everyone: Sequence[bytes]) -> None:
    """Raises MismatchError for names that no rank has a place for; `everyone`: all `unused()`."""
    left: set[str] | None = None
    for one in everyone:
        names = set(zlib.decompress(one).decode("utf-8", "surrogatepass").split("\n")) - {""}
        left = names if left is None else left & names
    raise_differences([f"{one}: in the checkpoint, missing here" for one in sorted(left or ())])
