"""Optimizer state from a step that other ranks saved: found by the names of its parameters.

Other ranks (pipeline stages, sharded optimizers) number their parameters differently, so state is
stored under the parameter's own name: `optimizer.state.model.head.weight.exp_avg`. The tree of a
parameter's state, and everything in it that is not a tensor, comes from the image whose values this
rank takes, or else from an image that has it. State that does not exist yet is made, and placed
like its parameter. A parameter that no module here has is named by its number.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.restore.fill_plan import SavedTensor
from keepstep.restore.images import StepImages
from keepstep.restore.targets import (
    Live,
    Path,
    SavedTree,
    TensorRestorePlanner,
    TensorTarget,
    describe_saved,
)
from keepstep.state import sharding
from keepstep.state.accelerator import parse_device_name
from keepstep.state.refill import pair_generators, restore_live_generators
from keepstep.state.taken_state import Node
from keepstep.state.wrappers import unwrap_module

log = logging.getLogger("keepstep")

_CPU = torch.device("cpu")

_Groups = Sequence[Sequence[int]]


class OptimizerLoader:
    """Plans the restore of one optimizer for a `Loader`, by its `TensorRestorePlanner`."""

    def __init__(
        self,
        tensors: TensorRestorePlanner,
        images: StepImages,
        name: str,
        optimizer: torch.optim.Optimizer,
        components: Mapping[str, Any],
        *,
        movable: bool,
    ) -> None:
        """`movable`: whether the optimizer's groups may be reordered."""
        self._tensors, self._images, self._name, self._optimizer = tensors, images, name, optimizer
        self._movable = movable
        self._is_own = loads_in_its_own_way(optimizer)
        self._names = map_names_to_parameters(components)
        self._called: dict[int, list[str]] = {}
        for path, parameter in self._names.items():
            self._called.setdefault(id(parameter), []).append(path)
        self._parameters = [param for group in optimizer.param_groups for param in group["params"]]
        self._at = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        self._state: list[tuple[Any, bool, Any]] = []
        self._found: set[int] = set()

    def plan(self, saved: SavedTree, groups: _Groups, live: Live, *, rank: int) -> None:
        """Compare and plan; the differences are noted.

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
        branches = dict(saved.branches_of(saved.node))
        for key, node in saved.branches_of(branches["state"]):
            if type(key) is int and key in numbers:
                self._parameter(numbers[key], saved, node, live)
            elif type(key) is not int or not 0 <= key < count:
                # of no parameter: the optimizer chose the key
                made = self._branch(saved, node, partial(_at, live, ("state", key)))
                self._state.append((key, False, made))
        if not self._tensors.is_only_saved_image:
            self._state_of_others(live)
        position = {at: number for number, at in numbers.items()}
        members = [self._members(at, position) for at in order]
        known = [self._is_known(at, position) for at in order]
        options = self._branch(
            saved,
            branches["param_groups"],
            lambda path: live.get(("param_groups", order[path[0]], *path[1:])),
        )
        live_groups = [self._optimizer.param_groups[at] for at in order]
        pair_generators(self._tensors.refill, live_groups, options)
        more = {  # further branches, which the optimizer or a hook of it has added
            key: self._branch(saved, node, partial(_at, live, (key,)))
            for key, node in branches.items()
            if key not in ("state", "param_groups")
        }
        keys = list(branches)
        self._tensors.call_after_fill(
            self._name, lambda: self._finish(keys, more, options, order, members, known)
        )

    # --- pairing of parameters and groups ------------------------------------------------------

    def _saved_names(self, rank: int) -> dict[int, str]:
        """The names of the saved parameters by their numbers, as the image of `rank` lists them."""
        listed = self._images.read_optimizer_parameters(rank, self._name)
        return {number: name for number, (name, _) in enumerate(listed)}

    def _check_parameters(
        self, groups: _Groups, saved: Mapping[int, str], numbers: Mapping[int, int]
    ) -> None:
        """Compare the parameters with those that any image lists, because each image may have only
        a part of them. This rank's own image alone must have all of them, and no others."""
        shapes = dict(self._images.list_optimizer_parameters(self._name))
        for at, parameter in enumerate(self._parameters):
            names = self._called.get(id(parameter), [str(at)])
            saved_as = next((name for name in names if name in shapes), None)
            if saved_as is None and shapes:
                self._tensors.note_diff(
                    f"{self._name}: has the parameter {names[0]} here, but not in the checkpoint"
                )
            elif saved_as is not None and shapes[saved_as] != tuple(parameter.shape):
                self._tensors.note_diff(
                    f"{self._name}: its parameter {saved_as}: {list(shapes[saved_as])} in the"
                    f" checkpoint, {list(parameter.shape)} here"
                )
        if self._tensors.is_only_saved_image:
            for number in (index for group in groups for index in group if index not in numbers):
                name = saved.get(number, number)
                self._tensors.note_diff(
                    f"{self._name}: has the parameter {name} in the checkpoint, but not here"
                )

    def _order(self, groups: _Groups, numbers: Mapping[int, int]) -> list[int] | None:
        """The live group of each saved group; None after noting a difference."""
        sizes = [len(group) for group in groups]
        here = [len(group["params"]) for group in self._optimizer.param_groups]
        order = self._pairs(groups, here, numbers)
        # by name, each rank may have a part of the parameters; by number, it must have all
        if order is None or (sizes != [here[at] for at in order] and self._is_numbered()):
            self._tensors.note_diff(
                f"{self._name}: parameter groups of {sizes} parameters in the checkpoint,"
                f" of {here} here, or of other parameters"
            )
            return None
        if not self._movable and order != list(range(len(order))):
            self._tensors.note_diff(
                f"{self._name}: its parameter groups come in another order here"
            )
            return None
        return order

    def _pairs(
        self, groups: _Groups, here: Sequence[int], numbers: Mapping[int, int]
    ) -> list[int] | None:
        group_at = [at for at, size in enumerate(here) for _ in range(size)]
        order: list[int | None] = []
        for saved in groups:
            found = {group_at[numbers[index]] for index in saved if index in numbers}
            if len(found) > 1:
                return None
            order.append(found.pop() if found else None)
        # a group that shares no parameter with a live one can only be matched by its place
        left = (at for at in range(len(here)) if at not in order)
        pairs = [next(left, -1) if place is None else place for place in order]
        return pairs if sorted(pairs) == list(range(len(here))) else None

    def _is_numbered(self) -> bool:
        return any(id(parameter) not in self._called for parameter in self._parameters) or any(
            _is_number(key) for key in self._stored()
        )

    def _stored(self) -> Iterator[str]:
        """The names of saved state, without the prefix before the parameter's name."""
        prefix = f"{self._name}.state."
        for name in sorted(self._tensors.names.names_without_rank):
            if name.startswith(prefix):
                yield name[len(prefix) :]

    def _members(self, group: int, position: Mapping[int, int]) -> list[Tensor]:
        """The parameters of a live group in the order of the checkpoint, if that is known for all
        of them; else in their live order."""
        members = self._optimizer.param_groups[group]["params"]
        if not self._is_known(group, position):
            return list(members)
        places = [position[self._at[id(member)]] for member in members]
        return [members[at] for at in sorted(range(len(members)), key=lambda at: places[at])]

    def _is_known(self, group: int, position: Mapping[int, int]) -> bool:
        """Whether the place of each parameter of a live group in the checkpoint is known."""
        members = self._optimizer.param_groups[group]["params"]
        return all(self._at[id(member)] in position for member in members)

    # --- state ---------------------------------------------------------------------------------

    def _state_of_others(self, live: Live) -> None:
        """Plan the state of parameters that have none in the image whose values this rank takes."""
        missing: dict[int, int] = {}
        for stored in self._stored():
            at = self._owner(stored)
            if at is None and _is_number(stored):
                self._tensors.note_diff(
                    f"{self._name}.state.{stored}: the optimizer here has"
                    f" {len(self._parameters)} parameters"
                )
            elif at is not None and at not in self._found and at not in missing:
                saved = self._tensors.names.find_saved_tensor(f"{self._name}.state.{stored}")
                assert saved is not None, "a name of the index itself"
                missing[at] = int(saved.box_ranks.min())
        for at, rank in missing.items():
            self._from(rank, at, live)

    def _owner(self, stored: str) -> int | None:
        """The live parameter whose name is the longest prefix of a stored name; None if there is
        none."""
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
        saved = self._tensors.find_saved_tree(rank, self._name)
        state = None if saved is None else dict(saved.branches_of(saved.node)).get("state")
        if saved is None or state is None:
            return
        names = self._saved_names(rank)
        for key, node in saved.branches_of(state):
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
            found = self._tensors.names.find_saved_tensor(name)
            if found is None:
                return self._tensors.fresh(name)  # notes the difference
            if sharded and self._is_unplaced(name, found, parameter):
                return None
            device = choose_state_device(
                found.device,
                parameter.device,
                home=home,
                counter=path == ("step",) and not is_step_counter_on_device(self._optimizer, at),
            )
            # replicas of unsharded state are bit-equal, so all ranks of a node take the same one
            like = parameter if sharded else None
            return self._tensors.make_tensor(found, device, like=like, own=sharded)

        self._found.add(at)
        self._state.append((at, True, self._tensors.build_part(saved, node, tensor)))

    def _is_unplaced(self, name: str, saved: SavedTensor, parameter: Tensor) -> bool:
        """Whether it is unknown which part of this state belongs here. If so, a difference is
        noted."""
        if self._tensors.is_only_saved_image or saved.shape in ((), tuple(parameter.shape)):
            return False
        self._tensors.note_diff(
            f"{name}: {describe_saved(saved)} in the checkpoint, for a parameter of"
            f" {list(parameter.shape)} that is sharded here: take one optimizer step before"
            " restore(), so that its place is known"
        )
        return True

    def _branch(
        self, saved: SavedTree, node: Node, here: Callable[[Path], TensorTarget | None]
    ) -> Any:
        """A part of the saved tree that holds no state of a parameter. `here`: the live tensor at
        a path in it; an option such as the learning rate may be a tensor."""
        return self._tensors.build_part(
            saved, node, lambda path, name: self._kept(name, here(path))
        )

    def _kept(self, name: str, here: TensorTarget | None) -> Tensor | None:
        if self._is_own:
            return self._tensors.new_tensor(name, here)
        return self._tensors.reuse_or_create_tensor(name, here)

    def _home(self, parameter: Tensor) -> str | None:
        """The device of the parameter when it was saved; None if that is unknown."""
        for name in self._called.get(id(parameter), ()):
            found = self._images.index.find_tensor(name)
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
        reorder_to_checkpoint(self._optimizer, order, members)
        numbers = {
            id(tensor): at for at, tensor in enumerate(tensor for row in members for tensor in row)
        }
        state = {
            numbers[id(self._parameters[key])] if of_parameter else key: made
            for key, of_parameter, made in self._state
        }
        merged = []
        for saved, here, named in zip(groups, self._optimizer.param_groups, known, strict=True):
            own = {"params": [numbers[id(param)] for param in here["params"]]}
            if not named:  # of another world, a group here may have other parameters
                saved = {key: value for key, value in saved.items() if key != "param_names"}
            merged.append({**saved, **own})
        branches = {**more, "state": state, "param_groups": merged}
        tree = {key: branches[key] for key in keys}
        if self._is_own:
            self._optimizer.load_state_dict(tree)
        else:
            load_exactly(self._optimizer, tree)
        restore_live_generators(self._tensors.refill, self._optimizer.param_groups, merged)


