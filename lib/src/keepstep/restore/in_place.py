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

from keepstep.client import copying, pages
from keepstep.client.slot import SlotMapping
from keepstep.errors import FormatError, MismatchError
from keepstep.image import Entry, TensorSpec
from keepstep.restore.pairing import (
    Pairing,
    group_numbers,
    parameter_names,
    saved_parameters,
    state_device,
)
from keepstep.state import leaves, sharding
from keepstep.state.dtypes import DTYPE_OF
from keepstep.state.leaves import (
    arrays_of,
    device_of,
    empty,
    is_extra,
    is_wrapper,
    plain_tensors,
    put_back,
)
from keepstep.state.take import Node, Taken, TensorLeaf, build, leaves_of, tree_of, unwrap
from keepstep.state.wrappers import is_zero

_SHOWN = 20

_Path = tuple[Any, ...]
_Live = dict[_Path, TensorLeaf]


@dataclass
class Loading:
    """What to do: tensors are filled from `slot` first, then each component gets its tree."""

    slot: SlotMapping
    pairs: list[tuple[Tensor, Entry]] = field(default_factory=list)
    finishers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def targets(self) -> list[Tensor]:
        """What `copy` fills."""
        return [target for target, _ in self.pairs]

    def copy(self) -> int:
        """Fill all tensors; returns the bytes copied."""
        moves, copies, plain, total = [], [], [], 0
        for target, entry in self.pairs:
            size_bytes = entry.end - entry.begin
            total += size_bytes
            if copying.is_plain(target):
                source = self.slot.address + entry.begin
                moves.append(copying.Move(target.data_ptr(), source, size_bytes))
                plain.append(target)
            else:
                copies.append(copying.Copy(target.detach(), self.slot.view(entry)))
        copying.run(copying.Transfers(moves, copies), threads=copying.default_threads())
        for target in plain:
            # memmove is no torch operation: whoever watches versions must see the change
            torch.autograd.graph.increment_version(target)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return total

    def finish(self) -> None:
        """Raises MismatchError if a component refuses its tree."""
        for finish in self.finishers:
            finish()


def plan(
    components: Mapping[str, Any], slot: SlotMapping, values: list[Any], taken: Taken
) -> Loading:
    """Compare the image in `slot` with the live components, of which `taken` is all there is.

    Raises MismatchError, FormatError.
    """
    branches = leaves.parse(slot.layout.skeleton)
    for node in branches.values():
        leaves.check_values(node, count=len(values))
    planner = _Planner(components, slot, values, taken)
    for name in branches.keys() - components.keys():
        planner.differ(f"{name}: in the checkpoint, but not given to Checkpointer")
    # modules first: what a dict has of them, too, must not keep their tensors from them
    for name in sorted(
        components, key=lambda one: not isinstance(unwrap(components[one]), nn.Module)
    ):
        if name in branches:
            planner.component(name, branches[name])
        else:
            planner.differ(f"{name}: given to Checkpointer, but not in the checkpoint")
    planner.raise_differences()
    return planner.loading


