"""Reads a DTensor's placements: which box of the global tensor is on this rank, and which ranks
have the same box.

It does not use torch's own helpers. They assume that a strided shard (FSDP over tensor parallel) is
cut from left to right, which gives wrong rows if the sizes do not divide evenly. FSDP cuts what
tensor parallelism left, and this module does the same. A box that does not have the shape of the
local tensor is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.errors import UsageError


class Sharing(NamedTuple):
    """A tensor that several ranks hold together.

    `offsets`, `global_shape`: the box on this rank. `replicas`: the ranks that have the very same
    box. `members`: the ranks that have any part of the tensor. Both are ascending and include this
    rank.
    """

    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    replicas: tuple[int, ...]
    members: tuple[int, ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import DTensor, so a script without DTensors need not wait
    for the import.
    """
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Any) -> Tensor:
    """The local tensor of a DTensor; it shares memory and version counter with the DTensor. The
    call is many times as fast when gradients are not recorded, so it turns recording off.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_of(tensor)
    local: Tensor = tensor.to_local()
    return local


def placed_alike(tensor: Any, other: Any) -> bool:
    """Whether two tensors are DTensors that are divided alike."""
    return bool(
        is_dtensor(other)
        and tensor.placements == other.placements
        and tensor.device_mesh == other.device_mesh
    )


def sharing_of(tensor: Any, name: str) -> Sharing:
    """The box of a DTensor. Raises UsageError for placements that have none."""
    shape = tuple(tensor.shape)
    placements = tuple(tensor.placements)
    try:
        sharing, sizes = _sharing(tensor.device_mesh, placements, shape)
    except ValueError as error:
        raise UsageError(f"{name}: {placements} cannot be kept: {error}") from None
    here = tuple(local_of(tensor).shape)
    if here != sizes:
        raise UsageError(
            f"{name}: {placements} of {list(shape)} should leave {list(sizes)} on this rank, but"
            f" there is {list(here)}; keepstep does not understand this sharding"
        )
    return sharing


def like(pattern: Any, local: Tensor) -> Tensor:
    """A DTensor over `local` that is placed like `pattern`."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        local,
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )
    return made


@functools.lru_cache(maxsize=4096)
def _sharing(
    mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Sharing, tuple[int, ...]]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in its mesh")
    kinds = [_kind(one) for one in placements]
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        begin, size = 0, shape[dim]
        for mesh_dim in _order(kinds, dim, tuple(mesh.shape)):
            at, size = chunk(size, mesh.shape[mesh_dim], coordinate[mesh_dim])
            begin += at
        offsets[dim], sizes[dim] = begin, size
    here = tuple(
        slice(None) if kind is None else at for kind, at in zip(kinds, coordinate, strict=True)
    )
    members = tuple(sorted(mesh.mesh.flatten().tolist()))
    replicas = tuple(sorted(mesh.mesh[here].flatten().tolist()))
    return Sharing(tuple(offsets), shape, replicas, members), tuple(sizes)


def chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    """Begin and length of piece `number` of `parts` pieces, cut as torch.chunk cuts them: the last
    pieces may be short or empty.
    """
    full = -(-size // parts)
    begin = min(number * full, size)
    return begin, min(full, size - begin)


class _Shard(NamedTuple):
    dim: int
    split_factor: int | None


def _kind(placement: Any) -> _Shard | None:
    """The shard of a placement; None for Replicate. Raises ValueError for a placement without a
    box.
    """
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise ValueError("a sum that is still to be made has no value; redistribute it first")
    if hasattr(placement, "split_factor"):
        return _Shard(placement.dim, placement.split_factor)
    if type(placement).__name__ == "Shard":
        return _Shard(placement.dim, None)
    raise ValueError("this placement is unknown")


def _order(kinds: Sequence[_Shard | None], dim: int, sizes: Sequence[int]) -> list[int]:
    """The mesh dimensions that cut `dim`, in the order in which they cut.

    A strided shard cuts after the mesh dimensions to its right; its split factor is the product of
    their sizes.
    """
    order: list[int] = []
    deferred: list[int] = []
    for mesh_dim, kind in enumerate(kinds):
        if kind is None or kind.dim != dim:
            continue
        if kind.split_factor is not None:
            deferred.append(mesh_dim)
            continue
        order.append(mesh_dim)
        pieces = sizes[mesh_dim]
        while deferred:
            strided = deferred.pop()
            factor = kinds[strided]
            if factor is None or factor.split_factor != pieces:
                raise ValueError("its split factor does not suit the mesh")
            pieces *= sizes[strided]
            order.append(strided)
    if deferred:
        raise ValueError("a strided shard without the shard that it strides over")
    return order
