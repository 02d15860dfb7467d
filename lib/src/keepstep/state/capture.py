"""Takes apart the state of a training script: named tensors, values, and the tree that they form.

`capture_state` walks what the user gave to `Checkpointer` (modules, optimizers, anything with
`state_dict`, plain dicts) without copying a byte. A container without tensors is one value, however
deep it is, so a growing list of losses never changes the layout.

Tensors that other ranks also have are boxes of one global tensor: as a DTensor's placements say, or
the same everywhere under DistributedDataParallel. Optimizer state is named after its parameter,
because other ranks number their parameters differently.

The tree ("skeleton") is a nested tuple that JSON can hold:

- `("t", name)`: a tensor
- `("v", i)`: the i-th value
- `("d", ((key, node), ...))`: a dict
- `("l", (node, ...))`: a list
- `("u", ...)`: a tuple
- `("x", i, node)`: what `node` is, in the form of the i-th value: an array, a view, a deque,
  another kind of dict, an object of fields, or an object that stands in other places, too
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.errors import FormatError, UsageError
from keepstep.image import Layout, extras_codec
from keepstep.image.codecs import RequiresGradForm
from keepstep.state import accelerator
from keepstep.state.rng import is_generator
from keepstep.state.sharding import (
    ALONE,
    ReplicaPlacement,
    ReplicatedTensorSize,
    compute_row_partitions,
)
from keepstep.state.taken_state import TakenState, TensorLeaf, leaves_of
from keepstep.state.walk import NOWHERE, Loose, RepeatedWalk, Walker, is_state_made_by_torch
from keepstep.state.wrappers import is_deepspeed_component, unwrap_module

_MISSES = 3
"""After so many saves in a row at which tensors had moved, they are expected to move each time."""
_MISSES_BETWEEN = 16
"""Then so many saves pass until it is tried whether they have settled."""


def check_components(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same mapping, so that a later replacement of an entry is seen.

    Raises UsageError for components that keepstep cannot take or cannot put back.
    """
    if not isinstance(state, Mapping) or not state:
        raise UsageError(
            'Checkpointer takes a dict such as {"model": model, "optimizer": optimizer}, or the'
            " same as keywords"
        )
    for name, component in state.items():
        if not isinstance(name, str) or not name or name == "keepstep":
            raise UsageError(f"{name!r} cannot name a component: use a string, not 'keepstep'")
        if isinstance(component, dict) or is_generator(component):
            continue
        if is_deepspeed_component(component):
            raise UsageError(
                f"{name!r} is a {type(component).__name__}, which divides among ranks what only"
                " keepstep.integrations.deepspeed can name: Checkpointer(components(engine))"
            )
        if not (hasattr(component, "state_dict") and hasattr(component, "load_state_dict")):
            raise UsageError(
                f"{name!r} is a {type(component).__name__} without state_dict() and"
                " load_state_dict(); wrap it in a dict, or give it the two methods"
            )
    return state


def find_loader_names(components: Mapping[str, Any]) -> list[str]:
    """The names of the components that are loaders of torch, or made of one."""
    kind: Any = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    return [
        name
        for name, component in components.items()
        if kind is not None and isinstance(component, kind)
    ]


def largest_value(taken: TakenState, trusted: bool) -> str:
    """The path and the size of the value that takes the most bytes, for messages."""
    sizes = {
        ".".join(map(str, path)): len(extras_codec.encode(taken.values[leaf[1]], trusted=trusted))
        for path, leaf in leaves_of(taken.skeleton)
        if leaf[0] == "v"
    }
    name = max(sizes, key=sizes.__getitem__, default="the random states")
    return f"{name} ({sizes.get(name, 0):,} bytes)"


def capture_state(
    components: Mapping[str, Any], topology: ReplicaPlacement = ALONE, *, loose: Loose = NOWHERE
) -> TakenState:
    """Walk all components. Raises UsageError for tensors that cannot be kept."""
    walker = Walker(components, topology, loose=loose)
    branches = [(name, walker.component(name, component)) for name, component in components.items()]
    if walker.has_extras_sharing_memory(walker.tensors):
        walker = Walker(components, topology, loose=loose, follows_all=True)
        branches = [
            (name, walker.component(name, component)) for name, component in components.items()
        ]
    walker.tie_views()
    branches = [(name, walker.assign_shared_numbers(node)) for name, node in branches]
    leaves = divide_replicated_leaves(walker.tensors, topology)
    return TakenState(
        leaves,
        walker.aliases,
        walker.values,
        ("d", tuple(branches)),
        frozenset(walker.claims),
        _twins(leaves, topology),
        walker.parameters,
        dict(components),
        walker.held,
        walker.metadata,
        {
            "forms": {
                at: form for at, form in enumerate(walker.values) if type(form) is RequiresGradForm
            }
        },
    )


