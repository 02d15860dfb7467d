"""Modules: most are filled in place; what loads in its own way goes through `load_state_dict`.

A submodule loads in its own way if it overrides `_load_from_state_dict` or has load hooks; a whole
module does if it overrides `load_state_dict`. What torch itself defines so changes nothing as long
as all keys are those that were saved, so such a module is filled. All keys of a submodule that
loads in its own way get new tensors, as `torch.load` makes them: a hook must not find the saved
values in the module before they were loaded. Then `load_state_dict` is called once, with all keys
and with the metadata that was saved.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from keepstep.errors import UsageError, few
from keepstep.image import split_local_name
from keepstep.restore.targets import Live, Path, SavedTree, TensorRestorePlanner, TensorTarget
from keepstep.state import sharding
from keepstep.state.taken_state import (
    PLAIN_METADATA,
    Node,
    TakenState,
    is_module_extra_state,
    is_wrapper,
    iterate_inner_tensors,
    leaves_of,
)
from keepstep.state.wrappers import state_of_component, unwrap_module

_FILLED = ("torch.distributed.", "keepstep.")
_FILLED_IF_EQUAL = ("torch.nn.",)
"""Modules of torch whose own loading matters only where keys differ: older names or versions."""


def find_custom_load_prefixes(module: nn.Module) -> tuple[str, ...]:
    """The prefixes of the keys of the outermost submodules that load in their own way. ('',): the
    whole module."""
    return _outermost(module, _FILLED + _FILLED_IF_EQUAL)


def _outermost(module: nn.Module, filled: tuple[str, ...]) -> tuple[str, ...]:
    if _is_own(module.load_state_dict, filled):
        return ("",)
    found: tuple[str, ...] = ()
    for prefix, part in _parts(module):
        if _is_plain(part) or prefix.startswith(found):
            continue
        if any(_is_own(module, filled) for module in _loading(part)):
            found = (*found, prefix)
    return found


def _is_plain(part: nn.Module) -> bool:
    """Whether no code but torch's own can run when this part is loaded; most parts are plain."""
    own = vars(part)
    return (
        type(part)._load_from_state_dict is nn.Module._load_from_state_dict
        and "_load_from_state_dict" not in own
        and not own.get("_load_state_dict_pre_hooks")
        and not own.get("_load_state_dict_post_hooks")
    )


def _loading(part: nn.Module) -> Iterator[Any]:
    """The code that runs when this part alone is loaded."""
    yield part._load_from_state_dict
    for hooks in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        yield from getattr(part, hooks, {}).values()


