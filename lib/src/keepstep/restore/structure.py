"""What a restart must build before `restore()`.

Modules and optimizers are compared with the saved step before anything is filled. So whatever they
gained or lost since `restore()` would end in an error at each restart, unless the script builds it
first. It is named while the training still lives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from keepstep.restore.modules import own_prefixes
from keepstep.state.leaves import Node, Taken, is_extra, leaves_of
from keepstep.state.wrappers import unwrap

COMPONENT = "a component"
_OWN = ", unless its own loading does"

Structure = Mapping[str, str]
"""What there is, by name: the shape of a tensor, or the sizes of an optimizer's groups."""


def structure_of(taken: Taken) -> Structure:
    """The structure of a taken state, without whatever dicts and foreign objects hold, and
    without the foreign objects that were not taken."""
    lives = {leaf.name: leaf.live for leaf in taken.tensors}
    lives |= {alias: lives[name] for alias, name in taken.aliases.items()}
    found: dict[str, str] = {}
    for name, node in taken.skeleton[1]:
        component = unwrap(taken.components[name])
        if isinstance(component, nn.Module):
            found |= _of_module(name, component, node, lives)
        elif isinstance(component, torch.optim.Optimizer):
            found |= _of_optimizer(name, component, taken)
    return found


def changes(before: Structure, now: Structure) -> dict[str, str]:
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
    prefixes = own_prefixes(module)
    found = {}
    for path, leaf in leaves_of(node):
        if not path or is_extra(path):
            continue
        shape = _shape(lives[leaf[1]]) if leaf[0] == "t" else "a value"
        if not prefixes or not str(path[0]).startswith(prefixes):
            found[f"{name}.{'.'.join(map(str, path))}"] = shape
        else:  # only whether a key is there, and its shape
            found[f"{name}.{path[0]}"] = f"{shape if len(path) == 1 else 'several'}{_OWN}"
    return found


def _shape(live: Tensor) -> str:
    return f"{live.dtype}{tuple(live.shape)}"


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, taken: Taken) -> dict[str, str]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return {
        f"{name}'s list of parameter groups": f"of {sizes} parameters",
        **{
            f"{name}'s parameter {path}": str(list(shape)) for path, shape in taken.parameters[name]
        },
    }