def recapture_state(
    before: TakenState,
    components: Mapping[str, Any],
    topology: ReplicaPlacement,
    *,
    loose: Loose = NOWHERE,
) -> TakenState:
    """The same as `capture_state`, for the same topology. As long as all tensors are those of
    `before`, which it then shares, it takes a third of the time."""
    again = RepeatedWalk(before, loose=loose)
    if again.finds_same(components):
        return replace(before, values=again.values, metadata=again.metadata)
    return capture_state(components, topology, loose=loose)


class StateCapture:
    """Takes the state at each save, beside how it was taken at the last one.

    Where tensors never stay the same, only a walk is tried. Where they are given other memory
    outside the optimizer's steps (`moves`: state that is offloaded after each update), nothing of
    the last save is held, because that would keep the former memory from being freed.
    """

    def __init__(self, components: Mapping[str, Any], before: TakenState | None = None) -> None:
        self._components, self._topology, self._misses = components, ALONE, 0
        self.before = before and _without_values(before)
        self.loose: Loose = NOWHERE
        self.moves = False
        self._doubted: TakenState | None = None

    def take(self, topology: ReplicaPlacement) -> TakenState:
        """The state as it is now."""
        self._topology = topology
        before, self.before, self._doubted = self.before, None, None
        if before is None:
            taken = capture_state(self._components, topology, loose=self.loose)
            self._misses += self._misses >= _MISSES
        else:
            taken = recapture_state(before, self._components, topology, loose=self.loose)
            self._misses = 0 if taken.cache is before.cache else self._misses + 1
        if not self.moves and (self._misses < _MISSES or self._misses % _MISSES_BETWEEN == 0):
            self.before = _without_values(taken)
            if before is not None and self._misses and _lazy(before) != _lazy(taken):
                self._doubted = self.before
        return taken

    def has_moved_optimizer_tensors(self) -> bool:
        """Called before an optimizer's step: whether what only such a step changes was given other
        memory since it was taken, as between the last two saves. True once."""
        if self._doubted is None or accelerator.current_accelerator().is_capturing():
            return False
        doubted, self._doubted = self._doubted, None
        # code of the script's might wait for other ranks, which have no doubts
        plain = {
            name: component
            for name, component in self._components.items()
            if is_state_made_by_torch(unwrap_module(component))
        }
        before = _lazy(doubted)
        now = _lazy(capture_state(plain, self._topology, loose=self.loose)) if plain else {}
        self.moves = any(now.get(name, place) != place for name, place in before.items())
        if self.moves:
            self.before = None
        return self.moves


def _lazy(taken: TakenState) -> dict[str, tuple[Any, ...]]:
    """Where the tensors are that only an optimizer's step changes."""
    return {leaf.name: leaf.mark for leaf in taken.tensors if leaf.lazy}


def _without_values(taken: TakenState) -> TakenState:
    """The same, to be compared with the next save: values may be large, and are taken anew."""
    return replace(taken, values=[None] * len(taken.values))


def layout_changes(layout: Layout, taken: TakenState) -> dict[str, str]:
    """The tensors by which a state differs from what a layout holds, each with what changed."""
    specs = {spec.name: spec for spec in taken.specs}
    held = {name: entry.spec for name, entry in layout.entries.items()}
    found = {name: "is new" for name in specs if name not in held}
    found |= {name: "is gone" for name in held if name not in specs}
    for name, spec in specs.items():
        if name in held and (spec.shape, spec.dtype) != (held[name].shape, held[name].dtype):
            before, now = (f"{spec.dtype}{list(spec.shape)}" for spec in (held[name], spec))
            found[name] = f"was {before} and is {now}"
    return found


def find_changing_places(found: Mapping[str, str], taken: TakenState) -> Loose:
    """Where tensors come and go, if these `changes` go on: the places of tensors of which the shape
    changes; of others the innermost container in which a tensor stayed."""
    stayed = {leaf.name for leaf in taken.tensors if leaf.name not in found}
    containers = {path for name in stayed for path in _above(name)}
    places = set[str]()
    for name, what in found.items():
        if what in ("is new", "is gone"):
            places.add(
                next((above for above in _above(name) if above in containers), _above(name)[0])
            )
        else:
            places.add(name)
    return frozenset(places)