class _Planner:
    def __init__(
        self, components: Mapping[str, Any], slot: SlotMapping, values: list[Any], taken: Taken
    ) -> None:
        self.loading = Loading(slot)
        self._taken: dict[str, _Live] = {}
        for (component, *path), leaf in taken.by_path.items():
            self._taken.setdefault(component, {})[tuple(path)] = leaf
        self._components = components
        self._slot = slot
        self._values = values
        self._differences: list[str] = []
        self._made: dict[str, Tensor] = {}
        self._filled: dict[Any, Entry] = {}

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

    def component(self, name: str, node: Node) -> None:
        component = unwrap(self._components[name])
        live = self._live(name, component)
        if isinstance(component, nn.Module):
            self._module(name, component, node, live)
        elif isinstance(component, torch.optim.Optimizer):
            self._optimizer(name, component, node, live)
        elif isinstance(component, dict):
            arrays = set(arrays_of(node))
            tree = self._tree(
                node,
                lambda path, one: self._kept(one, None if one in arrays else live.get(path)),
            )
            self.loading.finishers.append(lambda: put_back(name, component, tree()))
        else:
            tree = self._tree(node, lambda _, one: self._fresh(one))
            self.loading.finishers.append(lambda: component.load_state_dict(tree()))

    def _live(self, name: str, component: Any) -> _Live:
        """What is here, by the keys that lead to it: names may depend on other ranks."""
        in_module = isinstance(component, nn.Module)
        leaves = self._taken.get(name, {}).items()
        return {path: leaf for path, leaf in leaves if in_module or not leaf.fresh}

    # --- tensors -------------------------------------------------------------------------------

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

    def _fresh(self, name: str, device: torch.device | None = None) -> Tensor:
        """A new tensor as the saved one was; one for all names of a tied one."""
        entry = self._entry(name)
        spec = entry.spec
        target = self._made.get(spec.name)
        if target is None:
            device = device_of(spec.device) if device is None else device
            dtype = DTYPE_OF[spec.dtype]
            target = empty(spec.shape, spec.dim_order, dtype=dtype, device=device)
            pages.prefer_huge_pages(target)
            self.loading.pairs.append((target, entry))
            self._made[spec.name] = target
        return target

    def _kept(
        self, name: str, leaf: TensorLeaf | None, device: torch.device | None = None
    ) -> Tensor:
        """In place where the live tensor is like the saved one, else a new one instead of it."""
        if leaf is None:
            return self._fresh(name, device)
        entry = self._entry(name)
        boxes = entry.spec.global_shape is not None or sharding.is_dtensor(leaf.live)
        if not boxes:
            alike = (leaf.live.shape, leaf.live.dtype) == _kind(entry.spec)
            if not alike or self._gets_other_bytes(leaf.whole, _place(leaf.whole), entry):
                return self._fresh(name, leaf.whole.device)
        return self._in_place(name, leaf)

    def _in_place(self, name: str, leaf: TensorLeaf) -> Tensor:
        entry, whole = self._entry(name), leaf.whole
        if (leaf.live.shape, leaf.live.dtype) != _kind(entry.spec):
            self.differ(
                f"{name}: {_describe(*_kind(entry.spec))} in the checkpoint,"
                f" {_describe(leaf.live.shape, leaf.live.dtype)} here"
            )
            return leaf.live
        if whole.shape != entry.spec.shape:
            raise FormatError(f"{name}: the image of this rank holds another box than lies here")
        place = _place(whole)
        if self._gets_other_bytes(whole, place, entry):
            other = self._filled[place].spec.name
            self.differ(f"{name}: one tensor with {other} here, but not in the checkpoint")
        elif self._filled.get(place) is not entry:  # else it is tied, and filled once
            self._filled[place] = entry
            self.loading.pairs.append((whole, entry))
        return leaf.live

    def _gets_other_bytes(self, live: Tensor, place: Any, entry: Entry) -> bool:
        """Whether the live tensor gets those of another saved tensor already."""
        other = self._filled.get(place)
        if other is None or other is entry or not live.numel():
            return False
        one, two = (self._slot.view(it).flatten().view(torch.uint8) for it in (entry, other))
        return not torch.equal(one, two)

    def _like(self, name: str, parameter: Tensor, device: torch.device) -> Tensor:
        """New state of a parameter, placed as that is."""
        made = self._fresh(name, device)
        spec = self._entry(name).spec
        shape = spec.global_shape or spec.shape
        if not sharding.is_dtensor(parameter) or shape != tuple(parameter.shape) or not shape:
            return made
        return sharding.like(parameter, made)

    # --- modules -------------------------------------------------------------------------------

    def _module(self, name: str, module: nn.Module, node: Node, live: _Live) -> None:
        stored = {path: leaf[1] for path, leaf in _tensors_of(node)}
        needed = {path for path in stored if not is_extra(path)}
        here = {path for path in live if not is_extra(path)}
        for path in sorted(needed - here, key=str):
            shape = _describe(*_kind(self._entry(stored[path]).spec))
            self.differ(f"{stored[path]}: {shape} in the checkpoint, missing here")
        for path in sorted(here - needed, key=str):
            shape = _describe(live[path].live.shape, live[path].live.dtype)
            named = ".".join(map(str, path))
            self.differ(f"{name}.{named}: {shape} here, missing in the checkpoint")
        if needed != here:
            return
        tensors = (*module.parameters(), *module.buffers())
        wrappers = _wrappers(module) if any(map(is_wrapper, tensors)) else {}
        own = {_pointer(plain) for one in tensors for _, plain in plain_tensors(one, "")}
        wholes = [live[path].whole for path in here]
        if all(one.data_ptr() in own or not one.numel() for one in wholes):
            tree = self._tree(
                node,
                lambda path, one: (
                    self._fresh(one) if is_extra(path) else self._in_place(one, live[path])
                ),
            )
            if all(leaf[0] == "t" and not is_extra(path) for path, leaf in leaves_of(node)):
                return
        else:  # a state_dict of its own making: only its load_state_dict knows the way back
            tree = self._tree(
                node,
                lambda path, one: (
                    self._in_place(one, live[path])
                    if path[0] in wrappers
                    else self._like(one, live[path].live, live[path].whole.device)
                    if path in live
                    else self._fresh(one)
                ),
            )
        # what a wrapper keeps its values in is filled; load_state_dict wants the wrapper
        self.loading.finishers.append(lambda: module.load_state_dict({**tree(), **wrappers}))

    # --- optimizers ----------------------------------------------------------------------------

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, node: Node, live: _Live
    ) -> None:
        groups = group_numbers(build(node, lambda one: None, self._values.__getitem__))
        if groups is None:  # a state_dict of its own making: only its load_state_dict knows
            whole = self._tree(node, lambda path, one: self._kept(one, live.get(path)))
            self.loading.finishers.append(lambda: optimizer.load_state_dict(whole()))
            return
        told = saved_parameters(name, node, self._slot.layout.parameters.get(name))
        pairing = Pairing.of(
            optimizer,
            groups=groups,
            saved=told,
            names=parameter_names(self._components),
            movable=not is_zero(self._components[name]),
        )
        for text in pairing.differences:
            self.differ(f"{name}: {text}")
        if pairing.differences:
            return

        def tensor(path: _Path, one: str) -> Tensor:
            here = live.get(pairing.path(path))
            parameter = pairing.parameter(path)
            if parameter is None or here is not None:
                return self._kept(one, here)
            home = told[path[1]].name if path[1] in told else None
            device = state_device(
                self._entry(one).spec.device,
                parameter.device,
                home=self._device(home),
                counter=path[2] == "step" and not pairing.capturable(path),
            )
            return self._like(one, parameter, device)

        tree = self._tree(node, tensor)
        self.loading.finishers.append(lambda: pairing.load(tree()))

    def _device(self, name: str | None) -> str | None:
        """Where the saved tensor of that name was."""
        aliases, entries = self._slot.layout.aliases, self._slot.layout.entries
        entry = None if name is None else entries.get(aliases.get(name, name))
        return None if entry is None else entry.spec.device


def _tensors_of(node: Node) -> list[tuple[_Path, Node]]:
    return [(path, leaf) for path, leaf in leaves_of(node) if leaf[0] == "t"]


def _pointer(tensor: Tensor) -> int:
    local = sharding.local_of(tensor) if sharding.is_dtensor(tensor) else tensor
    return local.data_ptr()


def _wrappers(module: nn.Module) -> dict[str, Tensor]:
    """What of a module's state keeps its values in other tensors."""
    tree = tree_of(module)
    return {name: one for name, one in tree.items() if isinstance(one, Tensor) and is_wrapper(one)}


def _kind(spec: TensorSpec) -> tuple[tuple[int, ...], torch.dtype]:
    return spec.global_shape or spec.shape, DTYPE_OF[spec.dtype]


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _describe(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
