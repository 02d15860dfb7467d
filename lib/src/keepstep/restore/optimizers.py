"""Optimizer state from a step that other ranks saved: found by the names of its parameters.

Other ranks (pipeline stages, sharded optimizers) number their parameters differently, so state is
stored under the parameter's own name: `optimizer.state.model.head.weight.exp_avg`. The tree of a
parameter's state, and everything in it that is not a tensor, comes from the image whose values this
rank takes, or else from an image that has it. State that does not exist yet is made, and placed
like its parameter. A parameter that no module here has is named by its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepstep.restore.boxes import Saved
from keepstep.restore.images import Images
from keepstep.restore.pairing import (
    bring_in_order,
    is_capturable,
    live_numbers,
    load_exactly,
    loads_in_its_own_way,
    parameter_names,
    state_device,
)
from keepstep.restore.targets import Live, Path, SavedTree, Target, describe_saved
from keepstep.state import sharding
from keepstep.state.leaves import Node
from keepstep.state.refill import pair_generators, place_generators

if TYPE_CHECKING:
    from keepstep.restore.load import Loader

_Groups = Sequence[Sequence[int]]


class OptimizerLoader:
    """Plans the restore of one optimizer for a `Loader`."""

    def __init__(
        self,
        loader: Loader,
        images: Images,
        name: str,
        optimizer: torch.optim.Optimizer,
        components: Mapping[str, Any],
        *,
        movable: bool,
    ) -> None:
        """`movable`: whether the optimizer's groups may be reordered."""
        self._loader, self._images, self._name, self._optimizer = loader, images, name, optimizer
        self._movable = movable
        self._is_own = loads_in_its_own_way(optimizer)
        self._names = parameter_names(components)
        self._called: dict[int, list[str]] = {}
        for path, parameter in self._names.items():
            self._called.setdefault(id(parameter), []).append(path)
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._at = {id(one): at for at, one in enumerate(self._parameters)}
        self._state: list[tuple[Any, bool, Any]] = []
        self._found: set[int] = set()

    def plan(self, saved: SavedTree, groups: _Groups, live: Live, *, rank: int) -> None:
        """Compare and plan; the loader notes the differences.

        `saved`: the tree in the image of saved rank `rank`, whose values this rank takes. `groups`:
        the numbers of the parameters in each group.
        """
        names = self._saved_names(rank)
        numbers = live_numbers(self._parameters, groups, names, self._names)
        self._check_parameters(groups, names, numbers)
        order = self._order(groups, numbers)
        if order is None:
            return
        count = sum(map(len, groups))
        branches = dict(saved.branches(saved.node))
        for key, node in saved.branches(branches["state"]):
            if type(key) is int and key in numbers:
                self._parameter(numbers[key], saved, node, live)
            elif type(key) is not int or not 0 <= key < count:
                self._other(key, saved, node, live)
        if not self._loader.alone:
            self._state_of_others(live)
        position = {at: number for number, at in numbers.items()}
        members = [self._members(at, position) for at in order]
        known = [self._is_known(at, position) for at in order]
        options = self._options(saved, branches["param_groups"], live, order)
        live_groups = [self._optimizer.param_groups[at] for at in order]
        pair_generators(self._loader.refill, live_groups, options)
        more = {
            key: self._more(key, saved, node, live)
            for key, node in branches.items()
            if key not in ("state", "param_groups")
        }
        keys = list(branches)
        self._loader.finish_with(
            self._name, lambda: self._finish(keys, more, options, order, members, known)
        )

    # --- pairing of parameters and groups ------------------------------------------------------

    def _saved_names(self, rank: int) -> dict[int, str]:
        """The names of the saved parameters by their numbers, as the image of `rank` lists them."""
        listed = self._images.parameters(rank, self._name)
        return {number: name for number, (name, _) in enumerate(listed)}

    def _check_parameters(
        self, groups: _Groups, saved: Mapping[int, str], numbers: Mapping[int, int]
    ) -> None:
        """Compare the parameters with those that any image lists, because each image may have only
        a part of them. This rank's own image alone must have all of them, and no others.
        """
        shapes = dict(self._images.all_parameters(self._name))
        for at, parameter in enumerate(self._parameters):
            names = self._called.get(id(parameter), [str(at)])
            saved_as = next((one for one in names if one in shapes), None)
            if saved_as is None and shapes:
                self._loader.differ(
                    f"{self._name}: has the parameter {names[0]} here, but not in the checkpoint"
                )
            elif saved_as is not None and shapes[saved_as] != tuple(parameter.shape):
                self._loader.differ(
                    f"{self._name}: its parameter {saved_as}: {list(shapes[saved_as])} in the"
                    f" checkpoint, {list(parameter.shape)} here"
                )
        if self._loader.alone:
            for number in (one for group in groups for one in group if one not in numbers):
                name = saved.get(number, number)
                self._loader.differ(
                    f"{self._name}: has the parameter {name} in the checkpoint, but not here"
                )

    def _order(self, groups: _Groups, numbers: Mapping[int, int]) -> list[int] | None:
        """The live group of each saved group; None after noting a difference."""
        sizes = [len(one) for one in groups]
        here = [len(one["params"]) for one in self._optimizer.param_groups]
        order = self._pairs(groups, here, numbers)
        # by name, each rank may have a part of the parameters; by number, it must have all
        if order is None or (sizes != [here[at] for at in order] and self._is_numbered()):
            self._loader.differ(
                f"{self._name}: parameter groups of {sizes} parameters in the checkpoint,"
                f" of {here} here, or of other parameters"
            )
            return None
        if not self._movable and order != list(range(len(order))):
            self._loader.differ(f"{self._name}: its parameter groups come in another order here")
            return None
        return order

    def _pairs(
        self, groups: _Groups, here: Sequence[int], numbers: Mapping[int, int]
    ) -> list[int] | None:
        group_at = [at for at, size in enumerate(here) for _ in range(size)]
        order: list[int | None] = []
        for saved in groups:
            found = {group_at[numbers[one]] for one in saved if one in numbers}
            if len(found) > 1:
                return None
            order.append(found.pop() if found else None)
        # a group that shares no parameter with a live one can only be matched by its place
        left = (at for at in range(len(here)) if at not in order)
        pairs = [next(left, -1) if one is None else one for one in order]
        return pairs if sorted(pairs) == list(range(len(here))) else None

    def _is_numbered(self) -> bool:
        return any(id(one) not in self._called for one in self._parameters) or any(
            _is_number(key) for key in self._stored()
        )

    def _stored(self) -> Iterator[str]:
        """The names of saved state, without the prefix before the parameter's name."""
        prefix = f"{self._name}.state."
        for name in sorted(self._loader.names.bases):
            if name.startswith(prefix):
                yield name[len(prefix) :]

    def _members(self, group: int, position: Mapping[int, int]) -> list[Tensor]:
        """The parameters of a live group in the order of the checkpoint, if that is known for all
        of them; else in their live order.
        """
        members = self._optimizer.param_groups[group]["params"]
        if not self._is_known(group, position):
            return list(members)
        places = [position[self._at[id(one)]] for one in members]
        return [members[at] for at in sorted(range(len(members)), key=lambda at: places[at])]

    def _is_known(self, group: int, position: Mapping[int, int]) -> bool:
        """Whether the place of each parameter of a live group in the checkpoint is known."""
        members = self._optimizer.param_groups[group]["params"]
        return all(self._at[id(one)] in position for one in members)

    # --- state ---------------------------------------------------------------------------------

    def _state_of_others(self, live: Live) -> None:
        """Plan the state of parameters that have none in the image whose values this rank takes."""
        missing: dict[int, int] = {}
        for stored in self._stored():
            at = self._owner(stored)
            if at is None and _is_number(stored):
                self._loader.differ(
                    f"{self._name}.state.{stored}: the optimizer here has"
                    f" {len(self._parameters)} parameters"
                )
            elif at is not None and at not in self._found and at not in missing:
                saved = self._loader.names.find(f"{self._name}.state.{stored}")
                assert saved is not None, "a name of the index itself"
                missing[at] = int(saved.ranks.min())
        for at, rank in missing.items():
            self._from(rank, at, live)

    def _owner(self, stored: str) -> int | None:
        """The live parameter whose name is the longest prefix of a stored name; None if there is
        none.
        """
        key = stored
        while key:
            parameter = self._names.get(key)
            if parameter is not None:
                return self._at.get(id(parameter))
            if key.isdigit() and int(key) < len(self._parameters):
                return int(key)
            key = key.rpartition(".")[0]
        return None

    def _from(self, rank: int, at: int, live: Live) -> None:
        saved = self._loader.tree(rank, self._name)
        state = None if saved is None else dict(saved.branches(saved.node)).get("state")
        if saved is None or state is None:
            return
        names = self._saved_names(rank)
        for key, node in saved.branches(state):
            name = names.get(key)
            if name is not None and self._owner(name) == at:
                self._parameter(at, saved, node, live)

    def _parameter(self, at: int, saved: SavedTree, node: Node, live: Live) -> None:
        """Plan the state of one parameter, from its node in a saved tree."""
        parameter = self._parameters[at]
        sharded, home = sharding.is_dtensor(parameter), self._home(parameter)

        def tensor(path: Path, name: str) -> Tensor | None:
            here = live.get(("state", at, *path))
            if here is not None:
                return self._kept(name, here)
            found = self._loader.names.find(name)
            if found is None:
                return self._loader.fresh(name)  # notes the difference
            if sharded and self._is_unplaced(name, found, parameter):
                return None
            device = state_device(
                found.device,
                parameter.device,
                home=home,
                counter=path == ("step",) and not is_capturable(self._optimizer, at),
            )
            # replicas of unsharded state are bit-equal, so all ranks of a node take the same one
            like = parameter if sharded else None
            return self._loader.made(found, device, like=like, own=sharded)

        self._found.add(at)
        self._state.append((at, True, self._loader.built(saved, node, tensor)))

    def _is_unplaced(self, name: str, saved: Saved, parameter: Tensor) -> bool:
        """Whether it is unknown which part of this state belongs here. If so, a difference is
        noted.
        """
        if self._loader.alone or saved.shape in ((), tuple(parameter.shape)):
            return False
        self._loader.differ(
            f"{name}: {describe_saved(saved)} in the checkpoint, for a parameter of"
            f" {list(parameter.shape)} that is sharded here: take one optimizer step before"
            " restore(), so that its place is known"
        )
        return True

    def _other(self, key: Any, saved: SavedTree, node: Node, live: Live) -> None:
        """Plan state that belongs to no parameter, under a key that the optimizer chose."""

        def tensor(path: Path, name: str) -> Tensor | None:
            return self._kept(name, live.get(("state", key, *path)))

        self._state.append((key, False, self._loader.built(saved, node, tensor)))

    def _options(self, saved: SavedTree, node: Node, live: Live, order: Sequence[int]) -> Any:
        """The parameter groups of the checkpoint. An option such as the learning rate may be a
        tensor.
        """

        def tensor(path: Path, name: str) -> Tensor | None:
            return self._kept(name, live.get(("param_groups", order[path[0]], *path[1:])))

        return self._loader.built(saved, node, tensor)

    def _more(self, key: Any, saved: SavedTree, node: Node, live: Live) -> Any:
        """A further branch of the state dict, which the optimizer or a hook of it has added."""

        def tensor(path: Path, name: str) -> Tensor | None:
            return self._kept(name, live.get((key, *path)))

        return self._loader.built(saved, node, tensor)

    def _kept(self, name: str, here: Target | None) -> Tensor | None:
        if self._is_own:
            return self._loader.handed(name, here)
        return self._loader.kept(name, here)

    def _home(self, parameter: Tensor) -> str | None:
        """The device of the parameter when it was saved; None if that is unknown."""
        for name in self._called.get(id(parameter), ()):
            found = self._images.index.find(name)
            if found is not None:
                return found.device
        return None

    def _finish(
        self,
        keys: Sequence[Any],
        more: Mapping[Any, Any],
        groups: list[dict[str, Any]],
        order: Sequence[int],
        members: Sequence[Sequence[Tensor]],
        known: Sequence[bool],
    ) -> None:
        bring_in_order(self._optimizer, order, members)
        numbers = {id(one): at for at, one in enumerate(one for row in members for one in row)}
        state = {
            numbers[id(self._parameters[key])] if of_parameter else key: made
            for key, of_parameter, made in self._state
        }
        merged = []
        for saved, here, named in zip(groups, self._optimizer.param_groups, known, strict=True):
            own = {"params": [numbers[id(one)] for one in here["params"]]}
            if not named:  # of another world, a group here may have other parameters
                saved = {key: one for key, one in saved.items() if key != "param_names"}
            merged.append({**saved, **own})
        branches = {**more, "state": state, "param_groups": merged}
        load_exactly(self._optimizer, {key: branches[key] for key in keys}, own=self._is_own)
        place_generators(self._loader.refill, self._optimizer.param_groups, merged)


def _is_number(stored: str) -> bool:
    """Whether the state is stored under the number of its parameter."""
    return stored.partition(".")[0].isdigit()
