"""Reads the directory of a committed step for `StorageReader(path)`. This is the way out of
keepstep: it needs no sidecar.

Stock DCP silently leaves rows untouched when a shard is missing, and joins whatever it finds. So
this module refuses a directory that is not exactly one step of one run by one world, and names the
offending file. A shard's manifest vouches for each of its chunks. Each chunk is verified once,
before anything is handed out. Files are mapped, so no memory is needed besides the tensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from keepstep.dcp.metadata import Tree
from keepstep.errors import ForeignError, RestoreError, StorageError, few
from keepstep.image.manifest import Manifest
from keepstep.image.xxh3 import CHUNK_BYTES, HAVE_FAST
from keepstep.restore.boxes import Index, IndexBuilder
from keepstep.restore.images import W, map_image
from keepstep.steps import StepId, shard_name

log = logging.getLogger("keepstep")

_SUFFIX = ".safetensors"
_STOCK = ".metadata"
_THREADS = 4


class Folder:
    """One committed step, as `Images` of its shards. Read only what `verify` has
    verified.
    """

    def __init__(self, path: Path) -> None:
        """Read all headers and seals.

        Raises RestoreError for a directory without a step or with an incomplete one, ImageError for
        a file that is no shard, and ForeignError for a shard of another step, epoch, run or world.
        """
        self.path = path
        try:
            files = sorted(one for one in path.iterdir() if one.name.endswith(_SUFFIX))
        except OSError as error:
            raise RestoreError(f"{path}: no directory of a step ({error})") from error
        if not files:
            if (path / _STOCK).exists():
                raise RestoreError(
                    f"{path}: torch's own FileSystemWriter wrote it: load it with FileSystemReader"
                )
            raise RestoreError(f"{path}: no shard in it; name the directory of a committed step")
        shards = sorted(
            ((_manifest(one), one) for one in files), key=lambda one: one[0].layout.rank
        )
        for manifest, file in shards:
            _check_alike(manifest, file, *shards[0])
        self._manifests = [manifest for manifest, _ in shards]
        self._files = [file for _, file in shards]
        self._verified: set[tuple[int, int]] = set()
        self._mapped: dict[int, tuple[Tensor, memoryview]] = {}
        _check_complete(path, self._manifests)
        self.id: StepId = self._manifests[0].control.id
        builder = IndexBuilder(len(shards))
        for layout in (one.layout for one in self._manifests):
            builder.add(layout, Tree.parse(layout.skeleton).boxes)
        self.index: Index = builder.build()

    @property
    def nearness(self) -> list[int]:
        """All shards are equally near."""
        return [0] * len(self._files)

    def verify(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Check the digests of all chunks of these (rank, begin, end) that were not yet verified.
        Raises DigestError.
        """
        if not HAVE_FAST:
            log.warning("keepstep: without the xxhash package, verifying is very slow")
        wanted = {
            (rank, chunk)
            for rank, begin, end in ranges
            for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
            if begin < end
        }
        threads = min(_THREADS, len(os.sched_getaffinity(0)), max(1, len(wanted)))
        with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-verify") as pool:
            for _ in pool.map(self._verify, sorted(wanted - self._verified)):
                pass

    def _verify(self, place: tuple[int, int]) -> None:
        rank, chunk = place
        manifest, (_, view) = self._manifests[rank], self._map(rank)
        manifest.check(chunk, view[slice(*manifest.bounds(chunk))], path=self._files[rank])
        self._verified.add(place)

    def _map(self, rank: int) -> tuple[Tensor, memoryview]:
        """The bytes of a file, mapped when it is first read; do not write to them."""
        if rank not in self._mapped:
            try:
                self._mapped[rank] = map_image(str(self._files[rank]))
            except OSError as error:
                gone = f"{self._files[rank]}: it is gone ({error}); load again"
                raise StorageError(gone) from error
        return self._mapped[rank]

    def skeleton(self, rank: int) -> str:
        """The tree of a saved rank's state."""
        return self._manifests[rank].layout.skeleton

    def extras_range(self, rank: int) -> tuple[int, int, int]:
        """Where the extras lie in a saved rank's image, as (rank, begin, end) for `verify`."""
        begin = self._manifests[rank].layout.extras_begin
        return rank, begin, begin + self._manifests[rank].control.extras_bytes

    def extras(self, rank: int) -> bytes:
        """The bytes of everything in a saved rank's image that is not a tensor."""
        _, begin, end = self.extras_range(rank)
        return bytes(self._map(rank)[1][begin:end])

    def flat(self, rank: int) -> Tensor:
        """The bytes of an image."""
        return self._map(rank)[0]

    def stream(self, wanted: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Empty: all images are mapped, so nothing is read in chunks."""
        return iter(())

    def close(self) -> None:
        """Nothing to do: each mapping is released with the last view of it."""


def is_directory(path: Path) -> bool:
    """Whether this path means a directory of shards, and not a step of the run by its number.

    It does if the directory holds a checkpoint, or if only keepstep gives such a name, even if the
    directory does not exist: a mistake in such a path must not load a step of another run. Any
    other directory may be one that a script made for a writer that would write there, with other
    files in it.
    """
    try:
        StepId.parse(path.name)
    except ValueError:
        there = path.glob("rank-*" + _SUFFIX), path.glob(_STOCK)
        return any(True for found in there for _ in found)
    return True


def _manifest(path: Path) -> Manifest:
    """Header, digest table and seal of a file. Raises ImageError and StorageError, which name the
    file.
    """
    try:
        with path.open("rb") as file:
            fd = file.fileno()
            return Manifest.read(
                lambda begin, end: os.pread(fd, end - begin, begin),
                os.fstat(fd).st_size,
                path=path,
            )
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error}); use another copy") from error


def _check_alike(manifest: Manifest, path: Path, first: Manifest, other_path: Path) -> None:
    one, other = manifest.control, first.control
    for what, found, wanted in (
        ("run", one.run, other.run),
        ("step", one.id, other.id),
        ("world", one.world, other.world),
    ):
        if found != wanted:
            raise ForeignError(
                f"the shard of {what} {found} among those of {wanted} ({other_path.name}):"
                " take it out of this directory",
                path=path,
            )
    if path != other_path and one.rank == other.rank:
        raise ForeignError(f"rank {one.rank} is there twice, see {other_path}", path=path)
    name = shard_name(one.rank, one.world)
    if path.name != name:
        raise ForeignError(f"it is the shard {name}: give it that name", path=path)


def _check_complete(path: Path, shards: list[Manifest]) -> None:
    world, ranks = shards[0].layout.world, {one.layout.rank for one in shards}
    missing = [shard_name(rank, world) for rank in range(world) if rank not in ranks]
    if missing:
        raise RestoreError(
            f"{path}: step {shards[0].control.id} is incomplete,"
            f" {few(missing, 4)} missing: bring it back, or load another step"
        )
