"""Sees through what wraps the user's modules and optimizers, so that names do not change.

`DistributedDataParallel` adds a fact: its parameters are the same on all ranks of its group.
`ZeroRedundancyOptimizer` keeps each rank's part in an optimizer of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.state.rng import is_generator


class Replication(NamedTuple):
    """The ranks on which a module's parameters are the same, except for those that are
    `ignored`."""

    ranks: tuple[int, ...]
    ignored: frozenset[str]


class Replicated(nn.Module):
    """Wraps a module whose parameters are the same on `ranks`. An adapter that knows this makes it.
    It takes no part in training."""

    def __init__(self, module: nn.Module, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.module, self.ranks = module, ranks


class ShardedParameterModule(nn.Module):
    """A module whose parameters are tensors of which each rank has a part, such as vectors. An
    adapter makes it for another module. `shapes`: the shapes that the parameters have in that
    module, by name, where they are others."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes


def unwrap_module(component: Any) -> Any:
    """The module inside DistributedDataParallel or torch.compile, or this rank's part of a sharded
    optimizer.

    Raises UsageError for a ZeroRedundancyOptimizer that has no part yet.
    """
    while isinstance(component, nn.Module):
        inner = _inside(component)
        if inner is None:
            return component
        component = inner
    return _own_part(component) if is_zero(component) else component


def replication_of(component: Any) -> Replication | None:
    """The replication of a module inside DistributedDataParallel or `Replicated`; None if there is
    neither."""
    while isinstance(component, nn.Module):
        if isinstance(component, Replicated):
            return Replication(component.ranks, frozenset())
        if isinstance(component, nn.parallel.DistributedDataParallel):
            ranks = torch.distributed.get_process_group_ranks(component.process_group)
            ignored = frozenset(component.parameters_to_ignore)
            return Replication(tuple(sorted(ranks)), ignored)
        component = _inside(component)
    return None


def update_wrappers(components: Mapping[str, Any]) -> None:
    """Update the wrappers after what they wrap was loaded."""
    for component in components.values():
        if is_zero(component):
            copy_param_group_options(component.optim, component)


def is_deepspeed_component(component: Any) -> bool:
    """Whether it is DeepSpeed's engine, or one of its optimizers that are not torch optimizers.
    Both have partitions or copies that only DeepSpeed knows."""
    return any(
        kind.__module__.partition(".")[0] == "deepspeed"
        and kind.__name__ in ("DeepSpeedEngine", "DeepSpeedOptimizer")
        for kind in type(component).__mro__
    )


def is_zero(component: Any) -> bool:
    """Whether it is a ZeroRedundancyOptimizer. Imports nothing: without its module imported, there
    is none."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(component, module.ZeroRedundancyOptimizer)


def _inside(module: nn.Module) -> Any:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel | Replicated):
        return module.module
    return module._modules.get("_orig_mod")


def _own_part(optimizer: Any) -> Any:
    part = getattr(optimizer, "optim", None)
    if part is None:
        raise UsageError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be kept: its state does"
            " not exist before the third step; make it without"
        )
    copy_param_group_options(optimizer, part)
    return part


def copy_param_group_options(source: Any, target: Any) -> None:
    """Copy options such as learning rates, as `ZeroRedundancyOptimizer.step` itself does."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


def is_known_component(component: Any) -> bool:
    """Whether torch's own rules say how it is loaded, or plain data's: it is no foreign object."""
    inner = unwrap_module(component)
    if isinstance(inner, nn.Module | torch.optim.Optimizer | dict) or is_generator(inner):
        return True
    return type(inner).__module__ == torch.optim.lr_scheduler.__name__


def state_of_component(component: Any) -> Any:
    """What `component` gives as its state: live tensors, not copies."""
    component = unwrap_module(component)
    if isinstance(component, dict) or is_generator(component):
        return component
    return component.state_dict()
