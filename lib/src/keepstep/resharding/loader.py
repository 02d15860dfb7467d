"""What modules, optimizers, dicts and schedulers want from a step that others saved.

Tensors come by name and box, from whatever images hold them. Values (parameter groups, a
scheduler's counters, plain dicts) come from the saved rank of the same number, or stand-ins of it.
Everything is compared before anything is changed: a MismatchError lists all differences at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepstep import pages
from keepstep.dtypes import DTYPE_OF
from keepstep.image import extras
from keepstep.leaves import Taken, build, check_values, leaves_of, parse, values_of
from keepstep.resharding import transfer
from keepstep.resharding.optimizers import OptimizerLoader
from keepstep.resharding.plan import Want, make
from keepstep.resharding.sources import Images
from keepstep.resharding.targets import (
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
from keepstep.wrappers import tree_of, unwrap


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
        self.rng: dict[str, Any] | None = None

    def plan(self, *, trusted: bool) -> None:
        """Compare and plan. Raises MismatchError, CoverageError, FormatError, SidecarError."""
        values = self._saved_values(trusted)
        live = self._live()
        for name in sorted(values.keys() - self._components.keys()):
            self.differ(f"{name}: in the checkpoint, but not given to Checkpointer")
        for name, component in self._components.items():
            if name in values:
                self._component(name, unwrap(component), values[name], live[name])
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

    def fresh(self, name: str, device: torch.device, *, own: bool = True) -> Tensor | None:
        """A new tensor to be filled with all of a saved one; None when there is none. `own`: see
        `Want`."""
        saved = self.names.find(name)
        if saved is None:
            self.differ(f"{name}: named by the checkpoint's tree, but in none of its images")
            return None
        tensor = torch.empty(saved.shape, dtype=DTYPE_OF[saved.dtype], device=device)
        pages.prefer_huge_pages(tensor)
        self.want(Target(name, tensor, (0,) * tensor.dim(), tuple(saved.shape), own=own))
        return tensor

    # --- what is there, here and there ---------------------------------------------------------

    def _saved_values(self, trusted: bool) -> dict[str, SavedTree]:
        rank = self._images.stand_in(self._rank)
        kept = extras.decode(self._images.extras(rank), trusted=trusted)
        values = values_of(kept)
        if rank == self._rank:
            self.rng = kept.get("rng")
        branches = parse(self._images.skeleton(rank))
        for node in branches.values():
            check_values(node, count=len(values))
        return {name: SavedTree(node, values) for name, node in branches.items()}

    def _live(self) -> dict[str, Live]:
        """What each component has now, by name; tied tensors have one target."""
        targets = {
            leaf.name: (target_of(leaf), leaf.live)
            for leaf in self._taken.tensors
            if not leaf.fresh
        }
        targets |= {
            alias: targets[first]
            for alias, first in self._taken.aliases.items()
            if first in targets
        }
        return {
            str(name): {
                base_of(leaf[1])[0]: targets[leaf[1]]
                for _, leaf in leaves_of(node)
                if leaf[0] == "t" and leaf[1] in targets
            }
            for name, node in self._taken.skeleton[1]
        }

    # --- components ----------------------------------------------------------------------------

    def _component(self, name: str, component: Any, saved: SavedTree, live: Live) -> None:
        if isinstance(component, nn.Module):
            self._module(component, saved, live)
        elif isinstance(component, torch.optim.Optimizer):
            OptimizerLoader(self, name, component, self._components).plan(saved, live)
        elif isinstance(component, dict):
            tree = self._tree(saved, live)
            self._finishers.append(lambda: merge(component, tree()))
        else:
            tree = self._tree(saved, {})
            self._finishers.append(lambda: component.load_state_dict(tree()))

    def _module(self, module: nn.Module, saved: SavedTree, live: Live) -> None:
        for name, (target, _) in live.items():
            if target.name == name:
                self.want(target)
            else:  # a second name of a tied tensor
                self.names.used.add(name)
        values = {
            path[0]: saved.values[leaf[1]]
            for path, leaf in leaves_of(saved.node)
            if leaf[0] == "v" and len(path) == 1
        }
        if values:  # extra state: only the module knows where it belongs
            self._finishers.append(lambda: module.load_state_dict({**tree_of(module), **values}))

    def _tree(self, saved: SavedTree, live: Live) -> Callable[[], Any]:
        """A saved tree: tensors in place where there are some, else new ones."""
        made: dict[str, Any] = {}
        for _, leaf in leaves_of(saved.node):
            if leaf[0] == "t":
                name, _ = base_of(leaf[1])
                if name in live:
                    target, made[leaf[1]] = live[name]
                    self.want(target)
                else:
                    made[leaf[1]] = self.fresh(name, torch.device("cpu"))
        tree = build(saved.node, made.__getitem__, saved.values.__getitem__)  # or it makes no sense
        return lambda: tree

    def finish_with(self, finish: Callable[[], None]) -> None:
        """Do this once all tensors are filled."""
        self._finishers.append(finish)


def check_unused(everyone: Sequence[bytes]) -> None:
    """Raises MismatchError for names that no rank has a place for; `everyone`: all `unused()`."""
    left: set[str] | None = None
    for one in everyone:
        names = set(zlib.decompress(one).decode("utf-8", "surrogatepass").split("\n")) - {""}
        left = names if left is None else left & names
    raise_differences([f"{one}: in the checkpoint, missing here" for one in sorted(left or ())])


def merge(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Update nested dicts in place, so that whoever holds one sees the restored values."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(live.get(key), dict):
            merge(live[key], value)
        else:
            live[key] = value
