"""What of a state never changes, and so is kept once: the frozen parameters of its modules.

They lie in a *base*, an image of its own, to which the images of steps refer (docs/format.md). Only
what can be told to be unchanged stays in it: a parameter that needs no gradient, stands where it
stood, and has the version, the address and the fingerprint that it had when it was copied (as for
lazy copies, `keepstep.save.mutation_guard`). At each save all of this is compared. A parameter that
fails is in the image of every later step of this life, and a new base is made without it. None of
this tells a write of few elements past the version counter. That is found some saves later, because
each save also compares a further slice of all bytes with the base, where the tensors are.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepstep.client import copying
from keepstep.client.slot import SlotMapping
from keepstep.errors import ImageError
from keepstep.image import BaseRef, ControlPage, Layout, TensorRole
from keepstep.save.mutation_guard import (
    CopyLot,
    Fingerprint,
    MutationGuard,
    WatchedTensors,
    can_detect_changes,
)
from keepstep.state import accelerator, sharding
from keepstep.state.taken_state import TakenState, TensorLeaf, iterate_inner_tensors
from keepstep.state.wrappers import unwrap_module
from keepstep.steps import Epoch

_LEAST_BYTES = 4 << 20
"""A base is a file and a slot more. Fewer bytes are not worth it: a drive writes them in
milliseconds."""
_LEAST_SHARE = 0.25
_MOST_BASES = 5
"""After so many bases, in each of which something changed that was frozen still, this life makes no
other one."""
_SLICE_BYTES = 4 << 20
"""So much is compared at each save: a quarter of a millisecond."""
_RUN_BYTES, _DEVICE_RUN_BYTES = 8 << 10, 1 << 20
"""What it costs to begin to compare a tensor, in bytes that are compared meanwhile: a call, or four
kernels of a device."""
_MOST_MUTATIONS = 3
"""So often all bytes are compared because the script said that it changes tensors. A script that
says so more often may do it at each step: then each image holds everything."""


_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Place(NamedTuple):
    """Where a parameter stands in a module."""

    parameters: Mapping[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter

    @property
    def is_frozen(self) -> bool:
        same = self.parameters.get(self.name) is self.parameter
        return same and not self.parameter.requires_grad


class _Run(NamedTuple):
    """Bytes to compare at once: the tensor's name, where it lies, and from where in it and in the
    base, in bytes."""

    name: str
    tensor: Tensor
    at: int
    begin: int
    size: int


@dataclass(eq=False)
class FrozenBase:
    """Frozen parameters, and the base image that holds them. `ref`: how images name it; None until
    one is sealed. `mapping`: where it was seen sealed. `apart`: whether what a device holds has
    changed, as the devices that were asked at the last save will know. `doubted`: one said so.
    `reloaded`: a later life began with the same values, before it restored them."""

    layout: Layout
    leaves: tuple[TensorLeaf, ...]
    places: tuple[_Place, ...]
    guard: MutationGuard
    ref: BaseRef | None = None
    mapping: SlotMapping | None = None
    apart: tuple[Tensor, ...] = ()
    doubted: bool = False
    reloaded: bool = False
    _cache: object = None
    _compared: dict[torch.device | None, int] = field(default_factory=dict)
    _asked: deque[tuple[str, Tensor]] = field(default_factory=lambda: deque(maxlen=32))

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors that it holds."""
        return frozenset(leaf.name for leaf in self.leaves)

    @cached_property
    def copy_lots(self) -> dict[torch.device | None, CopyLot]:
        """What to copy into it, by device; None: from memory of the host."""
        device_of, places = accelerator.current_accelerator().device_of, dict[Any, list[int]]()
        for at, leaf in enumerate(self.leaves):
            places.setdefault(device_of(leaf.tensor), []).append(at)
        aliases = self.guard.fingerprint.aliases
        return {
            place: CopyLot([self.leaves[at] for at in some], [aliases[at] for at in some])
            for place, some in places.items()
        }

    def is_unchanged_in(self, taken: TakenState, *, lazy: bool) -> bool:
        """Whether the state has these tensors, unchanged. If `lazy`, of what devices hold only
        `apart` tells."""
        if self._cache is not taken.cache and self._moved(taken):
            return False
        self._cache = taken.cache
        if not all(place.is_frozen for place in self.places) or self.guard.find_moved_tensor():
            return False
        if self.doubted or not lazy:  # wait for the devices
            self.apart, self.doubted = (), bool(self.guard.find_changed_tensor())
            if not self.doubted:
                self.apart = tuple(self._asked_next())
            return not self.doubted
        differences = self.guard.compare_fingerprints()
        device_of = accelerator.current_accelerator().device_of
        if any(bool(difference) for difference in differences if device_of(difference) is None):
            return False
        on_devices = (difference for difference in differences if device_of(difference) is not None)
        self.apart = (*on_devices, *self._asked_next())
        return True

    def differing(self) -> set[str]:
        """The names of the tensors of which some byte is not that of the base: reads all of them.
        All names if it was not seen sealed yet."""
        if (mapping := self.mapping) is None:
            return set(self.names)
        entries = mapping.layout.entries
        with torch.no_grad():
            return {
                leaf.name
                for leaf in self.leaves
                if not torch.equal(mapping.view_tensor(entries[leaf.name]), leaf.tensor.cpu())
            }

    def differing_in_next_slice(self) -> set[str]:
        """The names of the tensors in memory of the host of which some byte in the next slice is
        not that of the base. Each call reads a further slice; after the last one comes the first
        again. They must lie where they lay (`is_unchanged_in`)."""
        return {
            run.name
            for run in self._next(None, cost=_RUN_BYTES)
            if self.mapping
            and _compare(run.tensor.data_ptr() + run.at, self.mapping.address + run.begin, run.size)
        }

    def _asked_next(self) -> Iterator[Tensor]:
        """Ask each device the same of what it holds: truth values there, once it has come to this
        call. The host waits for nothing."""
        device = accelerator.current_accelerator()
        for place in self._runs.keys() - {None}:
            for run in self._next(place, cost=_DEVICE_RUN_BYTES):
                assert place is not None
                assert self.mapping is not None
                kept = torch.frombuffer(
                    self.mapping.memory, dtype=torch.uint8, offset=run.begin, count=run.size
                )
                there = device.zeros(run.size, place)
                there.copy_(kept, non_blocking=True)
                now = run.tensor.view(-1).view(torch.uint8)[run.at : run.at + run.size]
                self._asked.append((run.name, torch.ne(now, there).any()))
                yield self._asked[-1][1]

    def differing_on_devices(self) -> set[str]:
        """The names of the tensors of which a device that was asked lately has said that they are
        not those of the base. Waits for the devices."""
        return {name for name, differs in self._asked if differs}

    def _next(self, place: torch.device | None, *, cost: int) -> Iterator[_Run]:
        """The next slice of what is there. `cost`: of one run more, in bytes."""
        runs, left = self._runs.get(place, []), _SLICE_BYTES
        for _ in runs if self.mapping is not None else ():
            at = self._compared.get(place, 0)
            self._compared[place] = (at + 1) % len(runs)
            yield runs[at]
            left -= runs[at].size + cost
            if left <= 0:
                return

    @cached_property
    def _runs(self) -> dict[torch.device | None, list[_Run]]:
        """What can be compared byte by byte: all that is contiguous, by where it is."""
        device_of, runs = accelerator.current_accelerator().device_of, dict[Any, list[_Run]]()
        for leaf, alias in zip(self.leaves, self.guard.fingerprint.aliases, strict=True):
            begin = self.layout.entries[leaf.name].begin
            for at in range(0, alias.nbytes if alias.is_contiguous() else 0, _SLICE_BYTES):
                size = min(_SLICE_BYTES, alias.nbytes - at)
                runs.setdefault(device_of(alias), []).append(
                    _Run(leaf.name, alias, at, begin + at, size)
                )
        return runs

    def find_changed_names(self, taken: TakenState) -> set[str]:
        """The names of the tensors that the state does not have, or has changed."""
        places = _frozen(taken)
        thawed = {id(place.parameter) for place in self.places if not place.is_frozen}
        frozen = {
            name
            for name, found in places.items()
            if thawed.isdisjoint(id(place.parameter) for place in found)
        }
        return self._moved(taken) | self.guard.changed_tensors() | (self.names - frozen)

    def _moved(self, taken: TakenState) -> set[str]:
        """Those that are not where they were, or another part of a tensor."""
        now = {leaf.name: leaf for leaf in taken.tensors}
        return {leaf.name for leaf in self.leaves if _is_other(leaf, now.get(leaf.name))}

    def is_sealed_in_slot(self, mapping: SlotMapping) -> bool:
        """Whether this slot holds it, sealed."""
        if self.ref is not None and mapping is not self.mapping:
            try:
                found = self.ref.matches_control_page(mapping.control())
            except ImageError:
                return False
            self.mapping = mapping if found else self.mapping
        return self.ref is not None and mapping is self.mapping

    def fill(self, mapping: SlotMapping, *, run: str, epoch: Epoch, step: int) -> BaseFilling:
        """Begin to fill an empty slot."""
        control = ControlPage.staged(
            self.layout, run=run, epoch=epoch, step=step, extras_bytes=0, staged_at=time.time()
        )
        return BaseFilling(self, mapping, control)


