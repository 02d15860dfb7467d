"""The state of a training script, taken apart: tensors with names, values, and the tree they form.

`take` walks what the user gave to `Checkpointer` (modules, optimizers, anything with `state_dict`,
plain dicts) without copying a byte. A container without tensors is one value, however deep, so a
growing list of losses never changes the layout.

The tree ("skeleton") is a nested tuple that JSON can hold: `("t", name)` a tensor, `("v", i)` the
i-th value, `("d", ((key, node), ...))` a dict, `("l", (node, ...))` a list, `("u", ...)` a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.dtypes import code_of
from keepstep.errors import UsageError
from keepstep.image.layout import Section, TensorSpec

Node = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A live tensor. `lazy`: only an optimizer step changes it, so the copy may come later."""

    name: str
    tensor: Tensor
    section: Section
    lazy: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """All of a state at one moment; `tensors` alias the live ones."""

    tensors: tuple[TensorLeaf, ...]
    aliases: dict[str, str]
    values: list[Any]
    skeleton: Node

    def specs(self) -> list[TensorSpec]:
        """What the layout needs to know of each tensor. Raises UsageError for odd dtypes."""
        return [
            TensorSpec(
                name=leaf.name,
                dtype=code_of(leaf.tensor.dtype, name=leaf.name),
                shape=tuple(leaf.tensor.shape),
                section=leaf.section,
            )
            for leaf in self.tensors
        ]

    def signature(self) -> Any:
        """Equal for two states exactly when one layout fits both."""
        return (
            self.skeleton,
            [
                (leaf.name, leaf.tensor.dtype, leaf.tensor.shape, leaf.section)
                for leaf in self.tensors
            ],
            self.aliases,
        )


def unwrap(component: Any) -> Any:
    """The module inside DistributedDataParallel or torch.compile, so that names do not change."""
    while isinstance(component, nn.Module):
        if isinstance(component, nn.parallel.DistributedDataParallel | nn.DataParallel):
            component = component.module
        elif "_orig_mod" in component._modules:
            component = component._modules["_orig_mod"]
        else:
            break
    return component


def check_components(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same mapping, so that replacing an entry later is seen.

    Raises UsageError for what can be neither taken nor put back.
    """
    if not isinstance(state, Mapping) or not state:
        raise UsageError(
            'Checkpointer takes a dict such as {"model": model, "optimizer": optimizer}'
        )
    for name, component in state.items():
        if not isinstance(name, str) or not name or name == "keepstep":
            raise UsageError(f"{name!r} cannot name a component: use a string, not 'keepstep'")
        if isinstance(component, dict):
            continue
        if not (hasattr(component, "state_dict") and hasattr(component, "load_state_dict")):
            raise UsageError(
                f"{name!r} is a {type(component).__name__} without state_dict() and"
                " load_state_dict(); wrap it in a dict, or give it the two methods"
            )
    return state


def tree_of(component: Any) -> Any:
    """What `component` says its state is; live tensors, not copies."""
    component = unwrap(component)
    return component if isinstance(component, dict) else component.state_dict()


def take(components: Mapping[str, Any]) -> Taken:
    """Walk all components. Raises UsageError for tensors that cannot be kept."""
    taker = _Taker()
    branches = []
    for name, component in components.items():
        taker.enter(unwrap(component))
        branches.append((name, taker.walk(tree_of(component), name)))
    return Taken(tuple(taker.tensors), taker.aliases, taker.values, ("d", tuple(branches)))


class _Taker:
    """One walk: collects leaves, and sees tensors that appear under several names."""

    def __init__(self) -> None:
        self.tensors: list[TensorLeaf] = []
        self.aliases: dict[str, str] = {}
        self.values: list[Any] = []
        self._names: set[str] = set()
        self._seen: dict[Any, str] = {}
        self._parameters: set[int] = set()
        self._section = Section.REST
        self._lazy = False

    def enter(self, component: Any) -> None:
        self._parameters = set()
        self._lazy = isinstance(component, torch.optim.Optimizer)
        self._section = Section.OPTIMIZER if self._lazy else Section.REST
        if isinstance(component, nn.Module):
            self._parameters = {one.data_ptr() for one in component.parameters()}

    def walk(self, tree: Any, path: str) -> Node:
        node = self._branch(tree, path)
        return self._value(tree) if node is None else node

    def _branch(self, tree: Any, path: str) -> Node | None:
        """A node if there is a tensor at or below `tree`, else None."""
        if isinstance(tree, Tensor):
            return ("t", self._tensor(tree, path))
        kind = type(tree)
        if isinstance(tree, Mapping):
            return self._container("d", tree.items(), path)
        if kind is list or kind is tuple:
            return self._container("l" if kind is list else "u", enumerate(tree), path)
        return None

    def _container(self, kind: str, items: Any, path: str) -> Node | None:
        children: list[tuple[Any, Any, Node | None]] = []
        found = False
        for key, child in items:
            node = None
            if type(child) not in _PLAIN:
                node = self._branch(child, f"{path}.{key}")
                found = found or node is not None
            children.append((key, child, node))
        if not found:
            return None
        if kind == "d":
            return ("d", tuple(self._item(key, child, node, path) for key, child, node in children))
        return (kind, tuple(node or self._value(child) for _, child, node in children))

    def _item(self, key: Any, child: Any, node: Node | None, path: str) -> tuple[Any, Node]:
        if type(key) is not str and type(key) is not int:
            raise UsageError(f"{path}: a dict with tensors needs str or int keys, not {key!r}")
        return key, node or self._value(child)

    def _value(self, value: Any) -> Node:
        self.values.append(value)
        return ("v", len(self.values) - 1)

    def _tensor(self, tensor: Tensor, path: str) -> str:
        check_tensor(tensor, path)
        name = path
        while name in self._names:
            name += "~"
        self._names.add(name)
        pointer = tensor.data_ptr()
        if pointer:
            identity = (pointer, tensor.dtype, tensor.shape, tensor.stride())
            first = self._seen.setdefault(identity, name)
            if first != name:
                self.aliases[name] = first
                return name
        parameter = pointer in self._parameters and pointer != 0
        self.tensors.append(
            TensorLeaf(
                name,
                tensor,
                Section.PARAMS if parameter else self._section,
                self._lazy or parameter,
            )
        )
        return name


_PLAIN = frozenset({int, float, str, bool, type(None)})


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raises UsageError for tensors that have no plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UsageError(f"{name}: only dense tensors can be kept, this one is {tensor.layout}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name}: tensors on {tensor.device.type!r} cannot be kept")
    if hasattr(tensor, "device_mesh") or hasattr(tensor, "_local_tensor"):
        raise UsageError(f"{name}: sharded tensors (DTensor) cannot be kept yet")


def leaves_of(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Every tensor and value node with the keys that lead to it."""
    kind = node[0]
    if kind in ("t", "v"):
        yield path, node
    elif kind == "d":
        for key, child in node[1]:
            yield from leaves_of(child, (*path, key))
    else:
        for index, child in enumerate(node[1]):
            yield from leaves_of(child, (*path, index))


def build(node: Any, tensor: Any, value: Any) -> Any:
    """Put a tree together again: `tensor(name)` and `value(index)` make the leaves."""
    kind = node[0]
    if kind == "t":
        return tensor(node[1])
    if kind == "v":
        return value(node[1])
    if kind == "d":
        return {key: build(child, tensor, value) for key, child in node[1]}
    children = [build(child, tensor, value) for child in node[1]]
    return children if kind == "l" else tuple(children)