def _at(live: Live, prefix: Path, path: Path) -> TensorTarget | None:
    return live.get((*prefix, *path))


def _is_number(stored: str) -> bool:
    """Whether the state is stored under the number of its parameter."""
    return stored.partition(".")[0].isdigit()


# --- pairing ---------------------------------------------------------------------------------
#
# Pairs an optimizer's saved parameters with the live ones: by name, whatever their numbers are.
#
# torch numbers the parameters of an optimizer in the order of its groups, and keys the state by
# these numbers. Groups that are built from a set, or added in another order, give other numbers. So
# the names in the image decide, and shapes must agree. Parameters that belong to no module of the
# `Checkpointer` are known only by number.


def reorder_to_checkpoint(
    optimizer: torch.optim.Optimizer, groups: Sequence[int], members: Sequence[Sequence[Tensor]]
) -> None:
    """Put the groups, and the parameters in them, into the order of the checkpoint.

    Everything that goes by their numbers (a scheduler's rates, the flat vectors of L-BFGS) keeps
    its meaning only in this order. `groups`: the numbers of the live groups, in the order of the
    checkpoint. `members`: the parameters of each.
    """
    live = list(optimizer.param_groups)
    for at, parameters in zip(groups, members, strict=True):
        live[at]["params"][:] = parameters
    if list(groups) != list(range(len(live))):
        log.warning(
            "keepstep: the optimizer's parameter groups now have the order of the save"
            " [restore.groups_reordered]"
        )
        optimizer.param_groups[:] = [live[at] for at in groups]


