"""From a verified slot back into the live objects, in place.

Three phases: `plan` compares everything and changes nothing (a MismatchError lists all differences
at once); `Loading.copy` then fills tensors, and cannot fail half-way for a reason that could have
been seen; `Loading.finish` hands each component its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from keepstep import copying, leaves, pages, sharding
from keepstep.dtypes import DTYPE_OF
from keepstep.errors import FormatError, MismatchError
from keepstep.image import Entry
from keepstep.leaves import is_wrapper, plain_tensors
from keepstep.mapping import SlotMapping
from keepstep.state import Node, TensorLeaf, build, leaves_of, take, tree_of, unwrap

_SHOWN = 20

_Path = tuple[Any, ...]
_Live = dict[_Path, TensorLeaf]


@dataclass
class Loading:
    """What to do: tensor copies first, then what each component does with its tree."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    finishers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def targets(self) -> list[Tensor]:
        """What `copy` fills."""
        return [target for target, _ in self.pairs]

    def copy(self) -> int:
        """Fill all tensors; returns the bytes copied."""
        moves, copies, total = [], [], 0
        for target, source in self.pairs:
            total += source.numel() * source.element_size()
            if copying.is_plain(target):
                moves.append(
                    copying.Move(
                        target.data_ptr(),
                        source.data_ptr(),
                        source.numel() * source.element_size(),
                    )
                )
            else:
                copies.append(copying.Copy(target, source))
        copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
        for target, _ in self.pairs:
            if copying.is_plain(target):
                # memmove is no torch operation: whoever watches versions must see the change
                torch.autograd.graph.increment_version(target)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return total

    def finish(self) -> None:
        """Raises MismatchError if a component refuses its tree."""
        for finish in self.finishers:
            finish()


def plan(components: Mapping[str, Any], slot: SlotMapping, values: list[Any]) -> Loading:
    """Compare the image in `slot` with the live components. Raises MismatchError, FormatError."""
    branches = leaves.parse(slot.layout.skeleton)
    for node in branches.values():
        leaves.check_values(node, count=len(values))
    planner = _Planner(slot, values)
    for name in branches.keys() - components.keys():
        planner.differ(f"{name}: in the checkpoint, but not given to Checkpointer")
    for name, component in components.items():
        if name in branches:
            planner.component(name, unwrap(component), branches[name])
        else:
            planner.differ(f"{name}: given to Checkpointer, but not in the checkpoint")
    planner.raise_differences()
    return planner.loading


