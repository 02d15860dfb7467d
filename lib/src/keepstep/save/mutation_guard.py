"""Tensors that are copied while a training runs: in lots, and under a guard, which detects that one
changed, although its version counter did not (`tensor.data.add_(1)`).

Lazy copying is safe only while nothing writes to the tensors. In-place operations move autograd's
version counter, but writes through `.data` do not. So a few elements of every tensor are compared
as well: at regular strides from the first, at least 16 per tensor (all of a smaller one) and one
in every 256 KiB. Any dense update changes them. The image itself is compared, too, because what
was changed and changed back during the copy is the same at both ends. A sparse write past the
counter (through `.data`, numpy, another process) between save and fence may go unnoticed; the
docs say to wrap such code in `checkpointer.mutating()`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from keepstep.client import copying
from keepstep.client.slot import SlotMapping
from keepstep.state import accelerator
from keepstep.state.accelerator import DeviceToHostCopies, check_tensor_has_storage
from keepstep.state.taken_state import TensorLeaf

SAMPLES = 16
_STRIDE_BYTES = 256 << 10
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VERSION = attrgetter("_version")
_references = getattr(torch._C, "_storage_Use_Count", None)
"""How many refer to a tensor's memory. Without it, a tensor that moved counts as changed."""


class WatchedTensors:
    """Tensors as a guard watches them: flat lists, which are read and compared as a whole.

    `over`: what is read in their place, and keeps the memory that they have now. Then other memory
    that they are given (`tensor.data = tensor.data.to("cpu")`) is no change, if nobody else refers
    to the former memory, so that nobody can write to it.
    """

    def __init__(self, leaves: Sequence[TensorLeaf], over: Fingerprint | None = None) -> None:
        # in-place operations on a DTensor and on its part are counted apart
        apart = [leaf for leaf in leaves if leaf.live is not leaf.tensor]
        self._names = [leaf.name for leaf in (*leaves, *apart)]
        self._tensors = [leaf.tensor for leaf in leaves]
        # of the tensors as they are now: a detached one has their memory and their counter
        self._aliases = [tensor.detach() for tensor in self._tensors] if over else []
        # by these, by the fingerprint, and by what asks for their number
        self._ours = [held + 2 for held in over.references] if over else []
        live = [leaf.live.detach() if over else leaf.live for leaf in apart]
        self._counting = [*(self._aliases or self._tensors), *live]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def versions(self) -> list[int]:
        """Their version counters, which grow with each in-place operation."""
        return list(map(_VERSION, self._counting))

    def find_first_changed_name(self, versions: list[int]) -> str:
        """The name of a tensor whose version or address changed, or ''."""
        return next(self.find_changed_names(versions), "")

    def find_changed_names(self, versions: list[int]) -> Iterator[str]:
        """The names of all such tensors."""
        now = list(map(Tensor.data_ptr, self._tensors))
        if now != self._addresses:
            for at, before in enumerate(self._addresses):
                if now[at] != before and not self._is_ours(at):
                    yield self.name(at)
        if (counted := self.versions()) != versions:
            yield from (
                self.name(at) for at, version in enumerate(counted) if version != versions[at]
            )

    def _is_ours(self, at: int) -> bool:
        """Whether nobody but us refers to the memory that the tensor had."""
        if not self._aliases or _references is None:
            return False
        storage = self._aliases[at].untyped_storage()
        return bool(_references(storage._cdata) <= self._ours[at])

    def name(self, at: int) -> str:
        """The name of the tensor of a version, or of the tensor of this number."""
        return self._names[at]


