"""What a state consists of once it is taken apart (`keepstep.state.capture`), and the names of its
dtypes in the image (safetensors' spelling, see docs/format.md).
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepstep.errors import FormatError, UsageError
from keepstep.image import (
    FlatBox,
    Parameters,
    TensorRole,
    TensorSpec,
    codecs,
    dim_order,
    extras_codec,
    strictjson,
    strides_with_gaps,
)
from keepstep.image.codecs import (
    ArrayForm,
    ClassForm,
    RequiresGradForm,
    SharedAgain,
    SharedDefinitionForm,
    SubclassForm,
    ViewForm,
    dtype_of,
)
from keepstep.state import sharding
from keepstep.state.accelerator import device_name
from keepstep.state.sharding import Claim, Sharing

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
}

CODE_OF = {getattr(torch, name): code for name, code in _CODES.items() if hasattr(torch, name)}
DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}


def get_image_dtype_name(dtype: torch.dtype, *, name: str) -> str:
    """The name of a dtype in an image. Raises UsageError, naming the tensor, if there is none."""
    try:
        return CODE_OF[dtype]
    except KeyError:
        raise UsageError(f"{name}: tensors of {dtype} cannot be kept") from None


MAX_DEPTH = 200
"""The maximum depth of a tree. No walk at a save makes a deeper one."""

Node = tuple[Any, ...]


class TensorLeaf(NamedTuple):
    """A live tensor.

    - `tensor`: what this rank stages, the box at `offsets` of `global_shape` (None: all of it).
    - `lazy`: only an optimizer step changes the tensor, so the copy may come later.
    - `whole`: what a restore must fill: the whole local part, the box at `whole_offsets`.
    - `live`: the user's tensor, perhaps a DTensor.
    - `sharing`: None if the tensor belongs to this rank alone.
    - `lenient`: another rank's value does as well, although the tensor is this rank's own (buffers
      under DistributedDataParallel).
    - `fresh`: the tensor cannot be filled in place; a restore makes a new one, as for any value.
    - `unflattened`: see `TensorSpec`.
    - `mark`: what `snapshot_tensor_metadata` said when it was taken.
    """

    name: str
    tensor: Tensor
    section: TensorRole
    lazy: bool
    whole: Tensor
    live: Tensor
    offsets: tuple[int, ...] = ()
    global_shape: tuple[int, ...] | None = None
    whole_offsets: tuple[int, ...] = ()
    sharing: Sharing | None = None
    lenient: bool = False
    fresh: bool = False
    unflattened: tuple[int, ...] | None = None
    mark: tuple[Any, ...] = ()

    @property
    def flat_box(self) -> FlatBox | None:
        """See `TensorSpec`."""
        return None if self.sharing is None else self.sharing.flat


@dataclass(frozen=True)
class TakenState:
    """The whole state at one moment; `tensors` alias the live ones.

    `claims`: what to agree on with other ranks. `twins`: ranks whose images of this state hold the
    very same boxes. `parameters`: the parameters of each optimizer, by the name of its component.
    `components`, `held`: what was walked, and the parameters of each component. `metadata`: see
    `decode_state_dict_metadata`. `cache`: what
    follows from the tensors alone, shared by all states that share them.
    """

    tensors: tuple[TensorLeaf, ...]
    aliases: dict[str, str]
    values: list[Any]
    skeleton: Node
    claims: frozenset[Claim] = frozenset()
    twins: tuple[int, ...] = ()
    parameters: dict[str, Parameters] = field(default_factory=dict)
    components: dict[str, Any] = field(default_factory=dict)
    held: dict[str, list[Any]] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, TensorLeaf]:
        """The tensors by each of their names."""
        leaves: dict[str, TensorLeaf] | None = self.cache.get("by_name")
        if leaves is None:
            leaves = {leaf.name: leaf for leaf in self.tensors}
            leaves |= {alias: leaves[name] for alias, name in self.aliases.items()}
            self.cache["by_name"] = leaves
        return leaves

    @cached_property
    def by_path(self) -> dict[tuple[Any, ...], TensorLeaf]:
        """The tensors by path: the component, and the keys in it that lead to the tensor."""
        leaves = self.by_name
        return {path: leaves[leaf[1]] for path, leaf in leaves_of(self.skeleton) if leaf[0] == "t"}

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """What the layout needs to know of each tensor. Raises UsageError for dtypes that cannot be
        kept."""
        return [
            TensorSpec(
                name=leaf.name,
                dtype=get_image_dtype_name(leaf.tensor.dtype, name=leaf.name),
                shape=tuple(leaf.tensor.shape),
                section=leaf.section,
                offsets=leaf.offsets,
                global_shape=leaf.global_shape,
                dim_order=dim_order(leaf.whole.shape, leaf.whole.stride()),
                strides=strides_with_gaps(leaf.whole.shape, leaf.whole.stride()),
                device=device_name(leaf.tensor.device),
                unflattened=leaf.unflattened,
                flat=leaf.flat_box,
            )
            for leaf in self.tensors
        ]

    def signature(self) -> Any:
        """Equal for two states exactly when one layout fits both."""
        return (
            self.skeleton,
            [
                (
                    leaf.name,
                    leaf.tensor.dtype,
                    leaf.tensor.shape,
                    leaf.tensor.device,
                    leaf.whole.stride(),
                    leaf.section,
                    leaf.offsets,
                    leaf.global_shape,
                    leaf.unflattened,
                    leaf.flat_box,
                )
                for leaf in self.tensors
            ],
            self.aliases,
            self.parameters,
        )


def snapshot_tensor_metadata(live: Tensor, local: Tensor) -> tuple[Any, ...]:
    """Where and what a tensor is now, as plain values: all of it can change in place."""
    return (
        local.data_ptr(),
        local.dtype,
        live.shape,
        local.shape,
        local.stride(),
        local.device,
        local.is_conj(),
        local.is_neg(),
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a subclass that keeps its values in other tensors and names them
    (`__tensor_flatten__`). A DTensor does not count, because it is kept as boxes."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter or tensor.layout is not torch.strided:
        return False
    return hasattr(kind, "__tensor_flatten__") and not sharding.is_dtensor(tensor)


def iterate_inner_tensors(tensor: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensor itself, or the tensors in which a wrapper keeps its values; with their names."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from iterate_inner_tensors(getattr(tensor, part), f"{name}.{part}")


def parse_skeleton(skeleton: str) -> dict[str, Node]:
    """The trees of an image's components, by component name.

    Every node is checked, so code that walks the trees need not check again. Raises FormatError.
    """
    root = strictjson.loads(
        skeleton, what="the tree of this image", hook=extras_codec.make_json_hook()
    )
    if not isinstance(root, list) or root[:1] != ["d"]:
        raise _senseless(root)
    nodes: list[tuple[Any, int]] = [(root, MAX_DEPTH)]
    while nodes:
        node, depth = nodes.pop()
        nodes += [(child, depth - 1) for child in _children(node)]
        if depth == 0:
            raise FormatError(f"the tree of this image is nested deeper than {MAX_DEPTH}")
    if not all(isinstance(name, str) for name, _ in root[1]):
        raise FormatError("the tree of this image has a component whose name is no text")
    return dict(root[1])


def skeleton_text(skeleton: Node) -> str:
    """A tree as JSON; see `parse_skeleton`."""
    return json.dumps(_as_json(skeleton), separators=(",", ":"))


def _as_json(node: Node) -> Any:
    kind, inner = node[0], node[1]
    if kind == "d":
        return (kind, [(_key_as_json(key), _as_json(child)) for key, child in inner])
    if kind == "l" or kind == "u":
        return (kind, [_as_json(child) for child in inner])
    if kind == "x":
        return (kind, inner, _as_json(node[2]))
    return node


def _key_as_json(key: Any) -> Any:
    return key if type(key) is str or type(key) is int else extras_codec.json_tree_of(key)


def _children(node: Any) -> list[Any]:
    match node:
        case ["t", str()] | ["v", _]:  # `check_values_exist` checks the number of a value
            return []
        case ["x", int(), child]:
            return [child]
        case ["l" | "u", list(children)]:
            return children
        case ["d", list(items)] if all(type(item) is list and len(item) == 2 for item in items):
            _check_keys([key for key, _ in items])
            return [child for _, child in items]
    raise _senseless(node)


def _check_keys(keys: list[Any]) -> None:
    """Check what everything may rely on that walks a tree: keys can be told apart, and written in a
    message."""
    try:
        extras_codec.check_hash_collisions(keys)
        twice = len(set(keys)) != len(keys)
        for key in keys:
            str(key)
    except Exception as error:  # a tensor of a rare dtype, an integer of too many digits
        raise FormatError(f"the tree of this image: {strictjson.error_text(error)}") from None
    if twice:
        raise FormatError("the tree of this image has a key twice")


def _senseless(node: Any) -> FormatError:
    return FormatError(f"the tree of this image is invalid: {strictjson.quote_text(node)}")


def check_values_exist(node: Node, *, count: int) -> None:
    """Check that every value that the tree names exists, before anything is copied. Raises
    FormatError."""
    for path, leaf in leaves_of(node):
        if leaf[0] == "v" and not (type(leaf[1]) is int and 0 <= leaf[1] < count):
            where = "/".join(map(str, path))
            value = strictjson.quote_text(leaf[1])
            raise FormatError(
                f"the tree of this image names value {value} at {where}, but it holds {count}"
            )


def values_from_extras(kept: Any) -> list[Any]:
    """The values in the decoded extras of an image. Raises FormatError."""
    values = kept.get("values") if isinstance(kept, dict) else None
    if not isinstance(values, list):
        raise FormatError("the extras of this image hold no values")
    return values


def decode_state_dict_metadata(
    kept: Mapping[str, Any],
) -> dict[str, dict[str, dict[str, Any]] | None]:
    """The metadata of the modules' state dicts in the decoded extras of an image: by component, of
    each submodule what is not `PLAIN_METADATA`. None: the state dict has none. Raises FormatError.
    """
    metadata: Any = kept.get("metadata", {})
    parts = [*metadata.values()] if isinstance(metadata, dict) else [()]
    rows = [
        row
        for of in parts
        if of is not None
        for row in (of.values() if isinstance(of, dict) else (None,))
    ]
    if not isinstance(metadata, dict) or not all(isinstance(row, dict) for row in rows):
        raise FormatError("the extras of this image hold no metadata of modules")
    return metadata


PLAIN_METADATA = {"version": 1}
"""What a state dict says of a module that says nothing of itself."""


def empty_tensor(
    shape: tuple[int, ...],
    order: tuple[int, ...] | None,
    *,
    strides: tuple[int, ...] | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A new tensor: with gaps between its elements if it had `strides`, else dense, its dimensions
    in memory in the order that `dim_order` gave."""
    if strides is not None:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if order is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_permuted(shape, order, dtype=dtype, device=device)


