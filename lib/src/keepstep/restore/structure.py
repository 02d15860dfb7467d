"""What a restart must build before `restore()`, and what of it changed while training.

Modules and optimizers are compared with the saved step before anything is filled. So whatever they
gained or lost since `restore()` would end in an error at each restart, unless the script builds it
first. It is named while the training still lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from keepstep.restore.modules import own_prefixes
from keepstep.restore.targets import describe
from keepstep.state.leaves import Node, Taken, is_extra, leaves_of
from keepstep.state.wrappers import unwrap

Structure = Mapping[str, str]
"""What there is, by name: the shape of a tensor, or the sizes of an optimizer's groups."""


def structure_of(taken: Taken) -> Structure:
    """The structure of a taken state. What a module loads in its own way is left out, and so is
    whatever dicts and foreign objects hold.
    """
    leaves = {leaf.name: leaf for leaf in taken.tensors}
    shapes = {
        name: describe(tuple(leaf.live.shape), leaf.live.dtype) for name, leaf in leaves.items()
    }
    shapes |= {alias: shapes[name] for alias, name in taken.aliases.items()}
    found: dict[str, str] = {}
    for name, node in taken.skeleton[1]:
        component = unwrap(taken.components[name])
        if isinstance(component, nn.Module):
            found |= _of_module(name, component, node, shapes)
        elif isinstance(component, torch.optim.Optimizer):
            found |= _of_optimizer(name, component, taken)
    return found


def changes(before: Structure, now: Structure) -> Iterator[str]:
    """What is in one structure and not in the other, as text."""
    for name in now.keys() | before.keys():
        here, there = now.get(name), before.get(name)
        if there is None:
            yield f"{name}: new ({here})"
        elif here is None:
            yield f"{name}: gone"
        elif here != there:
            yield f"{name}: {here}, was {there}"


def _of_module(
    name: str, module: nn.Module, node: Node, shapes: Mapping[str, str]
) -> dict[str, str]:
    prefixes = own_prefixes(module)
    return {
        f"{name}.{'.'.join(map(str, path))}": shapes[leaf[1]] if leaf[0] == "t" else "a value"
        for path, leaf in leaves_of(node)
        if path and not is_extra(path) and not str(path[0]).startswith(prefixes)
    }


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, taken: Taken) -> dict[str, str]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return {
        name: f"parameter groups of {sizes}",
        **{f"{name} of {path}": str(list(shape)) for path, shape in taken.parameters[name]},
    }