def _is_own(function: Any, filled: tuple[str, ...]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    # compared now: the fence of a Checkpointer wraps the first of them
    if getattr(function, "__func__", None) in (
        nn.Module.load_state_dict,
        nn.Module._load_from_state_dict,
    ):
        return False
    origin = getattr(function, "__module__", None)
    return not (isinstance(origin, str) and origin.startswith(filled))


def find_incompatible_keys(module: nn.Module, keys: Iterable[Any]) -> list[str]:
    """Those of the keys that a strict `load_state_dict` does not expect, and those that it misses,
    without the parts whose code decides that."""
    prefixes = _outermost(module, ())
    if prefixes == ("",):
        return []
    expected = {f"{path}{name}" for path, part in _parts(module) for name in _expected(part)}
    return sorted(str(key) for key in expected ^ set(keys) if not str(key).startswith(prefixes))


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules(remove_duplicate=False):
        yield f"{path}." if path else "", part


def _expected(part: nn.Module) -> Iterator[str]:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and name not in part._non_persistent_buffers_set:
            yield name
    if type(part).set_extra_state is not nn.Module.set_extra_state:
        yield "_extra_state"


def check_loads(taken: TakenState) -> None:
    """Raise UsageError for a module whose `load_state_dict` refuses what its `state_dict` gives: it
    could be kept, but never restored."""
    for name, node in taken.skeleton[1]:
        module = unwrap_module(taken.components[name])
        if not isinstance(module, nn.Module) or node[0] != "d":
            continue
        refused = find_incompatible_keys(module, (key for key, _ in node[1]))
        if refused and (find_custom_load_prefixes(module) or _has_more(module, node, taken)):
            raise UsageError(
                f"{name}: load_state_dict() refuses what state_dict() gives ({few(refused, 8)}), so"
                " this could be kept, but never restored: name a component that gives only what is"
                " trained, such as an adapter (docs/add-keepstep.md, What cannot be kept)"
            )


def _has_more(module: nn.Module, node: Node, taken: TakenState) -> bool:
    """Whether the tree has more than the module's own tensors, so that it must be loaded."""
    memory = {plain.data_ptr() for plain in _memory_of(module)}
    leaves: dict[Any, Tensor] = {leaf.name: leaf.whole for leaf in taken.tensors}
    for _, leaf in leaves_of(node):
        tensor = leaves[taken.aliases.get(leaf[1], leaf[1])] if leaf[0] == "t" else None
        if tensor is None or (tensor.numel() and tensor.data_ptr() not in memory):
            return True
    return False


class ModuleLoader:
    """Plans the restore of one module for a `Loader`, by its `TensorRestorePlanner`."""

    def __init__(self, tensors: TensorRestorePlanner, name: str, module: nn.Module) -> None:
        self._tensors, self._name, self._module = tensors, name, module
        self._memory = {plain.data_ptr() for plain in _memory_of(module)}
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        self._wrappers = {name for name, tensor in named if is_wrapper(tensor)}
        self._prefixes: tuple[str, ...] = ()
        self._given: dict[str, Any] = {}
        self._filled: set[Any] = set()

    def plan(self, saved: SavedTree, live: Live, keys: frozenset[Any]) -> None:
        """Compare and plan; the differences are noted. `keys`: the live keys."""
        nodes = dict(saved.branches_of(saved.node))
        self._prefixes = self._own_prefixes(nodes, live, keys)
        # the names of the saved tensors, without ranks
        leaves = leaves_of(saved.node)
        names = {path: split_local_name(leaf[1])[0] for path, leaf in leaves if leaf[0] == "t"}
        whole = self._wrappers & _keys_of(live)
        copied = {path[0] for path, here in live.items() if not self._is_own(here)}
        self._filled = _keys_of(live) - copied
        for path, here in live.items():
            key = path[0]
            if not self._loads(key) or key in whole:
                self._tensor(path, here._replace(name=names.get(path, here.name)))
            elif (
                key not in nodes
                and len(path) == 1
                and self._tensors.names.find_saved_tensor(here.name)
            ):
                self._given[key] = self._tensors.new_tensor(here.name, here)
        for key, node in nodes.items():
            if key not in whole and self._is_given(key, node, keys):
                self._given[key] = self._built(key, node, saved, live)
        self._values_elsewhere(nodes, live, keys)
        if self._given or self._prefixes:
            left = {key for key in keys if not self._loads(key)}
            for key in find_incompatible_keys(self._module, left | self._given.keys()):
                self._tensors.note_diff(f"{self._name}.{key}: load_state_dict() refuses it")
            self._tensors.call_after_fill(self._name, lambda: self._finish(list(nodes), saved))

    def _loads(self, key: Any) -> bool:
        return str(key).startswith(self._prefixes)

    def _own_prefixes(
        self, nodes: Mapping[Any, Node], live: Live, keys: frozenset[Any]
    ) -> tuple[str, ...]:
        """What torch's own modules convert (older names, older versions) loads in its own way, too,
        where keys or shapes differ."""
        found = find_custom_load_prefixes(self._module)
        if found == ("",):
            return found
        differing = (
            [str(key) for key in keys ^ nodes.keys()] if self._tensors.is_only_saved_image else []
        )
        if not differing:
            return found
        more = (
            module_name
            for module_name in _outermost(self._module, _FILLED)
            if any(key.startswith(module_name) for key in differing)
        )
        return (*found, *(key for key in more if key not in found))

    def _tensor(self, path: Path, here: TensorTarget) -> None:
        """Plan for a live tensor that does not load in its own way."""
        if is_module_extra_state(path):
            return
        if self._is_own(here) or not here.tensor.numel():
            self._tensors.plan_fill(here)
        elif len(path) == 1:  # made by a custom state_dict: load_state_dict can put it back
            self._given[path[0]] = self._tensors.new_tensor(here.name, here)

    def _is_own(self, here: TensorTarget) -> bool:
        """Whether it is the module's own memory, and no copy that a custom state_dict made."""
        return here.tensor.data_ptr() in self._memory

    def _is_given(self, key: Any, node: Node, keys: frozenset[Any]) -> bool:
        """Whether `load_state_dict` gets what was saved under this key, and not the live tensor."""
        if self._loads(key):
            # of another world, a rank's image may have the keys of other parts of the model
            return key in keys or self._tensors.is_only_saved_image or self._prefixes != ("",)
        if key in self._given or (node[0] == "t" and not is_module_extra_state((key,))):
            return False
        if key not in keys and not is_module_extra_state((key,)):
            if self._tensors.is_only_saved_image and node[0] == "v":
                self._tensors.note_diff(f"{self._name}.{key}: in the checkpoint, missing here")
            return False
        if is_module_extra_state((key,)):
            return True
        return key not in self._filled or any(leaf[0] == "v" for _, leaf in leaves_of(node))

    def _built(self, key: Any, node: Node, saved: SavedTree, live: Live) -> Any:
        def tensor(path: Path, name: str) -> Tensor | None:
            here = None if is_module_extra_state(path) else live.get(path)
            if here is not None and not self._loads(key) and self._is_own(here):
                return here.live
            return self._tensors.new_tensor(name, here)

        return self._tensors.build_part(saved, ("d", ((key, node),)), tensor)[key]

    def _values_elsewhere(
        self, nodes: Mapping[Any, Node], live: Live, keys: frozenset[Any]
    ) -> None:
        """Values (an extra state, for example) that only another saved rank has."""
        tensors = {path[0] for path in live if not is_module_extra_state(path)}
        for key in sorted(keys - nodes.keys() - tensors - self._given.keys(), key=str):
            found = self._tensors.find_on_other_ranks(self._name, key)
            if found is not None:
                self._given[key] = self._built(key, found[1], found[0], {})
            elif not self._loads(key):
                self._tensors.note_diff(f"{self._name}.{key}: here, missing in the checkpoint")

    def _finish(self, order: list[Any], saved: SavedTree) -> None:
        state: OrderedDict[str, Any] = OrderedDict()
        loads_all = self._prefixes == ("",) and not self._wrappers
        rest = {} if loads_all else state_of_component(self._module)
        for key in (*order, *(key for key in rest if not self._loads(key)), *self._given):
            if key in self._given:
                state[key] = self._given[key]
            elif key in rest:
                state[key] = rest[key]
        metadata = saved.metadata()
        if metadata is not None:
            state._metadata = self._metadata(metadata)  # type: ignore[attr-defined]
        self._module.load_state_dict(state)

    def _metadata(self, saved: Mapping[str, Any]) -> OrderedDict[str, Any]:
        paths = (path for path, _ in self._module.named_modules(remove_duplicate=False))
        return OrderedDict((path, dict(saved.get(path, PLAIN_METADATA))) for path in paths)


def _keys_of(live: Live) -> set[Any]:
    """The keys under which there are live tensors."""
    return {path[0] for path in live}


def _memory_of(module: nn.Module) -> Iterator[Tensor]:
    """The plain tensors that hold the module's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        for _, plain in iterate_inner_tensors(tensor, ""):
            yield sharding.local_tensor_of(plain) if sharding.is_dtensor(plain) else plain