def _above(name: str) -> list[str]:
    """The paths of the containers of a tensor, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)] or [name]


def encode_values(
    taken: TakenState,
    *,
    rng: Mapping[str, Any] | None,
    trusted: bool,
    difference: str = "",
    reloaded: str = "",
) -> bytes:
    """The extras of an image: everything in the state that is not a tensor. `difference`: see
    `save.replica_check`. `reloaded`: the step that names the base, see
    `save.frozen_parameters.FrozenBase`.

    Raises UsageError, naming the component and the keys, for a value that cannot be encoded.
    """
    kept: dict[str, Any] = {"values": taken.values}
    if taken.metadata:
        kept["metadata"] = taken.metadata
    if rng is not None:
        kept["rng"] = rng
    if difference:
        kept["difference"] = difference
    if reloaded:
        kept["reloaded"] = reloaded
    try:
        return extras_codec.encode(kept, trusted=trusted)
    except FormatError as error:
        raise UsageError(_named(taken, trusted) or str(error)) from None


def _named(taken: TakenState, trusted: bool) -> str:
    for path, leaf in leaves_of(taken.skeleton):
        if leaf[0] == "v":
            try:
                extras_codec.encode(taken.values[leaf[1]], trusted=trusted)
            except extras_codec.Unheld as error:
                return f"{'.'.join(map(str, path))}{error.place}: {error.why}"
    try:
        extras_codec.encode(taken.metadata, trusted=trusted)
    except extras_codec.Unheld as error:
        return f"the metadata of what state_dict() gives: {error.place}: {error.why}"
    return ""


def divide_replicated_leaves(
    leaves: list[TensorLeaf], topology: ReplicaPlacement
) -> tuple[TensorLeaf, ...]:
    """Reduce replicated tensors to the part that this rank stages.

    All ranks stage scalars, which are not worth dividing. So an image of one shard has everything
    that its rank needs.
    """
    if topology.world == 1:
        return tuple(leaves)
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, leaf in enumerate(leaves):
        if leaf.sharing is not None and leaf.whole.dim() and leaf.whole.numel():
            groups.setdefault(leaf.sharing.replicas, []).append(at)
    for replicas, places in groups.items():
        sharers = topology.select_staging_ranks(replicas)
        if len(sharers) > 1:
            _cut(leaves, places, sharers.index(topology.rank), len(sharers))
    return tuple(leaves)


def _cut(leaves: list[TensorLeaf], places: list[int], number: int, sharers: int) -> None:
    """Replace the leaves at `places` by part `number` of `select_staging_ranks`.

    They are ordered by name on the line of bytes, because ranks may number their parameters
    differently.
    """
    places = sorted(places, key=lambda at: leaves[at].name)
    bulks = tuple(
        ReplicatedTensorSize(tuple(leaves[at].whole.shape), leaves[at].whole.element_size())
        for at in places
    )
    for at, bulk, rows in zip(places, bulks, compute_row_partitions(bulks, sharers), strict=True):
        leaf, dim, begin, end = leaves[at], bulk.dim, rows[number], rows[number + 1]
        assert leaf.sharing is not None
        offsets = list(leaf.sharing.offsets)
        offsets[dim] += begin
        with torch.no_grad():
            part = leaf.whole.narrow(dim, begin, end - begin)
        leaves[at] = leaf._replace(
            tensor=part, offsets=tuple(offsets), global_shape=leaf.sharing.global_shape
        )


def _twins(leaves: tuple[TensorLeaf, ...], topology: ReplicaPlacement) -> tuple[int, ...]:
    if topology.world == 1 or any(leaf.sharing is None and not leaf.lenient for leaf in leaves):
        return ()
    return topology.twins(leaf.sharing.replicas for leaf in leaves if leaf.sharing is not None)


# --- buffers that no checkpoint holds -------------------------------------------------------------


_SAVES = 8


class UnsavedBufferDetector:
    """Watches the buffers of all components over the first saves."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self._buffers = list(_unsaved(components))
        self._marks: list[tuple[int, int] | None] = []
        self._saves = 0

    def changed(self, taken: TakenState) -> list[str]:
        """Called at each save: the names of buffers that have changed since the last one, unless
        they are in the state under another name."""
        self._saves += 1
        if not self._buffers or self._saves > _SAVES:
            return []
        before, self._marks = (
            self._marks,
            [_mark(module, name) for _, module, name in self._buffers],
        )
        moved = [
            (path, mark)
            for (path, _, _), mark, was in zip(self._buffers, self._marks, before, strict=False)
            if mark is not None and mark != was
        ]
        if not moved:
            return []
        kept = {leaf.mark[0] for leaf in taken.tensors if leaf.mark}
        return [path for path, mark in moved if mark[0] not in kept]


def _unsaved(components: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, str]]:
    for component, of_component in components.items():
        module = unwrap_module(of_component)
        if not isinstance(module, nn.Module):
            continue
        for path, part in module.named_modules():
            for name in sorted(part._non_persistent_buffers_set):
                yield ".".join(filter(None, (component, path, name))), part, name


def _mark(part: nn.Module, name: str) -> tuple[int, int] | None:
    buffer = part._buffers.get(name)
    if not isinstance(buffer, Tensor) or buffer.is_inference():
        return None
    try:
        return buffer.data_ptr(), buffer._version
    except (RuntimeError, ValueError):  # a tensor without an address
        return None