def leaves_of(node: Any) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Every tensor and value node with the keys that lead to it."""
    left: list[tuple[tuple[Any, ...], Any]] = [((), node)]
    while left:
        path, node = left.pop()
        kind = node[0]
        if kind == "t" or kind == "v":
            yield path, node
        elif kind == "x":
            yield path, ("v", node[1])
            left.append((path, node[2]))
        elif kind == "d":
            left += [((*path, key), child) for key, child in reversed(node[1])]
        else:
            left += [((*path, at), node[1][at]) for at in reversed(range(len(node[1])))]


def iterate_tensor_forms(node: Any, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The names of tensors that are not used as they are, and the form of each: the bytes of an
    array, the base of a view."""
    left = [node]
    while left:
        node = left.pop()
        if node[0] == "x" and node[2][0] == "t":
            yield node[2][1], values[node[1]]
        elif node[0] == "x":
            left.append(node[2])
        elif node[0] not in ("t", "v"):
            left += [child[1] if node[0] == "d" else child for child in node[1]]


def is_module_extra_state(path: tuple[Any, ...]) -> bool:
    """Whether a module's `get_extra_state` made it. It may be of any kind, and of another kind each
    time."""
    return str(path[0]).rpartition(".")[2] == "_extra_state"


def build_tree(
    node: Any,
    tensor: Callable[[str], Any],
    value: Callable[[int], Any],
    shared: dict[int, Any] | None = None,
) -> Any:
    """Build a tree again: `tensor(name)` and `value(index)` make the leaves. `shared`: the objects
    that stand in several places, by number; in all trees of an image."""
    shared = {} if shared is None else shared
    kind = node[0]
    if kind == "t":
        return tensor(node[1])
    if kind == "v":
        made = value(node[1])
        if type(made) is not SharedAgain:
            return made
        if made.number not in shared:
            raise FormatError(
                f"the tree of this image names object {made.number} before it is there"
            )
        return shared[made.number]
    if kind == "x":
        form = value(node[1])
        made = _formed(form, build_tree(node[2], tensor, value, shared))
        if type(form) is SharedDefinitionForm:
            shared[form.number] = made
        return made
    if kind == "d":
        return {key: build_tree(child, tensor, value, shared) for key, child in node[1]}
    children = [build_tree(child, tensor, value, shared) for child in node[1]]
    return children if kind == "l" else tuple(children)


