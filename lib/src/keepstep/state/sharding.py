"""Which box of a tensor is on this rank, which ranks have the same, and which of them stages it.

A DTensor's placements are read without torch's own helpers. They assume that a strided shard (FSDP
over tensor parallel) is cut from left to right, which gives wrong rows if the sizes do not divide
evenly. FSDP cuts what tensor parallelism left, and this module does the same. A box that does not
have the shape of the local tensor is refused.

Which ranks run on which node, and which tensors they have in common, is agreed once, in
`restore()`. Every rank claims, by name, the tensors that it has or will have: as its own, or as a
tensor that several ranks (`members`) hold together. The claims of all ranks determine, without
further communication, under which name each rank stores a tensor, and which rank stages which part
of a replicated tensor.

A name belongs to the claim with the lowest rank. A rank that has another tensor of that name stores
it as `name@rank-00001`. So rank 0's buffers keep their bare names, and so do the buffers of
pipeline stages. A tensor that was not claimed (made after `restore`) carries its rank, because
other ranks may have made one of that name too.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepstep.errors import RestoreError, UsageError
from keepstep.image import FlatBox
from keepstep.image.layout import blake2b_digest


class Sharing(NamedTuple):
    """A tensor that several ranks hold together.

    `offsets`, `global_shape`: the box on this rank. `replicas`: the ranks that have the very same
    box. `members`: the ranks that have any part of the tensor. Both are ascending and include this
    rank. `flat`: see `TensorSpec`.
    """

    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    replicas: tuple[int, ...]
    members: tuple[int, ...]
    flat: FlatBox | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.global_shape if self.flat is None else self.flat.shape


_GIVEN = "_keepstep_sharing"
"""The attribute of a DTensor that `dtensor_of_box` has made."""


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import DTensor, so a script without DTensors need not wait
    for the import."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor_of(tensor: Any) -> Tensor:
    """The local tensor of a DTensor; it shares memory and version counter with the DTensor. The
    call is many times as fast when gradients are not recorded, so it turns recording off."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_tensor_of(tensor)
    local: Tensor = tensor.to_local()
    return local


def sharing_of(tensor: Any, name: str) -> Sharing:
    """The box of a DTensor. Raises UsageError for placements that have none."""
    given: Sharing | None = getattr(tensor, _GIVEN, None)
    if given is not None:
        return given
    shape = tuple(tensor.shape)
    placements = tuple(tensor.placements)
    try:
        sharing, sizes = _sharing(tensor.device_mesh, placements, shape)
    except ValueError as error:
        raise UsageError(f"{name}: {placements} cannot be kept: {error}") from None
    here = tuple(local_tensor_of(tensor).shape)
    if here != sizes:
        raise UsageError(
            f"{name}: {placements} of {list(shape)} should leave {list(sizes)} on this rank, but"
            f" there is {list(here)}; keepstep does not understand this sharding"
        )
    return sharing


def dtensor_like(pattern: Any, local: Tensor) -> Tensor:
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
    if (given := getattr(pattern, _GIVEN, None)) is not None:
        setattr(made, _GIVEN, given)
    return made


def dtensor_of_box(local: Tensor, mesh: Any, sharing: Sharing) -> Tensor:
    """A DTensor over `local`, of which a framework says by itself which box it is. The placements
    that it has on `mesh`, whatever that is, say nothing."""
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size(sharing.full_shape)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Replicate()] * mesh.ndim
    made: Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    setattr(made, _GIVEN, sharing)
    return made


@functools.lru_cache(maxsize=4096)
def _sharing(
    mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Sharing, tuple[int, ...]]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in its mesh")
    kinds = [_kind(placement) for placement in placements]
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        begin, size = 0, shape[dim]
        for mesh_dim in _order(kinds, dim, tuple(mesh.shape)):
            at, size = find_chunk_begin_and_length(size, mesh.shape[mesh_dim], coordinate[mesh_dim])
            begin += at
        offsets[dim], sizes[dim] = begin, size
    here = tuple(
        slice(None) if kind is None else at for kind, at in zip(kinds, coordinate, strict=True)
    )
    members = tuple(sorted(mesh.mesh.flatten().tolist()))
    replicas = tuple(sorted(mesh.mesh[here].flatten().tolist()))
    return Sharing(tuple(offsets), shape, replicas, members), tuple(sizes)


