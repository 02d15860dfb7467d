"""Optimizer state of a step that others saved: found by the names of the parameters it belongs to.

Parameters are numbered differently on other ranks (pipeline stages, sharded optimizers), so state
is stored under the parameter's own name: `optimizer.state.model.head.weight.exp_avg`. State that is
not there yet is made, placed as its parameter is. A parameter that no module here knows keeps its
number as its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from keepstep import pages, sharding
from keepstep.dtypes import DTYPE_OF
from keepstep.leaves import build, leaves_of
from keepstep.resharding.boxes import Saved
from keepstep.resharding.targets import Live, SavedTree, Target, base_of, describe_saved
from keepstep.wrappers import unwrap

if TYPE_CHECKING:
    from keepstep.resharding.loader import Loader


class OptimizerLoader:
    """Plans one optimizer for a `Loader`."""

    def __init__(
        self,
        loader: Loader,
        name: str,
        optimizer: torch.optim.Optimizer,
        components: Mapping[str, Any],
    ) -> None:
        self._loader, self._name, self._optimizer = loader, name, optimizer
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        known = parameter_names(components)
        self._keys = [known.get(id(one), str(at)) for at, one in enumerate(self._parameters)]
        self._made: dict[int, dict[str, Any]] = {}

    def plan(self, saved: SavedTree, live: Live) -> None:
        """Compare and plan; the loader notes the differences."""
        groups = self._groups(saved)
        stored = self._stored()
        values = _state_values(saved, self._name)
        for at, key in enumerate(self._keys):
            # state that an older keepstep saved has numbers only
            kept_as = key if key in stored else str(at)
            for part in stored.pop(kept_as, []):
                self._tensor(at, (key, kept_as), part, live)
            for part, value in (values.get(key) or values.get(str(at)) or {}).items():
                self._made.setdefault(at, {}).setdefault(part, value)
        for key in stored:
            if key.isdigit():
                self._loader.differ(
                    f"{self._name}.state.{key}: the optimizer here has"
                    f" {len(self._parameters)} parameters"
                )
        self._loader.finish_with(lambda: self._finish(groups))

    def _stored(self) -> dict[str, list[str]]:
        """What the checkpoint has of each parameter: its name -> the last parts of the names."""
        prefix = f"{self._name}.state."
        found: dict[str, list[str]] = {}
        for name in sorted(self._loader.names.bases):
            if name.startswith(prefix):
                key, _, part = name[len(prefix) :].rpartition(".")
                found.setdefault(key, []).append(part)
        return found

    def _tensor(self, at: int, keys: tuple[str, str], part: str, live: Live) -> None:
        here, name = (f"{self._name}.state.{key}.{part}" for key in keys)
        if here in live:
            self._loader.want(replace(live[here][0], name=name))
            kept: Tensor | None = live[here][1]
        else:
            kept = self._fresh(self._parameters[at], name, part, self._capturable(at))
        self._made.setdefault(at, {})[part] = kept

    def _fresh(self, parameter: Tensor, name: str, part: str, capturable: bool) -> Tensor | None:
        saved = self._loader.names.find(name)
        assert saved is not None, "a name of the index itself"
        # by convention of torch.optim: `step` stays on the CPU unless capturable or fused
        device = parameter.device if part != "step" or capturable else torch.device("cpu")
        if not sharding.is_dtensor(parameter):
            # replicas of it are bit-equal: all ranks of a node take the same one
            return self._loader.fresh(name, device, own=False)
        if saved.shape == tuple(parameter.shape):
            return self._placed_as(parameter, name, saved, device)
        if saved.shape:
            self._loader.differ(
                f"{name}: {describe_saved(saved)} in the checkpoint, for a parameter of"
                f" {list(parameter.shape)} that is sharded here: take one optimizer step before"
                " restore(), so that its place is known"
            )
            return None
        return self._loader.fresh(name, device)

    def _placed_as(
        self, parameter: Tensor, name: str, saved: Saved, device: torch.device
    ) -> Tensor:
        local = sharding.local_of(parameter)
        made = torch.empty_like(local, dtype=DTYPE_OF[saved.dtype], device=device)
        pages.prefer_huge_pages(made)
        offsets = sharding.sharing_of(parameter, name).offsets
        self._loader.want(Target(name, made, offsets, tuple(parameter.shape)))
        return sharding.like(parameter, made)

    def _capturable(self, at: int) -> bool:
        for group in self._optimizer.param_groups:
            if at < len(group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
            at -= len(group["params"])
        return False

    def _groups(self, saved: SavedTree) -> list[dict[str, Any]]:
        tree = build(saved.node, lambda _: None, saved.values.__getitem__)
        groups: list[dict[str, Any]] = tree.get("param_groups", [])
        here = self._optimizer.param_groups
        sizes = [len(one["params"]) for one in groups], [len(one["params"]) for one in here]
        # by name, each rank may have a part of the parameters; by number it may not
        stored = self._stored()
        numbered = any(key.isdigit() for key in (*self._keys, *stored))
        if len(groups) != len(here) or (numbered and sizes[0] != sizes[1]):
            self._loader.differ(
                f"{self._name}: parameter groups of {sizes[0]} parameters in the checkpoint,"
                f" of {sizes[1]} here"
            )
        return groups

    def _finish(self, groups: list[dict[str, Any]]) -> None:
        numbers = iter(range(len(self._parameters)))
        merged = []
        for saved, here in zip(groups, self._optimizer.param_groups, strict=True):
            kept = {key: value for key, value in saved.items() if key != "param_names"}
            if "param_names" in here:
                kept["param_names"] = here["param_names"]
            merged.append({**kept, "params": [next(numbers) for _ in here["params"]]})
        self._optimizer.load_state_dict({"state": dict(self._made), "param_groups": merged})
        # load_state_dict casts to the parameter's dtype; ours are exact already
        for at, parts in self._made.items():
            state = self._optimizer.state[self._parameters[at]]
            for part, kept in parts.items():
                if isinstance(kept, Tensor) and kept.device == state[part].device:
                    state[part] = kept


def parameter_names(components: Mapping[str, Any]) -> dict[int, str]:
    """`id` of each parameter of a module among the components -> component and name."""
    names: dict[int, str] = {}
    for name, component in components.items():
        module = unwrap(component)
        if isinstance(module, nn.Module):
            for path, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{name}.{path}")
    return names


def _state_values(saved: SavedTree, name: str) -> dict[str, dict[str, Any]]:
    """State that is no tensor, by parameter: named where a tensor of the same one tells its name,
    else by number."""
    tree = dict(saved.node[1]).get("state") if saved.node[0] == "d" else None
    if tree is None or tree[0] != "d":
        return {}
    found: dict[str, dict[str, Any]] = {}
    for number, node in tree[1]:
        key, values = str(number), {}
        for path, leaf in leaves_of(node):
            if leaf[0] == "t" and len(path) == 1:
                full = base_of(leaf[1])[0]
                key = full[len(f"{name}.state.") : -len(f".{path[0]}")]
            elif leaf[0] == "v" and len(path) == 1:
                values[str(path[0])] = saved.values[leaf[1]]
        found[key] = values
    return found