@dataclass(frozen=True, eq=False)
class BaseFilling:
    """A base that is copied beside the image that refers to it first, and sealed before it."""

    base: FrozenBase
    mapping: SlotMapping
    control: ControlPage

    @property
    def ref(self) -> BaseRef:
        """How images will name it."""
        return BaseRef.of(self.control, self.base.layout)

    @property
    def guard(self) -> MutationGuard:
        """What must be the same before and after the copy."""
        return self.base.guard

    def transfers(self) -> copying.Transfers:
        """Copies of what lies in memory of the host."""
        lot = self.base.copy_lots.get(None)
        return copying.Transfers() if lot is None else lot.prepare_host_copies(self.mapping)

    def seal(self) -> None:
        """All bytes are in place: from now on images may refer to it."""
        self.mapping.seal(self.control)
        self.base.ref, self.base.mapping = self.ref, self.mapping


class FrozenParameters:
    """Says at each save which base the image refers to. `base`: the newest; None if there is
    none."""

    def __init__(self, base: FrozenBase | None = None) -> None:
        """`base`: the restored one."""
        self.base = base
        self.left_bytes = 0
        """Bytes of frozen parameters that a base could hold, if there may be none."""
        self.unseen: set[str] = set()
        """Names of parameters that changed unseen, so that earlier steps may have former values."""
        self._changing: set[str] = set()
        self._made_bases = 0
        self._mutations, self._in_doubt = 0, False
        self._seen: object = None
        self._watched: tuple[tuple[TensorLeaf, ...], MutationGuard] | None = None

    def watch_base_candidates(self, taken: TakenState) -> None:
        """Take note of what a base might hold, long before the first save: averages of weights
        need no gradient, but change at each step."""
        leaves = self._candidates(taken)
        if self.base is None and leaves:
            fingerprint = Fingerprint([leaf.tensor for leaf in leaves])
            self._watched = leaves, MutationGuard.take(WatchedTensors(leaves), fingerprint)

    def note_mutation(self) -> None:
        """The script says that it changes tensors, perhaps in ways that nothing tells."""
        self._mutations, self._in_doubt = self._mutations + 1, self.base is not None

    def find_base(
        self, taken: TakenState, *, rank: int, world: int, may: bool, lazy: bool = True
    ) -> FrozenBase | None:
        """The base for this state; None if the image must hold all of it. `may`: whether it may
        refer to one. `lazy`: see `FrozenBase.is_unchanged_in`."""
        seen = taken.cache.setdefault("seen", object())  # the cache itself would hold tensors
        if not may or self._mutations > _MOST_MUTATIONS:
            if self._seen is not seen:
                self._seen = seen
                self.left_bytes = _worth(self._candidates(taken), taken)
            return None
        base = self.base
        if base is None and self._seen is seen:
            return None
        different = base.differing() if base is not None and self._in_doubt else set[str]()
        self._in_doubt = False
        if base is not None and base.doubted:
            self.unseen |= (asked := base.differing_on_devices())
            different |= asked
        if base is not None and not different and base.is_unchanged_in(taken, lazy=lazy):
            different = base.differing_in_next_slice()
            if not different:
                return base
            self.unseen |= different
        self._changing |= different
        if base is not None:
            changed = base.find_changed_names(taken)
            self._changing |= changed
            self._made_bases += not (changed | different).isdisjoint(_frozen(taken))
        self._seen = seen
        self.base = self._made(taken, rank, world) if self._made_bases <= _MOST_BASES else None
        return self.base

    def _made(self, taken: TakenState, rank: int, world: int) -> FrozenBase | None:
        self._compare_earlier()
        leaves = self._candidates(taken)
        return _base_of(leaves, taken, rank, world) if _worth(leaves, taken) else None

    def _compare_earlier(self) -> None:
        """Leave out what has changed where it lay since `watch_base_candidates`."""
        watched, self._watched = self._watched, None
        if watched is not None:
            leaves, guard = watched
            stayed = {leaf.name for leaf in leaves if leaf.tensor.data_ptr() == leaf.mark[0]}
            self._changing |= stayed & guard.changed_tensors()

    def _candidates(self, taken: TakenState) -> tuple[TensorLeaf, ...]:
        frozen = _frozen(taken)
        return tuple(
            leaf
            for leaf in taken.tensors
            if leaf.name in frozen and leaf.name not in self._changing
        )


