"""Pairs an optimizer's saved parameters with the live ones: by name, whatever their numbers are.

torch numbers the parameters of an optimizer in the order of its groups, and keys the state by these
numbers. Groups that are built from a set, or added in another order, give other numbers. So the
names in the image decide, and shapes must agree. Parameters that belong to no module of the
`Checkpointer` are known only by number.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.state import sharding
from keepstep.state.accelerator import device_of
from keepstep.state.wrappers import unwrap

log = logging.getLogger("keepstep")

_CPU = torch.device("cpu")


def bring_in_order(
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
        log.warning("keepstep: an optimizer's parameter groups come in the order of the save")
        optimizer.param_groups[:] = [live[at] for at in groups]


def is_capturable(optimizer: torch.optim.Optimizer, number: int) -> bool:
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
    origins = (getattr(one, "__module__", None) for one in functions)
    return not all(isinstance(one, str) and one.startswith("torch.optim.") for one in origins)


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, own: bool) -> None:
    """`load_state_dict`, and then every value of the state exactly as it was saved, where torch has
    only cast it.

    torch alone would cast nested values to the parameter's dtype, make other strings of strings,
    and accept no arrays. `own`: what the optimizer itself makes of a value stays.
    """
    kept = state.get("state", {})
    handed = {key: _plain(one, own=own) for key, one in kept.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        optimizer.load_state_dict({**state, "state": handed})
    owners: dict[Any, Any] = dict(
        enumerate(one for group in optimizer.param_groups for one in group["params"])
    )
    for key, one in kept.items():
        owner = owners.get(key, key) if type(key) is int else key
        if owner in optimizer.state:
            loaded = optimizer.state[owner]
            optimizer.state[owner] = _exact(one, handed[key], loaded, own=own)


def group_numbers(tree: Any) -> list[list[int]] | None:
    """The numbers of the parameters in each group of an optimizer's tree, counted from 0. None if
    the tree does not have torch's format.
    """
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    if not isinstance(groups, list) or not isinstance(tree.get("state"), dict):
        return None
    rows = [one.get("params") if isinstance(one, dict) else None for one in groups]
    if not all(isinstance(row, list) for row in rows):
        return None
    numbers = [number for row in rows for number in row or ()]
    return [row or [] for row in rows] if numbers == list(range(len(numbers))) else None


def parameter_names(components: Mapping[str, Any]) -> dict[str, Tensor]:
    """All names (component name and name in the module) of all parameters of the modules."""
    return {
        f"{name}.{path}": parameter
        for name, component in components.items()
        if isinstance(module := unwrap(component), nn.Module)
        for path, parameter in module.named_parameters(remove_duplicate=False)
    }


def state_device(
    saved: str | None, parameter: torch.device, *, home: str | None, counter: bool
) -> torch.device:
    """The device for new state.

    `saved`, `home`: the devices of the state and of its parameter at the save; None for unknown.
    `counter`: whether it is a step counter, which torch.optim by convention leaves on the CPU.
    """
    if saved is None or home is None:
        return _CPU if counter else parameter
    return parameter if saved.partition(":")[0] == home.partition(":")[0] else device_of(saved)


def live_numbers(
    live: Sequence[Tensor],
    groups: Iterable[Sequence[int]],
    saved: Mapping[int, str],
    names: Mapping[str, Tensor],
) -> dict[int, int]:
    """The live number of each saved parameter that has one. `saved`: the names by saved number."""
    at = {id(one): number for number, one in enumerate(live)}
    numbers, unnamed = {}, []
    for number in (one for group in groups for one in group):
        name = saved.get(number)
        parameter = None if name is None else names.get(name)
        if parameter is not None and id(parameter) in at:
            numbers[number] = at[id(parameter)]
        elif name is None or name.isdigit():
            unnamed.append(number)
    taken = set(numbers.values())
    return numbers | {one: one for one in unnamed if one < len(live) and one not in taken}


def _plain(value: Any, *, own: bool) -> Any:
    """A value in a form that torch's load_state_dict can cast. `own`: an optimizer that loads in
    its own way also gets the text that torch would only spoil.
    """
    if isinstance(value, dict):
        return {key: _plain(one, own=own) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one, own=own) for one in value)
    if own and type(value) in (str, bytes, set, frozenset):
        return value
    return value if isinstance(value, Tensor | int | float) else None


def _exact(kept: Any, handed: Any, loaded: Any, *, own: bool) -> Any:
    """`kept`, except where the optimizer made another value of it. `handed`: see `_plain`."""
    if isinstance(kept, dict) and isinstance(loaded, dict):
        if type(kept) is not dict:
            return kept
        exact = {
            key: _exact(one, handed[key], loaded[key], own=own)
            for key, one in kept.items()
            if key in loaded
        }
        return exact | {key: one for key, one in loaded.items() if key not in kept}
    if own:
        return kept if _is_cast(handed, loaded) else loaded
    return kept if isinstance(kept, Tensor) == isinstance(loaded, Tensor) else loaded


def _is_cast(handed: Any, loaded: Any) -> bool:
    """Whether torch's `load_state_dict` alone would have made `loaded` of `handed`."""
    if handed is loaded:
        return True
    if type(handed) is not type(loaded):
        return False
    if isinstance(handed, Tensor):
        return handed.shape == loaded.shape and _same_bits(handed.to(loaded), loaded)
    if isinstance(handed, list | tuple):
        pairs = zip(handed, loaded, strict=False)
        return len(handed) == len(loaded) and all(_is_cast(one, two) for one, two in pairs)
    if isinstance(handed, dict):
        return handed.keys() == loaded.keys() and all(
            _is_cast(one, loaded[key]) for key, one in handed.items()
        )
    if type(handed) is str and loaded.startswith("<generator object "):  # so torch casts a text
        return True
    return bool(handed == loaded)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    left, right = _bits(one), _bits(other)
    return left.shape == right.shape and torch.equal(left, right)


def _bits(tensor: Tensor) -> Tensor:
    local = sharding.local_of(tensor) if sharding.is_dtensor(tensor) else tensor
    return local.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
