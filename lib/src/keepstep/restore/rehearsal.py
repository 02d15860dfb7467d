"""What a restart must build before `restore()`, and whether it could load what is kept.

Modules and optimizers are compared with the saved step before anything is filled. So whatever they
gained or lost since `restore()` would end in an error at each restart, unless the script builds it
first. It is named while the training still lives (`structure_of`, `structure_changes`).

A component that loads in its own way may refuse its own state. That would show at the first restart
only, and at every one after it. So, before the first step of a run, a deep copy of the component
loads that state once, after it went through our encoding (`check_state_round_trip`). The component
itself is never loaded: a layer that notes "initialized" when it is loaded would keep its initial
weights.

What cannot be copied without touching what the script holds is not rehearsed: hooks that close over
other objects, objects that hold a model or an optimizer, loaders, and copies that would take much
of the free memory.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.errors import UsageError
from keepstep.image import extras_codec
from keepstep.restore.modules import find_custom_load_prefixes
from keepstep.restore.optimizers import loads_in_its_own_way
from keepstep.state import rng
from keepstep.state.taken_state import (
    PLAIN_METADATA,
    Node,
    TakenState,
    build_tree,
    is_module_extra_state,
    leaves_of,
)
from keepstep.state.wrappers import is_known_component, unwrap_module

COMPONENT = "a component"
_OWN = ", unless its own loading does"

Structure = Mapping[str, str]
"""What there is, by name: the shape of a tensor, or the sizes of an optimizer's groups."""


def structure_of(taken: TakenState) -> Structure:
    """The structure of a taken state, without whatever dicts and foreign objects hold, and
    without the foreign objects that were not taken."""
    lives = {leaf.name: leaf.live for leaf in taken.tensors}
    lives |= {alias: lives[name] for alias, name in taken.aliases.items()}
    found: dict[str, str] = {}
    for name, node in taken.skeleton[1]:
        component = unwrap_module(taken.components[name])
        if isinstance(component, nn.Module):
            found |= _of_module(name, component, node, lives)
        elif isinstance(component, torch.optim.Optimizer):
            found |= _of_optimizer(name, component, taken)
    return found


def structure_changes(before: Structure, now: Structure) -> dict[str, str]:
    """What is in one structure and not in the other, by name, as text."""
    found = {name: f"{name} is gone" for name in before.keys() - now.keys()}
    added = tuple(f"{name}." for name in now.keys() - before.keys() if now[name] == COMPONENT)
    for name, here in now.items():
        if name.startswith(added):
            continue
        if name not in before:
            found[name] = f"{name} is new ({here})"
        elif here != before[name]:
            found[name] = f"{name} is {here}, was {before[name].removesuffix(_OWN)}"
    return found


def _of_module(
    name: str, module: nn.Module, node: Node, lives: Mapping[str, Tensor]
) -> dict[str, str]:
    prefixes = find_custom_load_prefixes(module)
    found = {}
    for path, leaf in leaves_of(node):
        if not path or is_module_extra_state(path):
            continue
        shape = _shape(lives[leaf[1]]) if leaf[0] == "t" else "a value"
        if not prefixes or not str(path[0]).startswith(prefixes):
            found[f"{name}.{'.'.join(map(str, path))}"] = shape
        else:  # only whether a key is there, and its shape
            found[f"{name}.{path[0]}"] = f"{shape if len(path) == 1 else 'several'}{_OWN}"
    return found


def _shape(live: Tensor) -> str:
    return f"{live.dtype}{tuple(live.shape)}"


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, taken: TakenState) -> dict[str, str]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return {
        f"{name}'s list of parameter groups": f"of {sizes} parameters",
        **{
            f"{name}'s parameter {path}": str(list(shape)) for path, shape in taken.parameters[name]
        },
    }


_MOST_OF_FREE = 8
"""A copy takes at most this part of the memory that is free."""

_UNCHANGED = (
    *(bool, int, float, str, bytes, type(None), type),
    *(FunctionType, BuiltinFunctionType, ModuleType, logging.Logger),
)
"""What a hook may refer to without changing it."""


def check_state_round_trip(taken: TakenState, *, trusted: bool, models_only: bool = False) -> None:
    """Raise UsageError for a component whose `load_state_dict` refuses what its `state_dict` gave.

    `taken`: the state of the components, which are not asked again. `models_only`: only modules.
    """
    for name, node in taken.skeleton[1]:
        component = unwrap_module(taken.components[name])
        if not _loads_itself(component) or (models_only and not isinstance(component, nn.Module)):
            continue
        before = rng.capture_all_generators()
        try:
            made = _copied(component)
            state = _given(component, taken, name, node, trusted=trusted)
        except Exception:  # a lock, a handle, a process group: it cannot be copied
            rng.apply_generators(before)
            continue
        try:
            if made is not None:
                made.load_state_dict(state)
        except (MemoryError, torch.OutOfMemoryError):
            continue
        except Exception as error:  # foreign code may raise anything
            raise UsageError(
                f"{name}: load_state_dict() refuses what state_dict() gives, so this could be kept,"
                f" but never restored: {type(error).__name__}: {error}. Mend the two methods, or"
                " name a component that gives only what it takes back, such as an adapter"
                " (docs/add-keepstep.md, What cannot be kept)"
            ) from error
        finally:
            rng.apply_generators(before)


