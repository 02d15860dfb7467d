"""Walks the state of a training script: names, sections, and which ranks have each tensor.

A parameter is known by its name in the module, and its optimizer state by that name. The trees of
modules are read first: FSDP puts its sharded parameters back in place when its state is read, and
the optimizer knows only these parameters.

`torch.save` keeps storages, so tensors over the same memory (a ring buffer and its newest row, a
flat buffer and its pieces) overlap again after a load. An image keeps tensors. So of those that
overlap, outside of modules, one is kept, the base, and the others as views of it (`ViewForm`). The
base is a tensor that holds the memory of the others; if there is none, a vector of bytes over all
of them. A module's own tensors are filled where they are, and are only bases.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keepstep.compile_cache import CompileCache
from keepstep.errors import FormatError, KeepstepError, UsageError
from keepstep.image import (
    Parameters,
    TensorRole,
    add_rank_suffix,
    codecs,
    extras_codec,
    split_local_name,
)
from keepstep.image.codecs import (
    LARGE_BYTES,
    ArrayForm,
    ClassForm,
    RequiresGradForm,
    SharedAgain,
    SharedDefinitionForm,
    SubclassForm,
    ViewForm,
)
from keepstep.image.extras_codec import MAX_DEPTH
from keepstep.state import sharding
from keepstep.state.accelerator import check_device, check_tensor_has_storage
from keepstep.state.sharding import ALONE, Claim, Members, ReplicaPlacement, Sharing
from keepstep.state.taken_state import (
    PLAIN_METADATA,
    Node,
    TakenState,
    TensorLeaf,
    is_wrapper,
    iterate_inner_tensors,
    snapshot_tensor_metadata,
)
from keepstep.state.wrappers import (
    ShardedParameterModule,
    replication_of,
    state_of_component,
    unwrap_module,
)

_CONJ, _NEG = -2, -1  # in a mark


class _Span(NamedTuple):
    """Where a leaf lies: `begin` to `end` in bytes. `fixed`: it is a module's."""

    begin: int
    end: int
    leaf: TensorLeaf
    fixed: bool

    def holds(self, other: _Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def _overlaps(
    leaves: Iterable[TensorLeaf],
    *,
    is_fixed: Callable[[TensorLeaf], bool],
    is_kept: Callable[[TensorLeaf], bool],
    make_base: Callable[[TensorLeaf, Tensor], str],
) -> dict[str, tuple[str, ViewForm]]:
    """The base and the form of each leaf that is a view, by its name.

    `is_fixed`: whether a leaf is a module's. `is_kept`: whether a restore can find a leaf in its
    place, so that it may be a base. `make_base(leaf, tensor)`: adds a new base beside this leaf,
    and returns its name.
    """
    views: dict[str, tuple[str, ViewForm]] = {}
    for group in _groups(_spans(leaves, is_fixed)):
        bases = [span for span in group if span.fixed and span.leaf.tensor.is_contiguous()]
        left = []
        for span in group:
            base = next((base for base in bases if base.holds(span)), None)
            if base is not None and not span.fixed:
                views[span.leaf.name] = (
                    base.leaf.name,
                    _form_of(span.leaf.tensor, span.begin - base.begin),
                )
            elif not span.fixed:
                left.append(span)
        for rest in _groups(left):
            name, begin = _base(rest, is_kept, make_base)
            for span in rest:
                if span.leaf.name != name:
                    views[span.leaf.name] = name, _form_of(span.leaf.tensor, span.begin - begin)
    return views


def _spans(leaves: Iterable[TensorLeaf], is_fixed: Callable[[TensorLeaf], bool]) -> list[_Span]:
    """The leaves that can be views or bases, where they lie."""
    spans = []
    for leaf in leaves:
        tensor = leaf.tensor
        if leaf.fresh or leaf.live is not tensor or leaf.whole is not tensor or not leaf.mark[0]:
            continue
        if leaf.mark[_CONJ] or leaf.mark[_NEG] or not (size := tensor.nbytes):
            continue
        fixed = is_fixed(leaf)
        if leaf.sharing is not None and not fixed:
            continue
        if not tensor.is_contiguous():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            size = (sum((many - 1) * step for many, step in steps) + 1) * tensor.element_size()
        spans.append(_Span(leaf.mark[0], leaf.mark[0] + size, leaf, fixed))
    return spans


def _groups(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Those that overlap, at least two together, at least one of which is no module's."""
    groups: list[list[_Span]] = []
    end, last = 0, None
    for span in sorted(spans, key=itemgetter(0)):
        if last is not None and span.begin < end:
            if groups and groups[-1][-1] is last:
                groups[-1].append(span)
            else:
                groups.append([last, span])
            end = max(end, span.end)
        else:
            end = span.end
        last = span
    found = [group for group in groups if not all(span.fixed for span in group)]
    return [part for group in found for part in _of_one_storage(group)]


def _of_one_storage(group: Sequence[_Span]) -> list[list[_Span]]:
    """Memory that several storages share (of numpy's arrays, say) is not followed: `torch.save`
    does not, either."""
    parts: dict[Any, list[_Span]] = {}
    for span in group:
        storage = span.leaf.tensor.untyped_storage()
        place = span.leaf.tensor.device, storage.data_ptr(), storage.nbytes()
        parts.setdefault(place, []).append(span)
    return [part for part in parts.values() if len(part) > 1]


def _base(
    group: Sequence[_Span],
    is_kept: Callable[[TensorLeaf], bool],
    make_base: Callable[[TensorLeaf, Tensor], str],
) -> tuple[str, int]:
    """The name of the base, and where it begins."""
    begin, end = min(span.begin for span in group), max(span.end for span in group)
    if all(is_kept(span.leaf) for span in group):
        for span in group:
            if (span.begin, span.end) == (begin, end) and span.leaf.tensor.is_contiguous():
                return span.leaf.name, begin
    first = min(group, key=lambda span: span.begin).leaf
    storage = first.tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=first.tensor.device)
    with torch.no_grad():
        whole = whole.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))
    return make_base(first, whole), begin