def find_tensors_unlike_base(
    taken: TakenState, image: SlotMapping, ref: BaseRef
) -> list[str] | None:
    """The names of the tensors that are not those of the base yet, by their samples. None if the
    state could not have it."""
    base = restored_base(taken, image, ref)
    return None if base is None else sorted(base.guard.changed_tensors())


def restored_base(taken: TakenState, image: SlotMapping, ref: BaseRef) -> FrozenBase | None:
    """The base from which these tensors were just filled, to be referred to again. None if the
    state could not have it: some of its tensors are trained here, or are not here. What changes
    from now on is noticed at the next save."""
    frozen = _frozen(taken)
    leaves = tuple(leaf for leaf in taken.tensors if leaf.name in image.layout.entries)
    if len(leaves) < len(image.layout.entries) or any(leaf.name not in frozen for leaf in leaves):
        return None
    entries = image.layout.entries
    if any(tuple(leaf.tensor.shape) != entries[leaf.name].spec.shape for leaf in leaves):
        return None
    base = _over(image.layout, leaves, frozen)
    samples = [
        tensor.to(there.device)
        for tensor, there in zip(
            base.guard.fingerprint.read_image_samples(image.memory), base.guard.samples, strict=True
        )
    ]
    return FrozenBase(base.layout, leaves, base.places, base.guard._replace(samples=samples), ref)