class MutationGuard(NamedTuple):
    """What must be the same before and after a lazy copy."""

    watched: WatchedTensors
    versions: list[int]
    fingerprint: Fingerprint
    samples: list[torch.Tensor]

    @classmethod
    def take(cls, watched: WatchedTensors, fingerprint: Fingerprint) -> MutationGuard:
        """Remember the tensors as they are now. They must lie where they lay when both were
        made."""
        return cls(watched, watched.versions(), fingerprint, fingerprint.sample_tensors())

    def find_changed_tensor(self) -> str:
        """The name of a tensor that changed, or ''."""
        return self.find_moved_tensor() or next(
            self._differing(self.fingerprint.sample_tensors(), self.samples), ""
        )

    def find_moved_tensor(self) -> str:
        """The name of a tensor whose version or address changed, or ''. Waits for no device."""
        return self.watched.find_first_changed_name(self.versions)

    def changed_tensors(self) -> set[str]:
        """The names of all tensors that changed."""
        differing = self._differing(self.fingerprint.sample_tensors(), self.samples)
        return {*self.watched.find_changed_names(self.versions), *differing}

    def compare_fingerprints(self) -> list[Tensor]:
        """Whether the fingerprints differ: a truth value per group, where its samples are."""
        now = self.fingerprint.sample_tensors()
        return [
            torch.ne(tensor, other).any() for tensor, other in zip(now, self.samples, strict=True)
        ]

    def find_torn_tensor(self, mapping: SlotMapping, samples: Sequence[Tensor]) -> str:
        """The name of a tensor whose bytes in an image are not those of `save`, or ''. `samples`:
        those of `save`, in host memory."""
        return next(
            self._differing(self.fingerprint.read_image_samples(mapping.memory), samples), ""
        )

    def _differing(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> Iterator[str]:
        """The names of the tensors of which samples differ."""
        for group, (tensor, other) in enumerate(zip(now, before, strict=True)):
            if not torch.equal(tensor, other):
                for sample in torch.ne(tensor, other).nonzero().flatten().tolist():
                    yield self.watched.name(self.fingerprint.tensor_number_of_sample(group, sample))


def view_complex_as_doubles(tensor: Tensor) -> Tensor:
    """The tensor with elements of at most 8 bytes: complex128 as two doubles."""
    return tensor if tensor.element_size() in _BITS else torch.view_as_real(tensor)


def sample_view(tensor: Tensor) -> tuple[Tensor, int]:
    """A view of a few elements of a dense tensor, as integers, and how far apart they lie in its
    memory, in elements. `tensor`: see `view_complex_as_doubles`."""
    flat, size = tensor.as_strided((tensor.numel(),), (1,)), tensor.element_size()
    stride = max(1, min(flat.numel() // SAMPLES, _STRIDE_BYTES // size))
    stride = (stride - 1) | 1  # odd: samples come from all columns of a matrix
    return flat.view(_BITS[size])[::stride], stride


class Fingerprint:
    """Sample positions of a set of dense tensors; `take` reads them, and they must lie where they
    lay.

    `aliases`: the same tensors. They hold the memory that the live ones had, so that a copy never
    reads memory that was freed because a live tensor was given other memory. `references`: by how
    many tensors this refers to the memory of each.
    """

    def __init__(self, tensors: Sequence[Tensor], begins: Sequence[int] = ()) -> None:
        """Prepare the views; copies nothing. Tensors must be dense and non-overlapping. `begins`:
        where the bytes of each begin in the image, for `in_image`."""
        self.aliases = [tensor.detach() for tensor in tensors]
        self.references = [1] * len(self.aliases)
        device_of = accelerator.current_accelerator().device_of
        groups: dict[tuple[torch.device | None, int], _Group] = {}
        for number, (tensor, begin) in enumerate(
            zip(self.aliases, begins or [0] * len(tensors), strict=True)
        ):
            if tensor.numel() == 0:
                continue
            tensor = view_complex_as_doubles(tensor)
            size = tensor.element_size()
            place = device_of(tensor)
            group = groups.setdefault((place, size), _Group(size, in_host=place is None))
            held = [self.aliases[number], tensor, *group.add(number, tensor, begin)]
            self.references[number] = len({tensor._cdata for tensor in held})
        self._groups = list(groups.values())

    def sample_tensors(self) -> list[Tensor]:
        """The current samples: one small tensor per device and element size."""
        return [group.take() for group in self._groups]

    def read_image_samples(self, memory: memoryview) -> list[Tensor]:
        """The samples of an image, in the same order."""
        return [group.in_image(memory) for group in self._groups]

    def write_samples(self, memory: memoryview, samples: Sequence[Tensor]) -> None:
        """Write samples to where they belong in an image."""
        for group, sample in zip(self._groups, samples, strict=True):
            group.write(memory, sample)

    def tensor_number_of_sample(self, group: int, sample: int) -> int:
        """The number of the tensor from which a sample of a group comes."""
        return self._groups[group].tensor_of(sample)


class _Group:
    """The samples of tensors of one device and element size."""

    def __init__(self, size: int, *, in_host: bool) -> None:
        self._size, self._in_host = size, in_host
        self._views: list[Tensor] = []
        self._tensors: list[tuple[int, Tensor, int, int]] = []

    def add(self, number: int, tensor: Tensor, begin: int) -> list[Tensor]:
        """Returns the tensors by which the samples refer to this one's memory."""
        view, stride = sample_view(tensor)
        self._views.append(view)
        self._tensors.append((number, tensor, stride, begin // self._size))
        return [view] if view._base is None else [view, view._base]

    def take(self) -> Tensor:
        """The samples. Those in memory of the host are read as elements of one tensor over all of
        it, because `cat` takes microseconds for each tensor."""
        begin, count, places = self._by_address
        if not count:
            return torch.cat(self._views)
        memory = (ctypes.c_ubyte * (count * self._size)).from_address(begin)
        # indexing with `[]` wakes threads of torch's, which costs more than it saves
        return torch.frombuffer(memory, dtype=_BITS[self._size]).index_select(0, places)

    @functools.cached_property
    def _by_address(self) -> tuple[int, int, Tensor]:
        """Where the samples lie: the first address, how many elements from there, and the samples'
        places among them. No elements if they are a device's, or not aligned."""
        starts = [view.data_ptr() for view in self._views]
        begin, size = min(starts), self._size
        if not self._in_host or any((start - begin) % size for start in starts):
            return 0, 0, torch.empty(0, dtype=torch.int64)
        places = torch.cat(
            [
                torch.arange(view.numel()) * view.stride(0) + (start - begin) // size
                for view, start in zip(self._views, starts, strict=True)
            ]
        )
        return begin, int(places.max()) + 1, places

    def in_image(self, memory: memoryview) -> Tensor:
        return self._image(memory).index_select(0, self._places)

    def write(self, memory: memoryview, samples: Tensor) -> None:
        self._image(memory).index_copy_(0, self._places, samples)

    def _image(self, memory: memoryview) -> Tensor:
        count = len(memory) // self._size
        return torch.frombuffer(memory, dtype=_BITS[self._size], count=count)

    @functools.cached_property
    def _places(self) -> Tensor:
        """Where the samples are in an image."""
        return torch.cat([_places(*tensor[1:]) for tensor in self._tensors])

    def tensor_of(self, sample: int) -> int:
        left = sample
        for view, (number, *_) in zip(self._views, self._tensors, strict=True):
            left -= view.numel()
            if left < 0:
                return number
        raise IndexError(sample)


def _places(tensor: Tensor, stride: int, begin: int) -> Tensor:
    """Where every `stride`-th element in memory lies in an image, which is row-major."""
    samples = torch.arange(0, tensor.numel(), stride)
    if tensor.is_contiguous():
        return samples + begin
    places, row = torch.full_like(samples, begin), 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1:
            places += samples // step % size * row
        row *= size
    return places


class CopyLot:
    """Leaves that are copied together, with the memory that they have; and their copies into each
    slot, which are made once."""

    def __init__(self, leaves: Sequence[TensorLeaf], tensors: Sequence[Tensor]) -> None:
        """`tensors`: those of the leaves, or others over the same memory."""
        self.leaves, self.tensors = leaves, list(tensors)
        self._addresses = list(map(Tensor.data_ptr, self.tensors))
        self._transfers = WeakKeyDictionary[SlotMapping, copying.Transfers]()
        self._copies = WeakKeyDictionary[SlotMapping, DeviceToHostCopies]()

    def prepare_host_copies(self, mapping: SlotMapping) -> copying.Transfers:
        """Copies of what lies in memory of the host. Raises UsageError for a tensor that has lost
        its memory."""
        transfers = self._transfers.get(mapping)
        if transfers is None or list(map(Tensor.data_ptr, self.tensors)) != self._addresses:
            transfers = self._transfers[mapping] = self._make_transfers(mapping)
        return transfers

    def _make_transfers(self, mapping: SlotMapping) -> copying.Transfers:
        moves, copies = [], []
        for leaf, tensor in zip(self.leaves, self.tensors, strict=True):
            entry = mapping.layout.entries[leaf.name]
            if copying.is_plain(tensor):
                target = mapping.address + entry.begin
                size = entry.end - entry.begin
                moves.append(copying.MemoryMove(target, tensor.data_ptr(), size))
            else:
                check_tensor_has_storage(tensor, leaf.name)
                copies.append(copying.TensorCopy(mapping.view_tensor(entry), tensor))
        return copying.Transfers(moves, copies, holds=self.tensors)

    def prepare_device_copies(self, mapping: SlotMapping) -> DeviceToHostCopies:
        """Copies of what lies on a device."""
        if mapping not in self._copies:
            self._copies[mapping] = DeviceToHostCopies(self.places_in(mapping), self.tensors)
        return self._copies[mapping]

    def places_in(self, mapping: SlotMapping) -> list[Tensor]:
        """Where the leaves belong in an image."""
        entries = mapping.layout.entries
        return [mapping.view_tensor(entries[leaf.name]) for leaf in self.leaves]

    def uses_storage(self, storage: torch.UntypedStorage) -> bool:
        """Whether one of the tensors lies in this storage."""
        return storage._cdata in self._storages

    @functools.cached_property
    def _storages(self) -> frozenset[int]:
        return frozenset(tensor.untyped_storage()._cdata for tensor in self.tensors)


def can_detect_changes(tensor: torch.Tensor) -> bool:
    """Whether later changes of this tensor can be detected: it must be dense, in any order of
    dimensions."""
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