class _Planner:
    def __init__(self, slot: SlotMapping, values: list[Any]) -> None:
        self.loading = Loading()
        self._slot = slot
        self._values = values
        self._differences: list[str] = []

    def differ(self, text: str) -> None:
        self._differences.append(text)

    def raise_differences(self) -> None:
        if not self._differences:
            return
        shown = "\n  ".join(self._differences[:_SHOWN])
        more = len(self._differences) - _SHOWN
        raise MismatchError(
            "model and checkpoint disagree, nothing was changed:\n  "
            + shown
            + (f"\n  ... and {more} more" if more > 0 else "")
            + "\nTrain with the code that saved it, or start a new run (keepstep run --run NAME)."
        )

    def component(self, name: str, component: Any, node: Node) -> None:
        live = self._live(name, component)
        if isinstance(component, nn.Module):
            self._module(name, component, node, live)
        elif isinstance(component, torch.optim.Optimizer):
            self._optimizer(name, component, node, live)
        elif isinstance(component, dict):
            self._dict(component, node, live)
        else:
            tree = self._tree(node, lambda _, one: self._fresh(one, torch.device("cpu")))
            self.loading.finishers.append(lambda: component.load_state_dict(tree()))

    def _live(self, name: str, component: Any) -> _Live:
        """What is here, by the keys that lead to it: names may depend on other ranks."""
        taken = take({name: component})
        leaves = {leaf.name: leaf for leaf in taken.tensors}
        leaves |= {alias: leaves[first] for alias, first in taken.aliases.items()}
        in_module = isinstance(component, nn.Module)
        return {
            path[1:]: leaves[leaf[1]]
            for path, leaf in leaves_of(taken.skeleton)
            if leaf[0] == "t" and (in_module or not leaves[leaf[1]].fresh)
        }

    def _entry(self, name: str) -> Entry:
        name = self._slot.layout.aliases.get(name, name)
        try:
            return self._slot.layout.entries[name]
        except KeyError:
            raise FormatError(f"the image names a tensor it does not hold: {name}") from None

    def _tree(self, node: Node, tensor: Callable[[_Path, str], Tensor]) -> Callable[[], Any]:
        """The component's tree, over tensors that `run` fills."""
        made = {leaf[1]: tensor(path, leaf[1]) for path, leaf in _tensors_of(node)}
        tree = build(node, made.__getitem__, self._values.__getitem__)  # or it makes no sense
        return lambda: tree

    def _fresh(self, name: str, device: torch.device) -> Tensor:
        entry = self._entry(name)
        target = torch.empty(entry.spec.shape, dtype=DTYPE_OF[entry.spec.dtype], device=device)
        pages.prefer_huge_pages(target)
        self.loading.pairs.append((target, self._slot.view(entry)))
        return target

    def _in_place(self, name: str, leaf: TensorLeaf) -> Tensor:
        entry = self._entry(name)
        dtype, shape = DTYPE_OF[entry.spec.dtype], entry.spec.global_shape or entry.spec.shape
        if tuple(leaf.live.shape) != shape or leaf.live.dtype != dtype:
            self.differ(
                f"{name}: {_describe(shape, dtype)} in the checkpoint,"
                f" {_describe(leaf.live.shape, leaf.live.dtype)} here"
            )
        elif tuple(leaf.whole.shape) != entry.spec.shape:
            raise FormatError(f"{name}: the image of this rank holds another box than lies here")
        self.loading.pairs.append((leaf.whole.detach(), self._slot.view(entry)))
        return leaf.live

    def _like(self, name: str, parameter: Tensor, device: torch.device) -> Tensor:
        """New state of a parameter, placed as that is."""
        made = self._fresh(name, device)
        spec = self._entry(name).spec
        shape = spec.global_shape or spec.shape
        if not sharding.is_dtensor(parameter) or shape != tuple(parameter.shape) or not shape:
            return made
        return sharding.like(parameter, made)

    def _module(self, name: str, module: nn.Module, node: Node, live: _Live) -> None:
        stored = {path: leaf[1] for path, leaf in _tensors_of(node)}
        for path in sorted(stored.keys() - live.keys(), key=str):
            spec = self._entry(stored[path]).spec
            shape = _describe(spec.global_shape or spec.shape, DTYPE_OF[spec.dtype])
            self.differ(f"{stored[path]}: {shape} in the checkpoint, missing here")
        for path in sorted(live.keys() - stored.keys(), key=str):
            shape = _describe(live[path].live.shape, live[path].live.dtype)
            named = ".".join(map(str, path))
            self.differ(f"{name}.{named}: {shape} here, missing in the checkpoint")
        if stored.keys() != live.keys():
            return
        tensors = (*module.parameters(), *module.buffers())
        wrappers = _wrappers(module) if any(map(is_wrapper, tensors)) else {}
        own = {_pointer(plain) for one in tensors for _, plain in plain_tensors(one, "")}
        if all(one.whole.data_ptr() in own or not one.whole.numel() for one in live.values()):
            tree = self._tree(node, lambda path, one: self._in_place(one, live[path]))
            if all(leaf[0] == "t" for _, leaf in leaves_of(node)):
                return
        else:  # a state_dict of its own making: only its load_state_dict knows the way back
            tree = self._tree(
                node,
                lambda path, one: (
                    self._in_place(one, live[path])
                    if path[0] in wrappers
                    else self._like(one, *_like_live(live[path]))
                ),
            )
        # what a wrapper keeps its values in is filled; load_state_dict wants the wrapper
        self.loading.finishers.append(lambda: module.load_state_dict({**tree(), **wrappers}))

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, node: Node, live: _Live
    ) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        keys = [path for path, _ in _tensors_of(node) if len(path) >= 3 and path[0] == "state"]
        for path in keys:
            if type(path[1]) is not int or path[1] >= len(parameters):
                named = ".".join(map(str, path))
                self.differ(f"{name}.{named}: the optimizer here has {len(parameters)} parameters")
        self._groups(name, optimizer, node)
        if self._differences:
            return

        def tensor(path: _Path, one: str) -> Tensor:
            if path in live:
                return self._in_place(one, live[path])
            # by convention of torch.optim: `step` stays on the CPU unless capturable or fused
            if len(path) < 3 or path[0] != "state" or path[2] == "step":
                return self._fresh(one, torch.device("cpu"))
            return self._like(one, parameters[path[1]], parameters[path[1]].device)

        tree = self._tree(node, tensor)

        def finish() -> None:
            state = tree()
            optimizer.load_state_dict(state)
            # load_state_dict casts to the parameter's dtype; ours are exact already
            for path in keys:
                kept = state["state"][path[1]][path[2]]
                if len(path) == 3 and kept.device == _state_of(optimizer, parameters, path).device:
                    optimizer.state[parameters[path[1]]][path[2]] = kept

        self.loading.finishers.append(finish)

    def _groups(self, name: str, optimizer: torch.optim.Optimizer, node: Node) -> None:
        saved = build(node, lambda one: None, self._values.__getitem__).get("param_groups", [])
        here = optimizer.param_groups
        sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in here]
        if sizes[0] != sizes[1]:
            self.differ(
                f"{name}: parameter groups of {sizes[0]} parameters in the checkpoint,"
                f" of {sizes[1]} here"
            )

    def _dict(self, component: dict[Any, Any], node: Node, live: _Live) -> None:
        def tensor(path: _Path, one: str) -> Tensor:
            if path in live:
                return self._in_place(one, live[path])
            return self._fresh(one, torch.device("cpu"))

        tree = self._tree(node, tensor)
        self.loading.finishers.append(lambda: _merge(component, tree()))


def _tensors_of(node: Node) -> list[tuple[_Path, Node]]:
    return [(path, leaf) for path, leaf in leaves_of(node) if leaf[0] == "t"]


def _pointer(tensor: Tensor) -> int:
    local = sharding.local_of(tensor) if sharding.is_dtensor(tensor) else tensor
    return local.data_ptr()


def _wrappers(module: nn.Module) -> dict[str, Tensor]:
    """What of a module's state keeps its values in other tensors."""
    tree = tree_of(module)
    return {name: one for name, one in tree.items() if isinstance(one, Tensor) and is_wrapper(one)}


def _like_live(leaf: TensorLeaf) -> tuple[Tensor, torch.device]:
    return leaf.live, leaf.whole.device


def _merge(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Update nested dicts in place, so that whoever holds one sees the restored values."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(live.get(key), dict):
            _merge(live[key], value)
        else:
            live[key] = value


def _state_of(
    optimizer: torch.optim.Optimizer, parameters: list[Any], path: tuple[Any, ...]
) -> Tensor:
    tensor: Tensor = optimizer.state[parameters[path[1]]][path[2]]
    return tensor


def _describe(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