def is_step_counter_on_device(optimizer: torch.optim.Optimizer, number: int) -> bool:
    """Whether the step counter of that parameter lies, by convention, on the parameter's device."""
    for group in optimizer.param_groups:
        if number < len(group["params"]):
            return bool(group.get("capturable") or group.get("fused"))
        number -= len(group["params"])
    return False


def loads_in_its_own_way(optimizer: torch.optim.Optimizer) -> bool:
    """Whether more runs when it is loaded than torch's own code."""
    functions = (
        optimizer.load_state_dict,
        optimizer.__setstate__,
        *getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values(),
        *getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values(),
    )
    origins = (getattr(function, "__module__", None) for function in functions)
    return not all(
        isinstance(origin, str) and origin.startswith("torch.optim.") for origin in origins
    )


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, and then every value of the state exactly as it was saved.

    torch alone would cast nested values to the parameter's dtype, make other strings of strings,
    and accept no arrays.
    """
    kept = state.get("state", {})
    handed = {key: _plain(value) for key, value in kept.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        optimizer.load_state_dict({**state, "state": handed})
    owners: dict[Any, Any] = dict(
        enumerate(param for group in optimizer.param_groups for param in group["params"])
    )
    for key, value in kept.items():
        owner = owners.get(key, key) if type(key) is int else key
        if owner in optimizer.state:
            optimizer.state[owner] = _exact(value, optimizer.state[owner])


def parameter_numbers_by_group(tree: Any) -> list[list[int]] | None:
    """The numbers of the parameters in each group of an optimizer's tree, counted from 0. None if
    the tree does not have torch's format."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    if not isinstance(groups, list) or not isinstance(tree.get("state"), dict):
        return None
    rows = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(row, list) for row in rows):
        return None
    numbers = [number for row in rows for number in row or ()]
    return [row or [] for row in rows] if numbers == list(range(len(numbers))) else None