def _form_of(tensor: Tensor, offset_bytes: int = 0) -> ViewForm:
    """How the tensor lies in the memory of a base that begins so many bytes before it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ViewForm(dtype, offset_bytes, tuple(tensor.shape), tensor.stride())


_PLAIN = frozenset({int, float, str, bool, type(None)})


Loose = frozenset[str]
"""Paths of containers, and of tensors, at and below which small tensors are kept as values are:
there they come and go, and each time the layout would be another one."""

NOWHERE: Loose = frozenset()

_FORMS = frozenset({OrderedDict, defaultdict, deque})


class _Owner(NamedTuple):
    """A parameter as its optimizer state sees it.

    `path`: the prefix of the names of its state. `members`: the ranks that have the parameter; None
    if only this rank has it.
    """

    path: str
    members: Members
    sharded: bool


_NO_OWNER = _Owner("", None, False)


class Walker:
    """One walk: collects leaves, and recognizes tensors that appear under several names."""

    def __init__(
        self,
        components: Mapping[str, Any],
        topology: ReplicaPlacement,
        *,
        loose: Loose = NOWHERE,
        follows_all: bool = False,
    ) -> None:
        """`loose`: see `Loose`. `follows_all`: see `_is_node`."""
        self._loose = loose
        self.tensors: list[TensorLeaf] = []
        self.aliases: dict[str, str] = {}
        self.values: list[Any] = []
        self.claims: set[Claim] = set()
        self.parameters: dict[str, Parameters] = {}
        self.held: dict[str, list[Any]] = {}
        self.metadata: dict[str, dict[str, Any] | None] = {}
        self._topology = topology
        self._names: set[str] = set()
        self._seen: dict[Any, str] = {}
        self._trees: dict[str, Any] = {}
        self._known: dict[int, tuple[str, Members]] = {}
        self._parameters: dict[str, Members] = {}
        self._unflattened: dict[str, tuple[int, ...]] = {}
        self._pointers: set[int] = set()
        self._wrapped = False
        self._inner: Any = None
        self._there: set[int] | None = None
        self._owners: dict[str, _Owner] = {}
        self._owner = _NO_OWNER
        self._section = TensorRole.REST
        self._lazy = self._lenient = self._module = self._formed = False
        self._open: list[tuple[int, str]] = []
        self._nodes: dict[int, tuple[Any, Node]] = {}
        self._numbers: dict[int, int] = {}
        self._small: set[int] = set()
        self.follows_all = follows_all
        self._fixed: set[str] = set()
        self._kept: set[str] = set()
        self._views: dict[str, tuple[str, ViewForm]] = {}
        for name, component in components.items():
            if isinstance(unwrap_module(component), nn.Module):
                self._know(name, component)

    def component(self, name: str, component: Any) -> Node:
        """Walk one component. Returns its branch of the tree."""
        self._begin(component)
        self.held[name] = _held(self._inner)
        self._owners = self._owners_of(name) if self._lazy else {}
        tree = self._tree(name, component)
        with torch.no_grad():  # for `local_of`
            node = self._branch(tree, name)
        return self._value(tree) if node is None else node

    def _begin(self, component: Any) -> None:
        inner = unwrap_module(component)
        self._inner, self._there = inner, None
        self._lazy = isinstance(inner, torch.optim.Optimizer)
        self._section = TensorRole.OPTIMIZER if self._lazy else TensorRole.REST
        self._module = isinstance(inner, nn.Module)
        # modules and optimizers handle the forms of their own containers and arrays
        self._formed = not (self._module or self._lazy)
        self._lenient = isinstance(inner, CompileCache) or replication_of(component) is not None

    def _tree(self, name: str, component: Any) -> Any:
        tree = self._trees[name] if name in self._trees else _tree_of(name, component)
        if self._module:
            metadata = getattr(tree, "_metadata", None)
            if not isinstance(metadata, dict):
                self.metadata[name] = None
            elif rows := {path: of for path, of in metadata.items() if of != PLAIN_METADATA}:
                self.metadata[name] = rows
        # a dict is refilled in place, so its kind is not kept; a plain one may stand elsewhere, too
        return dict(tree) if isinstance(self._inner, dict) and type(tree) is not dict else tree

    # --- parameters and their owners -----------------------------------------------------------

    def _know(self, name: str, component: Any) -> None:
        self._trees[name] = _tree_of(name, component)
        replication = replication_of(component)
        if isinstance(component, ShardedParameterModule):
            shapes = component.shapes.items()
            self._unflattened.update((f"{name}.{path}", shape) for path, shape in shapes)
        for path, parameter in unwrap_module(component).named_parameters(remove_duplicate=False):
            members: Members = None
            if replication is not None and path not in replication.ignored:
                members = replication.ranks
            full = f"{name}.{path}"
            self._known.setdefault(id(parameter), (full, members))
            if is_wrapper(parameter):
                parts = dict(iterate_inner_tensors(parameter, full))
                self._parameters |= dict.fromkeys(parts, members)
                self._pointers |= {_pointer(plain, part) for part, plain in parts.items()}
            else:
                self._parameters[full] = members
                self._pointers.add(_pointer(parameter, full))

    def _owners_of(self, name: str) -> dict[str, _Owner]:
        """The owner of each parameter's state, by the path of that state in the optimizer's
        tree."""
        owners = {}
        named: list[tuple[str, tuple[int, ...]]] = []
        for index, parameter in enumerate(self.held[name]):
            full, members = self._known.get(id(parameter), (str(index), None))
            sharded = sharding.is_dtensor(parameter)
            if sharded:
                members = sharding.sharing_of(parameter, full).members
            owner = _Owner(f"{name}.state.{full}", members, sharded)
            owners[f"{name}.state.{index}"] = owner
            self.claims.add((owner.path, members))
            named.append((full, parameter.shape))
        self.parameters[name] = tuple(named)
        return owners

    # --- the tree ------------------------------------------------------------------------------

    def tie_views(self) -> None:
        """Keep tensors over the memory of others as views of these."""
        self._views = _overlaps(
            self.tensors,
            is_fixed=lambda leaf: leaf.name in self._fixed,
            is_kept=lambda leaf: leaf.name in self._kept,
            make_base=self._make_base,
        )
        for leaf in [*self.tensors]:
            if leaf.name in self._kept and leaf.fresh and _is_expanded(leaf.tensor):
                self._tie_expanded(leaf)
        for alias, first in [*self.aliases.items()]:
            if first in self._views:
                self._views[alias] = self._views[first]
                del self.aliases[alias]
        self.tensors = [leaf for leaf in self.tensors if leaf.name not in self._views]

    def _tie_expanded(self, leaf: TensorLeaf) -> None:
        """Keep an expanded tensor as a view of its distinct elements."""
        tensor = leaf.tensor
        sizes = [
            1 if step == 0 else size
            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        with torch.no_grad():
            distinct = tensor.as_strided(sizes, tensor.stride())
        if distinct.is_contiguous():
            self._views[leaf.name] = self._make_base(leaf, distinct), _form_of(tensor)

    def _make_base(self, beside: TensorLeaf, whole: Tensor) -> str:
        name = beside.name
        while name in self._names:
            name += "~"
        self._names.add(name)
        self._section, self._lazy = beside.section, False
        mark = snapshot_tensor_metadata(whole, whole)
        self._add(name, name, whole, whole, None, fresh=True, mark=mark)
        return name

    def assign_shared_numbers(self, node: Node) -> Node:
        """The same tree with its views, in which the objects that were met again have a number."""
        if node[0] == "t" and node[1] in self._views:
            base, form = self._views[node[1]]
            return self._in_form(form, ("t", base))
        if node[0] in ("t", "v") or not (self._numbers or self._views):
            return node
        if node[0] == "x":
            made: Node = ("x", node[1], self.assign_shared_numbers(node[2]))
        elif node[0] == "d":
            made = ("d", tuple((key, self.assign_shared_numbers(child)) for key, child in node[1]))
        else:
            made = (node[0], tuple(self.assign_shared_numbers(child) for child in node[1]))
        number = self._numbers.get(id(node))
        return made if number is None else self._in_form(SharedDefinitionForm(number), made)

    def _branch(self, tree: Any, path: str) -> Node | None:
        """A node if there is a tensor at or below `tree`, else None."""
        if isinstance(tree, Tensor):
            leaf = self._parts(tree, path) if is_wrapper(tree) else ("t", self._tensor(tree, path))
            if not (self._formed and tree.requires_grad):
                return leaf
            return self._in_form(RequiresGradForm(isinstance(tree, nn.Parameter)), leaf)
        if not self._formed:
            return self._plain_branch(tree, path)
        if id(tree) in self._nodes:  # the memory of the first place serves this one, too
            _, first = self._nodes[id(tree)]
            number = self._numbers.setdefault(id(first), len(self._numbers))
            return self._value(SharedAgain(number))
        node = self._plain_branch(tree, path) or self._formed_branch(tree, path)
        if node is not None and not isinstance(tree, tuple):
            self._nodes[id(tree)] = tree, node
        return node

    def _plain_branch(self, tree: Any, path: str) -> Node | None:
        kind = type(tree)
        if isinstance(tree, Mapping):
            return self._with_form(self._container("d", tree, path), tree, path)
        if kind is list or kind is tuple:
            return self._container("l" if kind is list else "u", tree, path)
        return None

    def _formed_branch(self, tree: Any, path: str) -> Node | None:
        """The same of what a module or an optimizer does not hold."""
        kind = type(tree)
        if kind is deque and self._is_node(tree):
            return self._with_form(self._container("l", tree, path), tree, path)
        if codecs.is_named_tuple(kind) and not getattr(tree, "__dict__", None):
            node = self._container("u", tree, path)
            return node and self._in_form(ClassForm(kind), node)
        if codecs.is_namespace(kind) or dataclasses.is_dataclass(kind):
            node = self._container("d", codecs.attributes_of(tree), path)
            return node and self._in_form(ClassForm(kind), node)
        form = ArrayForm.of(tree)
        if form is None:
            return None
        return self._in_form(form, ("t", self._tensor(form.wrap_as_tensor(tree), path, fresh=True)))

    def _parts(self, tree: Any, path: str) -> Node:
        """The tensors in which a wrapper keeps its values. They are copied at once, because torch
        does not move their version counters. A restore makes a new wrapper of them, but not in a
        module, where it fills them."""
        was, self._wrapped = self._wrapped, True
        if self._module and not was:
            self._check_parts(tree, path)
        names, context = tree.__tensor_flatten__()
        nodes = tuple((name, self._branch(getattr(tree, name), f"{path}.{name}")) for name in names)
        self._wrapped = was
        if self._module:
            return ("d", nodes)
        form = SubclassForm(type(tree), context, tuple(tree.shape), tree.stride())
        return self._in_form(form, ("d", nodes))

    def _check_parts(self, tree: Any, path: str) -> None:
        """Check that the parts are those of the module itself, because a restore fills the
        parts."""
        if self._there is None:  # once per component: there may be many
            tensors = (*self._inner.parameters(), *self._inner.buffers())
            plains = (
                plain for tensor in tensors for _, plain in iterate_inner_tensors(tensor, path)
            )
            self._there = {_pointer(plain, path) for plain in plains}
        for part, plain in iterate_inner_tensors(tree, path):
            if plain.numel() and _pointer(plain, part) not in self._there:
                raise UsageError(
                    f"{part}: state_dict() gives a copy of this part of a {type(tree).__name__},"
                    " so it cannot be filled where it is"
                )

    def _with_form(self, node: Node | None, tree: Any, path: str) -> Node | None:
        """`node` with the kind of its container; a plain dict is kept without one."""
        kind = type(tree)
        if node is None or kind is dict or not self._formed:
            return node
        if kind not in _FORMS:
            if not self._open:  # what a state_dict() gives
                return node
            raise UsageError(
                f"{path}: a {kind.__module__}.{kind.__qualname__} of tensors would come back as a"
                " plain dict: make a dict of it, or name it as a component of its own"
            )
        form: Any = OrderedDict()
        if kind is OrderedDict:
            vars(form).update(vars(tree))
        else:
            form = deque(maxlen=tree.maxlen) if kind is deque else defaultdict(tree.default_factory)
        return self._in_form(form, node)

    def _is_node(self, tree: deque[Any]) -> bool:
        """Whether it does not belong in the extras. A growing deque may hold any number of small
        tensors there, which change no layout; but not if their memory is that of other tensors."""
        if self.follows_all or any(map(_is_large, tree)):
            return True
        self._small |= {_storage_of(tensor) for tensor in tree if isinstance(tensor, Tensor)}
        return False

    def has_extras_sharing_memory(self, leaves: Iterable[TensorLeaf]) -> bool:
        """Whether a tensor that was left to the extras lies in the memory of one of `leaves`."""
        return bool(self._small) and not self._small.isdisjoint(
            _storage_of(leaf.tensor) for leaf in leaves
        )

    def _in_form(self, form: Any, node: Node) -> Node:
        return ("x", self._value(form)[1], node)

    def _container(self, kind: str, tree: Any, path: str) -> Node | None:
        children: list[tuple[Any, Any, Node | None]] = []
        found = False
        self._enter(tree, path)
        if kind != "d" and _PLAIN.issuperset(map(type, tree)):  # may be long
            self._open.pop()
            return None
        for key, child in tree.items() if kind == "d" else enumerate(tree):
            node = None
            if type(child) not in _PLAIN and not (self._loose and self._is_loose(child, path, key)):
                node = self._child(child, f"{path}.{key}")
                found = found or node is not None
            children.append((key, child, node))
        self._open.pop()
        if not found:
            return None
        if kind == "d":
            return ("d", tuple(self._item(key, child, node, path) for key, child, node in children))
        return (kind, tuple(node or self._value(child) for _, child, node in children))

    def _is_loose(self, child: Any, path: str, key: object) -> bool:
        """Whether it is a small tensor where tensors come and go, which is kept as a value is."""
        if not self._formed or type(child) is not Tensor or _is_large(child):
            return False
        return f"{path}.{key}" in self._loose or any(at in self._loose for _, at in self._open)

    def _enter(self, tree: Any, path: str) -> None:
        self._open.append((id(tree), path))
        if len(self._open) <= MAX_DEPTH:
            return
        first: dict[int, str] = {}
        for key, at in self._open:
            if first.setdefault(key, at) != at:
                raise UsageError(f"{at}: this is {first[key]} again, which contains itself")
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH}")

    def _child(self, child: Any, path: str) -> Node | None:
        owner = self._owners.get(path)
        if owner is None:
            return self._branch(child, path)
        self._owner = owner
        try:
            return self._branch(child, owner.path)
        finally:
            self._owner = _NO_OWNER

    def _item(self, key: Any, child: Any, node: Node | None, path: str) -> tuple[Any, Node]:
        if type(key) is not str and type(key) is not int:
            _check_key(key, path)
        return key, node or self._value(child)

    def _value(self, value: Any) -> Node:
        self.values.append(value)
        return ("v", len(self.values) - 1)

    # --- tensors -------------------------------------------------------------------------------

    def _tensor(self, live: Tensor, path: str, *, fresh: bool = False) -> str:
        local = sharding.local_tensor_of(live) if sharding.is_dtensor(live) else live
        check_tensor(local, path)
        strides = local.stride()
        if 0 in strides and _is_expanded(local):
            if self._module:  # a module's tensors are filled in place
                raise UsageError(
                    f"{path}: the elements of this expanded tensor share memory, so it cannot be"
                    " filled at a restore (nor by load_state_dict); make it with .clone()"
                )
            fresh = True
        shown_path = path
        while path in self._names or split_local_name(path)[1] is not None:
            path += "~"
        self._names.add(path)
        sharing, claim = self._common(live, local, path, shown_path)
        self.claims.add(claim)
        carried = self._topology.find_rank_of_stored_name(claim)
        name = path if carried is None else add_rank_suffix(path, carried)
        mark = snapshot_tensor_metadata(live, local)
        pointer = mark[0]
        if not pointer or not local.is_cpu:  # other CPU tensors are checked when copied
            check_tensor_has_storage(local, path)
        if pointer:
            first = self._seen.setdefault((mark, fresh), name)
            if first != name:
                self.aliases[name] = first
                return name
        self._add(name, shown_path, live, local, sharing, fresh=fresh, mark=mark)
        if self._module:
            self._fixed.add(name)
        elif self._formed:
            self._kept.add(name)
        return name

    def _add(
        self,
        name: str,
        path: str,
        live: Tensor,
        local: Tensor,
        sharing: Sharing | None,
        *,
        fresh: bool,
        mark: tuple[Any, ...],
    ) -> None:
        pointer = mark[0]
        parameter = path in self._parameters or (
            pointer in self._pointers and pointer != 0 and not fresh
        )
        whole = sharing is None or sharing.global_shape == tuple(local.shape)
        self.tensors.append(
            TensorLeaf(
                name=name,
                tensor=local,
                section=TensorRole.PARAMS if parameter else self._section,
                lazy=(self._lazy or parameter) and not self._wrapped,
                whole=local,
                live=live,
                offsets=() if sharing is None or whole else sharing.offsets,
                global_shape=None if sharing is None or whole else sharing.global_shape,
                whole_offsets=(0,) * local.dim() if sharing is None else sharing.offsets,
                sharing=sharing,
                lenient=self._lenient and not parameter,
                fresh=fresh,
                unflattened=self._unflattened.get(path),
                mark=mark,
            )
        )

    def _common(
        self, live: Tensor, local: Tensor, path: str, shown_path: str
    ) -> tuple[Sharing | None, Claim]:
        """How this tensor is shared with other ranks, and the claim on which its name rests.
        `shown_path`: its path before it was made a name of its own."""
        owner = self._owner
        if live is not local:
            sharing = sharding.sharing_of(live, path)
            return sharing, (owner.path or path, sharing.members)
        if owner is _NO_OWNER:
            members = self._parameters.get(shown_path)
            return _same_on(members, local), (path, members)
        if not owner.sharded:
            return self._beside(owner, local)
        if local.dim() == 0:  # a step counter
            return _same_on(owner.members, local), (owner.path, owner.members)
        return None, (path, None)

    def _beside(self, owner: _Owner, local: Tensor) -> tuple[Sharing | None, Claim]:
        """State of a parameter that is not sharded. If several ranks have such state, it is the
        same on all of them. A sharded optimizer has it on one rank only."""
        holders = self._topology.holders.get((owner.path, owner.members))
        if owner.members is None or holders is None:
            return None, (owner.path, None)
        if len(holders) == 1:
            return None, (owner.path, owner.members)
        return _same_on(holders, local), (owner.path, owner.members)


class RepeatedWalk(Walker):
    """A walk beside an earlier one, which collects new values as long as every tensor is the one
    that was there, unchanged but for its elements.

    The training thread pays for one at each save. So whole lists are compared, which takes a
    fraction of a walk: what `state_dict` reads of a module (`_Modules`), the rows of an optimizer's
    state (`_Table`), and where all tensors lie (`_Marks`).
    """

    def __init__(self, before: TakenState, *, loose: Loose = NOWHERE) -> None:
        super().__init__({}, ALONE, loose=loose)
        self._before = before
        self._forms: dict[int, RequiresGradForm] = before.cache.get("forms", {})
        self.values = [None] * len(before.values)
        self._met: dict[int, Any] = {}
        self._found_own: list[Tensor] = []
        self._found_new: list[Tensor] = []
        self._found_names: tuple[list[str], list[str]] = [], []

    def finds_same(self, components: Mapping[str, Any]) -> bool:
        """Whether these are the same components, with the same tensors in the same tree."""
        before = self._before.components
        if list(before) != list(components) or not _all_same(before.values(), components.values()):
            return False
        try:
            with torch.no_grad():
                found = all(
                    self._finds(name, components[name], node)
                    for name, node in self._before.skeleton[1]
                )
                return (
                    found
                    and self._fit()
                    and not self.has_extras_sharing_memory(self._before.tensors)
                )
        except (UsageError, RuntimeError):  # of a tensor without an address; a walk says where
            return False

    def _finds(self, name: str, component: Any, node: Node) -> bool:
        self._begin(component)
        modules = self._modules_of(name, node)
        if modules is not None:
            self._meet(modules.tensors, modules.names, new=True)
            if name in self._before.metadata:
                self.metadata[name] = self._before.metadata[name]
            return modules.is_unchanged()
        if not _all_same(_held(self._inner), self._before.held[name]):
            return False
        states = self._states_of(name, node)
        found = None if states is None else states.read()
        if states is None or found is None:
            return self._same(self._tree(name, component), node, name)
        return self._same_rows(states.table, found[0], name) and self._same(
            found[1], states.groups, name
        )

    def _states_of(self, name: str, node: Node) -> _States | None:
        if not self._lazy:
            return None
        known: dict[str, _States | None] = self._before.cache.setdefault("states", {})
        states = known.get(name)
        if name not in known or (states is not None and states.inner is not self._inner):
            states = known[name] = _States.of(self._inner, node, self._table_of)
        return states

    def _modules_of(self, name: str, node: Node) -> _Modules | None:
        if not self._module:
            return None
        known: dict[str, _Modules | None] = self._before.cache.setdefault("modules", {})
        modules = known.get(name)
        if name not in known or (modules is not None and modules.root is not self._inner):
            modules = known[name] = _Modules.of(self._inner, node)
        return modules

    def _same(self, tree: Any, node: Node, path: str) -> bool:
        kind, inner = node[0], node[1]
        if kind == "t":
            if not isinstance(tree, Tensor) or (self._formed and tree.requires_grad):
                return False
            return self._is_there(tree, inner)
        if kind == "x" and inner in self._forms:
            form = self.values[inner] = self._forms[inner]
            if not isinstance(tree, Tensor) or not tree.requires_grad or node[2][0] != "t":
                return False
            same = isinstance(tree, nn.Parameter) is form.parameter
            return same and self._is_there(tree, node[2][1])
        if kind == "v":
            return self._is_value(tree, inner, path)
        if self._formed and kind != "u" and kind != "x":  # it may have become one of two places
            if id(tree) in self._met:
                return False
            self._met[id(tree)] = tree
        if kind == "d":
            if not isinstance(tree, Mapping) or len(tree) != len(inner):
                return False
            if self._formed and type(tree) in _FORMS:
                return False
            table = None if self._formed else self._table_of(node)
            if table is not None and (entries := table.entries(tree)) is not None:
                return self._same_rows(table, entries, path)
            for (key, child), (was, below) in zip(tree.items(), inner, strict=True):
                if key != was or type(key) is not type(was) or not self._same(child, below, path):
                    return False
            return True
        if kind == "x":  # an array is copied at each save; a kind of dict may be another one now
            return False
        if type(tree) is not (list if kind == "l" else tuple) or len(tree) != len(inner):
            return False
        return all(self._same(child, below, path) for child, below in zip(tree, inner, strict=True))

    def _table_of(self, node: Node) -> _Table | None:
        # nodes are the skeleton's, which lives as long as the cache
        known: dict[int, _Table | None] = self._before.cache.setdefault("tables", {})
        if id(node) not in known:
            known[id(node)] = _Table.of(node, self._before.aliases)
        return known[id(node)]

    def _same_rows(self, table: _Table, entries: list[Any], path: str) -> bool:
        tensors = [entries[at] for at in table.tensors] if table.values else entries
        self._meet(tensors, table.names, new=False)
        return all(self._is_value(entries[at], value, path) for at, value in table.values)

    def _is_value(self, tree: Any, at: int, path: str) -> bool:
        self.values[at] = tree
        if type(tree) in _PLAIN or (self._loose and self._is_small(tree)):
            return True
        return self._branch(tree, path) is None

    def _is_small(self, tree: Any) -> bool:
        """Whether small tensors alone make this no value. The places of values have no names here:
        where there are loose ones, each may hold small tensors."""
        return self._formed and type(tree) is Tensor and not _is_large(tree)

    def _is_loose(self, child: Any, path: str, key: object) -> bool:
        return self._is_small(child)

    def _is_there(self, live: Tensor, name: str) -> bool:
        """Meet a tensor that may be the one that had this name.

        `state_dict` makes new objects of a module's tensors. Any other tensor must be the same
        object: another one over the same memory may be changed without its version counter.
        """
        new = self._module or name in self._before.aliases  # the first name stands for all
        self._meet((live,), (name,), new=new)
        return True

    def _meet(self, tensors: Iterable[Tensor], names: Iterable[str], *, new: bool) -> None:
        """`new`: whether the objects need not be the ones that were there."""
        (self._found_new if new else self._found_own).extend(tensors)
        self._found_names[new].extend(names)

    def _fit(self) -> bool:
        """Whether all tensors that were met lie where they lay."""
        marks: _Marks | None = self._before.cache.get("marks")
        if marks is None or marks.names != self._found_names:
            marks = self._before.cache["marks"] = _Marks(self._before.by_name, self._found_names)
        return marks.fit(self._found_own, self._found_new)


_KINDS = frozenset({Tensor, nn.Parameter})
_READ: tuple[Callable[[Any], Any], ...] = (
    Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    Tensor.stride,
    attrgetter("device"),
    Tensor.is_conj,
    Tensor.is_neg,
)
"""What a mark has of a tensor that is no DTensor; see `snapshot_tensor_metadata`."""

_DIVISION = attrgetter("placements", "device_mesh", "shape")
"""How a DTensor is divided, and the shape of the whole."""


class _Marks:
    """The marks of tensors, by kind of mark. `names`: of objects that must be the same, and of
    others."""

    def __init__(
        self, leaves: Mapping[str, TensorLeaf], names: tuple[list[str], list[str]]
    ) -> None:
        self.names = names
        found = [leaves[name] for part in names for name in part]
        self._objects = [leaf.live for leaf in found[: len(names[0])]]
        self._sharded = [at for at, leaf in enumerate(found) if leaf.live is not leaf.whole]
        sharded = [found[at].live for at in self._sharded]
        self._kinds = set(map(type, sharded))
        self._divisions = list(map(_DIVISION, sharded))
        marks = [leaf.mark for leaf in found]
        self._columns = [list(mark) for mark in zip(*marks, strict=True)] or [[]] * 8
        del self._columns[2]  # the shape of a DTensor
        self._checks: list[Callable[..., bool]] = []

    def fit(self, own: list[Tensor], new: list[Tensor]) -> bool:
        """Whether these tensors have these marks."""
        if not _all_same(own, self._objects):
            return False
        tensors = own + new
        if self._sharded:
            sharded: list[Any] = [tensors[at] for at in self._sharded]
            if not self._kinds.issuperset(map(type, sharded)):
                return False
            if list(map(_DIVISION, sharded)) != self._divisions:
                return False
            for at, dim in zip(self._sharded, sharded, strict=True):
                tensors[at] = dim.to_local()
        if self._checks and self._pass(tensors):
            return True
        if not _KINDS.issuperset(map(type, tensors)):
            return False
        same = all(
            list(map(read, tensors)) == column
            for read, column in zip(_READ, self._columns, strict=True)
        )
        self._checks = _checks_of(tensors) if same else []
        return same

    def _pass(self, tensors: list[Tensor]) -> bool:
        """The same by `_checks`. Each block is read twice while the core's cache has it."""
        addresses = self._columns[0]
        for begin, check in zip(range(0, len(tensors), _BLOCK), self._checks, strict=True):
            end = begin + _BLOCK
            block = tensors[begin:end]
            if not check(*block) or list(map(Tensor.data_ptr, block)) != addresses[begin:end]:
                return False
        return True