def _loads_itself(component: Any) -> bool:
    """Whether code other than torch's own runs when it is loaded, on what it holds itself alone."""
    if isinstance(component, nn.Module | torch.optim.Optimizer):
        if isinstance(component, nn.Module):
            itself = bool(find_custom_load_prefixes(component)) and all(
                map(_is_plain, component.modules())
            )
        else:
            itself = loads_in_its_own_way(component)
        return itself and not any(map(_reaches_out, _hooks(component)))
    if (
        not _is_plain(component)
        or is_known_component(component)
        or hasattr(component, "__iter__")
        or _is_distributed()
    ):
        return False
    origin = getattr(type(component).load_state_dict, "__module__", None) or ""
    return not origin.startswith("torch.") and extras_codec.unpicklable_part(component) is None


def _is_plain(value: Any) -> bool:
    """Whether a deep copy has all that the original has."""
    own = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
    kind, base = type(value), nn.Module if isinstance(value, nn.Module) else object
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in own)


def _is_distributed() -> bool:
    """Whether what foreign code does may wait for other ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _hooks(component: Any) -> Iterator[Any]:
    parts = component.modules() if isinstance(component, nn.Module) else [component]
    for part in parts:
        for name, hooks in vars(part).items():
            if "hooks" in name and isinstance(hooks, dict):
                yield from hooks.values()


def _reaches_out(hook: Any) -> bool:
    """Whether a hook refers to objects that are not copied with what it hangs on."""
    hook = getattr(hook, "hook", hook)  # torch's own wrapper
    if not isinstance(hook, FunctionType):
        return False  # a method is copied with its object
    cells = [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
    named = [hook.__globals__.get(name) for name in hook.__code__.co_names]
    given = [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    return not all(isinstance(value, _UNCHANGED) for value in (*cells, *named, *given))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _copied(component: Any) -> Any:
    """A deep copy; None if it would take too much memory. Tensors that are loaded as torch loads
    them are shared, as they get the values that they have. Raises whatever copying raises."""
    shared = _shared(component)
    sizes = _sizes(tensor for tensor in _tensors_of(component) if id(tensor) not in shared)
    if any(size > _free_bytes(device) // _MOST_OF_FREE for device, size in sizes.items()):
        return None
    if not isinstance(component, torch.optim.Optimizer):
        return copy.deepcopy(component, shared)
    made = object.__new__(type(component))  # an optimizer leaves out hooks when it is copied
    known = {**shared, id(component): made}
    vars(made).update({key: copy.deepcopy(var, known) for key, var in vars(component).items()})
    return made


def _shared(component: Any) -> dict[int, Any]:
    if isinstance(component, torch.optim.Optimizer):
        return {id(param): param for group in component.param_groups for param in group["params"]}
    if not isinstance(component, nn.Module):
        return {}
    prefixes = find_custom_load_prefixes(component)
    tensors = (*component.named_parameters(), *component.named_buffers())
    return {id(tensor): tensor for name, tensor in tensors if not name.startswith(prefixes)}


def _tensors_of(component: Any) -> list[Tensor]:
    if isinstance(component, nn.Module):
        return [*component.parameters(), *component.buffers()]
    values = vars(component).values() if hasattr(component, "__dict__") else ()
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def _sizes(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
    return sizes


def _free_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        free: int = torch.get_device_module(device).mem_get_info(device)[0]
        return free
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    return int(rows["MemAvailable"].split()[0]) * 1024


def _given(component: Any, taken: TakenState, name: str, node: Node, *, trusted: bool) -> Any:
    """What `load_state_dict` would get at a restart: values that were decoded, other tensors."""
    values = extras_codec.decode(
        extras_codec.encode(taken.values, trusted=trusted), trusted=trusted
    )
    live = {leaf.name: leaf.live for leaf in taken.tensors}
    made: dict[str, Tensor] = {}

    def tensor(key: str) -> Tensor:
        first = taken.aliases.get(key, key)
        if first not in made:
            made[first] = live[first].detach().clone()
        return made[first]

    tree = build_tree(node, tensor, values.__getitem__)
    rows = taken.metadata.get(name, {})
    if not isinstance(component, nn.Module) or rows is None:
        return tree
    state: Any = OrderedDict(tree)
    paths = (path for path, _ in component.named_modules(remove_duplicate=False))
    state._metadata = OrderedDict((path, dict(rows.get(path, PLAIN_METADATA))) for path in paths)
    return state