def map_names_to_parameters(components: Mapping[str, Any]) -> dict[str, Tensor]:
    """All names (component name and name in the module) of all parameters of the modules."""
    return {
        f"{name}.{path}": parameter
        for name, component in components.items()
        if isinstance(module := unwrap_module(component), nn.Module)
        for path, parameter in module.named_parameters(remove_duplicate=False)
    }


def choose_state_device(
    saved: str | None, parameter: torch.device, *, home: str | None, counter: bool
) -> torch.device:
    """The device for new state.

    `saved`, `home`: the devices of the state and of its parameter at the save; None for unknown.
    `counter`: whether it is a step counter, which torch.optim by convention leaves on the CPU.
    """
    if saved is None or home is None:
        return _CPU if counter else parameter
    return (
        parameter if saved.partition(":")[0] == home.partition(":")[0] else parse_device_name(saved)
    )


def live_numbers(
    live: Sequence[Tensor],
    groups: Iterable[Sequence[int]],
    saved: Mapping[int, str],
    names: Mapping[str, Tensor],
) -> dict[int, int]:
    """The live number of each saved parameter that has one. `saved`: the names by saved number."""
    at = {id(tensor): number for number, tensor in enumerate(live)}
    numbers, unnamed = {}, []
    for number in (index for group in groups for index in group):
        name = saved.get(number)
        parameter = None if name is None else names.get(name)
        if parameter is not None and id(parameter) in at:
            numbers[number] = at[id(parameter)]
        elif name is None or name.isdigit():
            unnamed.append(number)
    taken = set(numbers.values())
    return numbers | {index: index for index in unnamed if index < len(live) and index not in taken}


def _plain(value: Any) -> Any:
    """A value in a form that torch's load_state_dict can cast."""
    if isinstance(value, dict):
        return {key: _plain(value) for key, value in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value if isinstance(value, Tensor | int | float) else None


def _exact(kept: Any, loaded: Any) -> Any:
    """`kept`, with what torch has added to it."""
    if type(kept) is dict and isinstance(loaded, dict):
        exact = {key: _exact(value, loaded[key]) for key, value in kept.items() if key in loaded}
        return exact | {key: value for key, value in loaded.items() if key not in kept}
    if isinstance(kept, dict):
        return kept
    return kept if isinstance(kept, Tensor) == isinstance(loaded, Tensor) else loaded