def _frozen(taken: TakenState) -> dict[str, list[_Place]]:
    """Where the parameters stand that need no gradient, by the names of their tensors; without
    those of which a change could go unnoticed."""
    leaves = {
        leaf.whole.data_ptr(): leaf
        for leaf in taken.tensors
        if leaf.section is TensorRole.PARAMS and not leaf.fresh and leaf.whole.numel()
    }
    places: dict[str, list[_Place]] = {}
    trained: set[str] = set()
    for component in taken.components.values():
        if not isinstance(inner := unwrap_module(component), nn.Module):
            continue
        for module in inner.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                for leaf in _leaves_of(parameter, name, leaves):
                    places.setdefault(leaf.name, []).append(
                        _Place(module._parameters, name, parameter)
                    )
                    if parameter.requires_grad or not can_detect_changes(leaf.tensor):
                        trained.add(leaf.name)
    return {name: place for name, place in places.items() if name not in trained}


def _leaves_of(
    parameter: nn.Parameter, name: str, leaves: Mapping[int, TensorLeaf]
) -> list[TensorLeaf]:
    found = []
    for _, plain in iterate_inner_tensors(parameter, name):
        local: Tensor = sharding.local_tensor_of(plain) if sharding.is_dtensor(plain) else plain
        if not accelerator.owns_full_storage(local):
            continue
        if (leaf := leaves.get(local.data_ptr())) is not None:
            found.append(leaf)
    return found


def _is_other(leaf: TensorLeaf, now: TensorLeaf | None) -> bool:
    if now is None or leaf.mark != now.mark or leaf.name != now.name:
        return True
    return (leaf.offsets, leaf.global_shape) != (now.offsets, now.global_shape)


def _worth(leaves: tuple[TensorLeaf, ...], taken: TakenState) -> int:
    """The bytes of these tensors, if they are worth a base; else 0."""
    frozen = sum(leaf.tensor.nbytes for leaf in leaves)
    total = sum(leaf.tensor.nbytes for leaf in taken.tensors)
    return frozen if frozen >= max(_LEAST_BYTES, _LEAST_SHARE * total) else 0


def _base_of(
    leaves: tuple[TensorLeaf, ...], taken: TakenState, rank: int, world: int
) -> FrozenBase:
    names = {leaf.name for leaf in leaves}
    layout = Layout.build(
        [spec for spec in taken.specs if spec.name in names],
        rank=rank,
        world=world,
        aliases={alias: name for alias, name in taken.aliases.items() if name in names},
        twins=taken.twins,
        is_base=True,
    )
    return _over(layout, leaves, _frozen(taken))


def _over(
    layout: Layout, leaves: tuple[TensorLeaf, ...], frozen: Mapping[str, list[_Place]]
) -> FrozenBase:
    places = tuple(place for leaf in leaves for place in frozen[leaf.name])
    begins = [layout.entries[leaf.name].begin for leaf in leaves]
    fingerprint = Fingerprint([leaf.tensor for leaf in leaves], begins)
    return FrozenBase(
        layout, leaves, places, MutationGuard.take(WatchedTensors(leaves), fingerprint)
    )