def find_chunk_begin_and_length(size: int, parts: int, number: int) -> tuple[int, int]:
    """Begin and length of piece `number` of `parts` pieces, cut as torch.chunk cuts them: the last
    pieces may be short or empty."""
    full = -(-size // parts)
    begin = min(number * full, size)
    return begin, min(full, size - begin)


class _Shard(NamedTuple):
    dim: int
    split_factor: int | None


def _kind(placement: Any) -> _Shard | None:
    """The shard of a placement; None for Replicate. Raises ValueError for a placement without a
    box."""
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


Members = tuple[int, ...] | None
"""The ranks that hold one tensor together; None: each rank has a tensor of its own."""

Claim = tuple[str, Members]

_Declaration = tuple[tuple[Members, ...], tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True)
class ReplicaPlacement:
    """`nodes`: for each rank, the number of its node. `spread`: replicas are divided among all
    ranks that have them, and not among those of each node. `holders`: the ranks that make each
    claim."""

    rank: int = 0
    world: int = 1
    nodes: tuple[int, ...] = (0,)
    spread: bool = False
    holders: dict[Claim, tuple[int, ...]] = field(default_factory=dict, repr=False)
    lowest: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def lowest_rank_here(self) -> int:
        """The lowest rank of this node."""
        return self.nodes.index(self.nodes[self.rank])

    def find_rank_of_stored_name(self, claim: Claim) -> int | None:
        """The rank that a stored name must carry; None if this rank may use the bare name."""
        name, members = claim
        mine = self.rank if members is None else members[0]
        if self.world == 1 or (members is not None and len(members) == self.world):
            return None
        return None if claim in self.holders and self.lowest[name] == mine else mine

    def select_staging_ranks(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Of the ranks with the very same box, those that stage it together with this rank."""
        if self.spread:
            return replicas
        return tuple(
            replica for replica in replicas if self.nodes[replica] == self.nodes[self.rank]
        )

    def twins(self, groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """The ranks of other nodes that stage the very same parts. `groups`: the `replicas` of
        everything that this rank stages."""
        if self.spread:
            return ()
        distinct = set(groups)
        common = set.intersection(*map(set, distinct)) if distinct else set()
        for group in distinct:
            places = self._places(group)
            common = {rank for rank in common if places[rank] == places[self.rank]}
        return tuple(rank for rank in sorted(common) if self.nodes[rank] != self.nodes[self.rank])

    def _places(self, group: tuple[int, ...]) -> dict[int, tuple[int, int]]:
        """For each rank of the group: its place among the ranks of its node in the group, and their
        number."""
        together: dict[int, list[int]] = {}
        for rank in group:
            together.setdefault(self.nodes[rank], []).append(rank)
        return {
            rank: (number, len(those))
            for those in together.values()
            for number, rank in enumerate(those)
        }


ALONE = ReplicaPlacement()


def derive_machine_name(socket_path: str) -> str:
    """A name that is equal for ranks of one sidecar, which share one memory."""
    return f"{socket.gethostname()}:{os.path.realpath(socket_path)}"


def agree_on_topology(
    claims: Callable[[], Iterable[Claim]],
    gather: Callable[[Any], list[Any]],
    *,
    rank: int,
    world: int,
    node: str,
    spread: bool,
) -> ReplicaPlacement:
    """Agree on what all ranks claim; a collective. `gather` gathers one value of every rank on all
    ranks.

    Ranks with equal claims send them once, so the exchange stays small for thousands of ranks. If
    `claims` fails on a rank, that rank raises its error. The others raise UsageError if any such
    error was one, else RestoreError.
    """
    declaration, failure = _declare(claims)
    text = repr(declaration).encode("utf-8", "surrogatepass")
    digest = blake2b_digest(text)
    failure_text = f"rank {rank}: {failure}" if failure else ""
    gathered = gather((node, digest, failure_text, isinstance(failure, UsageError)))
    if failure is not None:
        raise failure
    if errors := [text for _, _, text, _ in gathered if text]:
        usage = any(usage for _, _, _, usage in gathered)
        raise (UsageError if usage else RestoreError)("; ".join(errors))
    answers = [(node, digest) for node, digest, _, _ in gathered]
    ranks: dict[bytes, list[int]] = {}
    for other, (_, its) in enumerate(answers):
        ranks.setdefault(its, []).append(other)
    declared = [declaration]
    if len(ranks) > 1:
        declared = [
            declared
            for declared in gather(declaration if ranks[digest][0] == rank else None)
            if declared
        ]
    holders = _holders(declared, list(ranks.values()))
    names = {node: at for at, node in enumerate(dict.fromkeys(node for node, _ in answers))}
    return ReplicaPlacement(
        rank=rank,
        world=world,
        nodes=tuple(names[node] for node, _ in answers),
        spread=spread,
        holders=holders,
        lowest=_lowest(holders),
    )


def _declare(claims: Callable[[], Iterable[Claim]]) -> tuple[_Declaration, Exception | None]:
    try:
        return _declaration(claims()), None
    except Exception as error:  # of any kind: the other ranks are waiting
        return ((), ()), error


def _declaration(claims: Iterable[Claim]) -> _Declaration:
    numbers: dict[Members, int] = {}
    names = tuple(
        (name, numbers.setdefault(members, len(numbers)))
        for name, members in sorted(set(claims), key=lambda claim: (claim[0], claim[1] or ()))
    )
    return tuple(numbers), names


def _holders(
    declared: Sequence[_Declaration], ranks: Sequence[Sequence[int]]
) -> dict[Claim, tuple[int, ...]]:
    """The ranks that make each claim.

    `ranks`: the ranks of each declaration. Both sequences are ordered by the first rank that made
    the declaration.
    """
    holders: dict[Claim, list[int]] = {}
    for (members, names), those in zip(declared, ranks, strict=True):
        for name, number in names:
            holders.setdefault((name, members[number]), []).extend(those)
    return {claim: tuple(sorted(those)) for claim, those in holders.items()}


def _lowest(holders: dict[Claim, tuple[int, ...]]) -> dict[str, int]:
    lowest: dict[str, int] = {}
    for (name, members), those in holders.items():
        first = those[0] if members is None else members[0]
        lowest[name] = min(first, lowest.get(name, first))
    return lowest


# --- parts of replicated tensors -----------------------------------------------------------------
#
# Decides which rank stages which rows: pure, and the same answer on every rank. The tensors are
# laid end to end on one line of bytes, which is cut into equal lengths. Each cut is moved to the
# nearest row, or, in a tensor too small to be worth two headers, to its nearer end. So the parts
# are disjoint, cover everything, and differ from an equal share by at most one row (or one such
# small tensor).


SMALL_BYTES = 4096
"""Tensors up to this size are never cut."""


class ReplicatedTensorSize(NamedTuple):
    """Shape and element size of a replicated tensor."""

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def dim(self) -> int:
        """The dimension that is cut: the first with more than one element, so rows are
        contiguous."""
        return next((dim for dim, size in enumerate(self.shape) if size > 1), 0)

    @property
    def bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def cut_unit_bytes(self) -> int:
        """The unit in bytes to which a cut is rounded."""
        if self.bytes <= SMALL_BYTES:
            return max(1, self.bytes)
        return self.bytes // self.shape[self.dim]


@functools.lru_cache(maxsize=64)
def compute_row_partitions(
    tensors: tuple[ReplicatedTensorSize, ...], sharers: int
) -> tuple[tuple[int, ...], ...]:
    """For each tensor, `sharers + 1` ascending rows along its `dim`: sharer i has rows [i] to [i +
    1].

    Every tensor needs at least one dimension.
    """
    total = sum(tensor.bytes for tensor in tensors)
    at, rows = 0, []
    for tensor in tensors:
        places = (total * number // sharers - at for number in range(1, sharers))
        rows.append((0, *(_row(tensor, place) for place in places), tensor.shape[tensor.dim]))
        at += tensor.bytes
    return tuple(rows)


def _row(bulk: ReplicatedTensorSize, place: int) -> int:
    """The row nearest to a place. The place is in bytes from the beginning of the tensor, and may
    lie outside the tensor."""
    place = min(max(place, 0), bulk.bytes)
    row = (place + bulk.cut_unit_bytes // 2) // bulk.cut_unit_bytes
    return row if bulk.bytes > SMALL_BYTES else row * bulk.shape[bulk.dim]