_BLOCK = 256


def _checks_of(tensors: list[Tensor]) -> list[Callable[..., bool]]:
    """What tells of each block of tensors whether others have the types, dtypes, shapes, strides
    and devices of these, and are conjugated or negated as these are.

    It is what torch.compile checks its guards by: one call, in a quarter of the time of `_READ`.
    As it is not public, the marks are read where it is absent, and where it says no for any reason.
    """
    try:
        guards: Any = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        blocks = [tensors[at : at + _BLOCK] for at in range(0, len(tensors), _BLOCK)]
        return [
            guards(*block, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            for block in blocks
        ]
    except Exception:
        return []


class _Table(NamedTuple):
    """A dict of dicts of tensors and values, as flat lists: the state of an optimizer, by
    parameter. `tensors`, `values`: where they are among the entries; a value with its number."""

    keys: list[Any]
    fields: list[str]
    lengths: list[int]
    tensors: list[int]
    names: list[str]
    values: list[tuple[int, int]]

    @classmethod
    def of(cls, node: Node, aliases: Collection[str]) -> _Table | None:
        """None if it is something else."""
        if any(child[0] != "d" for _, child in node[1]):
            return None
        rows = [child[1] for _, child in node[1]]
        leaves = [leaf for row in rows for _, leaf in row]
        fields = [name for row in rows for name, _ in row]
        if not {str}.issuperset(map(type, fields)) or any(
            leaf[0] != "v" and (leaf[0] != "t" or leaf[1] in aliases) for leaf in leaves
        ):
            return None
        tensors = [at for at, leaf in enumerate(leaves) if leaf[0] == "t"]
        return cls(
            [key for key, _ in node[1]],
            fields,
            list(map(len, rows)),
            tensors,
            [leaves[at][1] for at in tensors],
            [(at, leaf[1]) for at, leaf in enumerate(leaves) if leaf[0] == "v"],
        )

    def entries(self, tree: Mapping[Any, Any]) -> list[Any] | None:
        """All entries of all rows; None unless it has these keys, and rows of these fields."""
        same = list(tree) == self.keys and [*map(type, tree)] == [*map(type, self.keys)]
        return self.entries_of(tree.values()) if same else None

    def entries_of(self, rows: Collection[Any]) -> list[Any] | None:
        """The same for the rows alone."""
        if not {dict}.issuperset(map(type, rows)) or [*map(len, rows)] != self.lengths:
            return None
        fields = list(chain.from_iterable(rows))
        if fields != self.fields or not {str}.issuperset(map(type, fields)):
            return None
        return list(chain.from_iterable(map(dict.values, rows)))


class _States:
    """What torch's `Optimizer.state_dict` reads, beside the parameters. It is read without a call,
    which numbers all parameters again."""

    def __init__(self, inner: Any, table: _Table, groups: Node, tree: dict[str, Any]) -> None:
        self.table, self.groups = table, groups
        self.inner = inner
        self._owners = list(inner.state)
        self._numbers = [group["params"] for group in tree["param_groups"]]

    @classmethod
    def of(
        cls, inner: Any, node: Node, table_of: Callable[[Node], _Table | None]
    ) -> _States | None:
        """None if code other than torch's takes part, or if this is not what was taken apart."""
        match node:
            case ("d", (("state", ("d", _) as states), ("param_groups", groups))):
                if (table := table_of(states)) is None or not cls.is_plain(inner):
                    return None
                tree = inner.state_dict()
                made = cls(inner, table, groups, tree)
                packed = [[*group] for group in made._packed()]
                same = list(tree["state"]) == table.keys
                same = same and packed == [[*group] for group in tree["param_groups"]]
                return made if same else None
        return None

    @staticmethod
    def is_plain(inner: Any) -> bool:
        """Whether torch's own code alone makes the state of this optimizer."""
        # first: what has a `state_dict` of its own need not have torch's hooks (Accelerate's)
        if type(inner).state_dict is not torch.optim.Optimizer.state_dict:
            return False
        hooks = inner._optimizer_state_dict_pre_hooks or inner._optimizer_state_dict_post_hooks
        return not (hooks or "state_dict" in vars(inner))

    def read(self) -> tuple[list[Any], list[Any]] | None:
        """The entries of the table, and the groups; None if not all is of these parameters."""
        inner = self.inner
        sizes = [len(group["params"]) for group in inner.param_groups]
        if not self.is_plain(inner) or sizes != list(map(len, self._numbers)):
            return None
        entries = self.table.entries_of(inner.state.values())
        if entries is None or not _all_same(list(inner.state), self._owners):
            return None
        return entries, self._packed()

    def _packed(self) -> list[dict[str, Any]]:
        """The groups as `state_dict` gives them."""
        return [
            {key: value for key, value in group.items() if key != "params"} | {"params": numbers}
            for group, numbers in zip(self.inner.param_groups, self._numbers, strict=True)
        ]


_CODE = ("state_dict", "_save_to_state_dict", "get_extra_state")
_PARTS = itemgetter(
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_MODULE_VERSION = attrgetter("_version")
_DICTS = frozenset({dict, OrderedDict})
_Hook = tuple[Callable[..., object], nn.Module, str]
"""A hook with its arguments: the module, and the prefix of its names."""


class _Modules:
    """All that `nn.Module.state_dict` reads of a module and of those below it, as flat lists. It is
    read without a call of `state_dict`, which makes a new tensor of each. Of hooks, only those of
    FSDP2 are called."""

    def __init__(
        self, root: nn.Module, hooks: list[_Hook], tensors: list[Tensor], names: list[str]
    ) -> None:
        self.root, self.tensors, self.names, self._hooks = root, tensors, names, hooks
        self._all = list(root.modules())
        self._kinds = set(map(type, self._all))
        self._modules, self._parts = self._read()
        self._lengths = list(map(len, self._parts))
        self._full = [part for part in self._parts if part]
        self._full_dicts = [full for full in self._full if isinstance(full, dict)]
        self._names, self._objects = self._read_parts()

    @classmethod
    def of(cls, root: nn.Module, node: Node) -> _Modules | None:
        """None if code other than torch's takes part, or if this is not what was taken apart."""
        if node[0] != "d" or any(child[0] != "t" for _, child in node[1]):
            return None
        if not is_state_made_by_torch(root):
            return None
        hooks = [
            (hook, module, f"{path}." if path else "")
            for path, module in root.named_modules(remove_duplicate=False)
            for hook in module._state_dict_pre_hooks.values()
        ]
        for hook, module, prefix in hooks:
            hook(module, prefix, False)
        found = dict(_tensors_in(root))
        names = [child[1] for _, child in node[1]]
        if list(found) != [key for key, _ in node[1]]:
            return None
        # a tensor of several names is met once
        once = {id(found[key]): (found[key], name) for key, name in zip(found, names, strict=True)}
        return cls(root, hooks, *map(list, zip(*once.values(), strict=True)))

    def is_unchanged(self) -> bool:
        """Whether nothing came, went or was replaced."""
        for hook, module, prefix in self._hooks:
            hook(module, prefix, False)
        modules, parts = self._read()
        if modules != self._modules or not _all_same(parts, self._parts):
            return False
        names, objects = self._read_parts()
        return (
            list(map(len, parts)) == self._lengths
            and names == self._names
            and _all_same(objects, self._objects)
            and all(map(_has_no_code, self._kinds))
        )

    def _read(self) -> tuple[list[Any], list[Any]]:
        """What must be equal of the modules, and the dicts and sets that must be the same."""
        of = list(map(vars, self._all))
        own = [name for name in _CODE if any(map(contains, of, repeat(name)))]
        values = [*map(type, self._all), *map(_MODULE_VERSION, self._all), *own]
        return values, list(chain.from_iterable(map(_PARTS, of)))

    def _read_parts(self) -> tuple[list[Any], list[Any]]:
        """What must be equal in these dicts and sets, and which objects must be the same. Most are
        empty, and their lengths say so."""
        return list(chain.from_iterable(self._full)), list(
            chain.from_iterable(full.values() for full in self._full_dicts)
        )


def is_state_made_by_torch(inner: object) -> bool:
    """Whether it is a module or an optimizer of which torch's own code alone makes the state."""
    if isinstance(inner, torch.optim.Optimizer):
        return _States.is_plain(inner)
    return isinstance(inner, nn.Module) and all(map(_is_plain, inner.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Whether torch's own code alone makes this module's part of a state."""
    of = vars(module)
    parts = of["_parameters"], of["_buffers"], of["_modules"]
    hooks = of["_state_dict_hooks"] or not all(map(_is_fsdps, of["_state_dict_pre_hooks"].values()))
    own = hooks or not of.keys().isdisjoint(_CODE)
    return not own and _DICTS.issuperset(map(type, parts)) and _has_no_code(type(module))


def _is_fsdps(hook: Any) -> bool:
    """Whether it is the hook by which FSDP2 puts the sharded parameters in their places."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard.")


def _has_no_code(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _CODE)


def _tensors_in(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The entries of a module's state, as torch names and orders them."""
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        hidden = module._non_persistent_buffers_set
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in hidden:
                yield prefix + name, buffer


def _held(inner: Any) -> list[Any]:
    """The parameters of an optimizer or of a module, in its order."""
    if isinstance(inner, torch.optim.Optimizer):
        return [param for group in inner.param_groups for param in group["params"]]
    if isinstance(inner, nn.Module):
        # `parameters()` takes four times as long
        return [
            parameter for module in inner.modules() for parameter in module._parameters.values()
        ]
    return []


def _all_same(some: Collection[object], others: Collection[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise UsageError for a tensor that has no plain bytes."""
    plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    if not plain:
        _check_subclass(tensor, name)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(f"{name}: only dense tensors can be kept, this one is {tensor.layout}")
    if tensor.is_quantized:
        raise UsageError(
            f"{name}: a quantized tensor ({tensor.dtype}) cannot be kept; keep its int_repr(), its"
            " scale and its zero point"
        )
    check_device(tensor.device, name)


def _check_subclass(tensor: Tensor, name: str) -> None:
    kind = type(tensor).__name__
    if is_lazy(tensor):
        raise UsageError(
            f"{name}: this lazy parameter has no shape yet; pass one batch through the module"
            " before restore()"
        )
    if hasattr(tensor, "device_mesh") or hasattr(tensor, "_local_tensor"):
        raise UsageError(f"{name}: a {kind} cannot be kept; of sharded tensors DTensor can")
    if hasattr(tensor, "__tensor_flatten__"):
        raise UsageError(
            f"{name}: a sharded {kind} keeps its values in other tensors, which cannot be kept"
        )


def _storage_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # none: the extras refuse it by name
        return 0


def _is_large(value: Any) -> bool:
    """Whether the value does not belong in the extras: a large tensor, a tensor on a device, or a
    large array. A growing deque may hold any number of small tensors without changing the layout.
    """
    if isinstance(value, Tensor):
        return not value.is_cpu or value.nbytes >= LARGE_BYTES
    return ArrayForm.of(value) is not None


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory, as `Tensor.expand` makes them."""
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _check_key(key: Any, path: str) -> None:
    try:
        extras_codec.json_tree_of(key)
    except FormatError as error:
        raise UsageError(f"{path}: the key {key!r:.200} of a dict: {error}") from None


def _tree_of(name: str, component: Any) -> Any:
    try:
        return state_of_component(component)
    except KeepstepError:
        raise
    except Exception as error:  # a foreign state_dict may raise anything
        raise UsageError(f"{name}: its state_dict() fails: {error!r}") from error


def _same_on(ranks: Members, local: Tensor) -> Sharing | None:
    """The sharing of a tensor that each of `ranks` has whole. None if `ranks` is None or a single
    rank."""
    if ranks is None or len(ranks) == 1:
        return None
    shape = tuple(local.shape)
    return Sharing((0,) * len(shape), shape, ranks, ranks)


def _pointer(parameter: Tensor, name: str) -> int:
    local = sharding.local_tensor_of(parameter) if sharding.is_dtensor(parameter) else parameter
    try:
        return local.data_ptr()
    except ValueError:
        _check_subclass(parameter, name)
        raise