def _formed(form: Any, plain: Any) -> Any:
    """`plain` in its original kind. `form` is an empty object of that kind, or says more. None
    stays None."""
    if plain is None or type(form) is SharedDefinitionForm:
        return plain
    if type(form) is ArrayForm and isinstance(plain, Tensor):
        return form.build_array(plain)
    if type(form) is ViewForm and isinstance(plain, Tensor):
        return view_over(plain, form)
    if type(form) is RequiresGradForm and isinstance(plain, Tensor):
        return _with_gradient(plain, form)
    if type(form) is SubclassForm and type(plain) is dict:
        return _of_subclass(form, plain)
    if type(form) is ClassForm:
        try:
            return codecs.from_fields(form.kind, plain)
        except (ValueError, TypeError, AttributeError) as error:
            raise FormatError(f"the tree of this image: {error}") from None
    if type(form) is deque and type(plain) is list:
        return deque(plain, form.maxlen)
    if type(form) in (OrderedDict, defaultdict) and type(plain) is dict:
        made = form.copy()
        made.update(plain)
        if type(form) is OrderedDict:
            vars(made).update(vars(form))
        return made
    raise FormatError(
        f"the tree of this image makes a {type(form).__name__} of a {type(plain).__name__}"
    )


def _with_gradient(plain: Tensor, form: RequiresGradForm) -> Tensor:
    if plain.requires_grad and isinstance(plain, nn.Parameter) is form.parameter:
        return plain  # the live one
    if not (plain.is_floating_point() or plain.is_complex()):
        raise FormatError(f"the tree of this image asks for a gradient of {plain.dtype}")
    tensor = plain.detach()
    return nn.Parameter(tensor) if form.parameter else tensor.requires_grad_()


def _of_subclass(form: SubclassForm, parts: dict[str, Any]) -> Any:
    """A tensor of a subclass; None if a part is missing. Raises FormatError."""
    if any(part is None for part in parts.values()):
        return None
    kind: Any = form.kind
    try:
        return kind.__tensor_unflatten__(parts, form.context, form.shape, form.stride)
    except Exception as error:  # the subclass's own code
        raise FormatError(f"the tree of this image makes no {kind.__name__}: {error!r}") from error


def view_over(base: Tensor, form: ViewForm) -> Tensor:
    """The view over the base's memory. Raises FormatError if it does not lie inside."""
    dtype = dtype_of(form.dtype)
    begin = base.storage_offset() * base.element_size() + form.offset_bytes
    last = sum((size - 1) * step for size, step in zip(form.shape, form.stride, strict=True))
    end = form.offset_bytes + (last + 1) * dtype.itemsize
    if 0 in form.shape or begin % dtype.itemsize or end > base.numel() * base.element_size():
        raise FormatError("the tree of this image has a view that does not suit its base")
    flat = torch.empty(0, dtype=dtype, device=base.device)
    with torch.no_grad():
        return flat.set_(base.untyped_storage(), begin // dtype.itemsize, form.shape, form.stride)
