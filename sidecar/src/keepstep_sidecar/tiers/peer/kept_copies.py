"""The copies that this machine keeps for other pods: `<run's root>/peers/<step>/<shard>`, each with
its base beside it, if it has one.

They never lie among the machine's own shards, so that no reader takes them for its own, and they
count against the volume's capacity together with these. Copies follow what their senders want kept,
and are deleted first when space is short. But the newest committed copy of a rank is never deleted
by this pod on its own: it may be the last one. All methods block and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.core.retention import copies_to_drop, superseded_copies
from keepstep.core.shard import MOST_RANKS, Shard
from keepstep.errors import (
    ForeignError,
    ImageError,
    KeepstepError,
    NoSpaceError,
    StorageError,
)
from keepstep.image.control_page import BaseRef, Manifest
from keepstep.steps import StepId
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.incoming_copy import CopyFileError, IncomingCopy, is_part, part_name
from keepstep_sidecar.tiers.peer.protocol import CopiesToKeep
from keepstep_sidecar.tiers.source import FileSource
from keepstep_sidecar.volume.files import FULL, Filesystem, RateLimit
from keepstep_sidecar.volume.run_tree import (
    LocalShard,
    RunDirectories,
    RunTree,
    ShardName,
    base_control,
    check_base_beside_shard,
    scan_shards,
    step_directories,
)
from keepstep_sidecar.volume.volume import Volume

DIRECTORY = "peers"
_MOST_PARTS, _MOST_HEADER_BYTES = 64, 64 << 20
_SUPERSEDED = "superseded"
"""Limits for incoming copies. A copy beyond them is closed, and later continues where it was."""


class KeptCopies:
    """The copies on the volumes of one run on this machine."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        *,
        run: str,
        commit: Callable[[], StepId | None] = lambda: None,
        pace: RateLimit | None = None,
    ) -> None:
        """`commit`: the run's newest commit that is known here. It counts for ranks whose sender
        says nothing, because the sender may have another buddy by now. `pace`: that of all writes
        here; copying from drive to drive gives way to them."""
        self._volumes = volumes
        self._run = run
        self._lock = threading.RLock()
        self._held: dict[tuple[StepId, int], LocalShard] = {}
        self._parts: dict[Path, IncomingCopy] = {}
        self._needed: dict[int, CopiesToKeep] = {}  # by sender, what it last said; newest last
        self._commit = commit
        self._pace = pace or RateLimit(None)
        self.unreadable = ""
        self.shared_bytes = 0
        self._logged = ""

    # --- what is here ------------------------------------------------------------------------

    def scan(self) -> None:
        """Find the copies of an earlier life. Broken ones go into quarantine."""
        before, self.unreadable = dict(self._held), ""
        found: dict[tuple[StepId, int], LocalShard] = {}
        for volume in self._volumes:
            found.update(self._scan(volume))
        with self._lock:
            # A copy that was sealed or dropped during the scan keeps its newer state.
            newer = {
                key: shard for key, shard in self._held.items() if before.get(key) is not shard
            }
            gone = before.keys() - self._held.keys()
            self._held = {key: shard for key, shard in found.items() if key not in gone} | newer

    def forget_missing_copies(self) -> None:
        """Forget copies whose files, or those of their bases, were removed by others. Their senders
        send them again."""
        gone = {}
        for key, shard in dict(self._held).items():
            filesystem, paths = self.volume_of(shard.path).filesystem, [shard.path]
            paths += [shard.base_shard.path] if shard.base_shard else []
            with contextlib.suppress(OSError):  # of a drive that does not answer: not certain
                if not all(filesystem.lstat(path) for path in paths):
                    gone[key] = shard
        with self._lock:
            for key, shard in gone.items():
                if self._held.get(key) is shard:
                    del self._held[key]
                    warn("peer.copy_vanished", path=str(shard.path))

    def _scan(self, volume: Volume) -> dict[tuple[StepId, int], LocalShard]:
        try:
            found = scan_shards(
                volume.root / DIRECTORY, run=self._run, filesystem=volume.filesystem
            )
        except OSError as error:
            self._doubt(volume, str(error))
            return {}
        for refused in found.problems:
            if refused.unread:  # of this file only; the others are still reported
                self._doubt(volume, str(refused.error))
                continue
            with contextlib.suppress(KeepstepError):
                refused = volume.quarantine_refused_file(refused)
            warn(
                "peer.copy_quarantined",
                path=str(refused.path),
                error=str(refused.error),
                moved_to=refused.moved_to and str(refused.moved_to),
            )
        return {(shard.step_id, shard.rank): shard for shard in found.shards}

    def _doubt(self, volume: Volume, reason: str) -> None:
        """Record that something could not be read, so that `scan` is worth another try."""
        self.unreadable = f"{volume.root}: {reason}"
        if self.unreadable != self._logged:
            warn("peer.copies_unreadable", path=str(volume.root), error=reason)
        self._logged = self.unreadable

    def volume_of(self, path: Path) -> Volume:
        """The volume on which a copy lies."""
        return next(volume for volume in self._volumes if path.is_relative_to(volume.root))

    def all(self) -> tuple[LocalShard, ...]:
        """Every sealed copy. Takes no lock, because the event loop calls it."""
        held = dict(self._held)
        return tuple(held[key] for key in sorted(held))

    def find(self, step_id: StepId, rank: int) -> LocalShard | None:
        """The sealed copy of this rank's shard; None if there is none. Takes no lock."""
        return self._held.get((step_id, rank))

    # --- coming in ---------------------------------------------------------------------------

    def begin(self, name: ShardName, data: memoryview, *, whose: str) -> IncomingCopy | None:
        """Begin a copy, or continue it. Returns None when the copy is already here. A base that is
        here for another step gets a further name.

        Raises ImageError for an invalid manifest, NoSpaceError, StorageError.
        """
        where = Path(str(name.id)) / name.file
        manifest = _manifest(name, data, run=self._run, path=Path(whose) / where)
        with self._lock:
            if name.is_base and any(
                _link_base(name, manifest, at) for at in _usable(self._volumes)
            ):
                return None
            if not name.is_base and (copy := self._held.get((name.id, name.rank))) is not None:
                if copy.root == manifest.control.root:
                    return None
                raise StorageError(
                    f"step {name.id}, rank {name.rank}: {whose} sends another image than the one"
                    f" that is kept here ({copy.path}); nothing is replaced"
                )
            for path, part in self._parts.items():
                if path.parts[-2:] == where.parts and part.manifest.page == manifest.page:
                    break
            else:
                part = self._open(name, manifest)
        with self._failing(part):  # not under the lock: other senders go on meanwhile
            part.scan_existing_chunks()
        return part

    def _open(self, name: ShardName, manifest: Manifest) -> IncomingCopy:
        """Call this under the lock. A part of an earlier life is continued where it lies."""
        volume = self._volume_for(name, manifest.layout.size_bytes)
        with self._translated(f"cannot keep a copy below {volume.root}"):
            path = _made(volume, name)
            if (old := self._parts.pop(path, None)) is not None:
                old.close()
            part = volume.with_room(
                lambda: IncomingCopy(
                    path, manifest, filesystem=volume.filesystem, engine=volume.engine
                )
            )
        self._parts[path] = part
        while len(self._parts) > 1 and self._too_many_parts():
            self._parts.pop(next(iter(self._parts))).close()
        return part

    def _too_many_parts(self) -> bool:
        headers = sum(len(part.manifest.layout.header) for part in self._parts.values())
        return len(self._parts) > _MOST_PARTS or headers > _MOST_HEADER_BYTES

    def _volume_for(self, name: ShardName, size_bytes: int) -> Volume:
        usable = _usable(self._volumes)
        if not usable:
            raise StorageError("no volume here takes writes; another machine must keep this copy")

        def has(volume: Volume, file: str) -> bool:
            path = volume.root / DIRECTORY / str(name.id) / file
            return volume.filesystem.lstat(path) is not None

        for volume in usable:
            if has(volume, part_name(name.file)):
                return volume
        usable = [volume for volume in usable if has(volume, name.base_shard_name.file)] or usable
        self._free(usable, size_bytes)
        roomiest = max(usable, key=lambda volume: volume.free_bytes())
        if (free := roomiest.free_bytes()) < size_bytes:
            raise NoSpaceError(
                f"{roomiest.root}: {size_bytes} bytes needed for a copy, {free} free;"
                " raise the capacity, keep fewer steps, or fewer replicas"
            )
        return roomiest

    def _free(self, volumes: Sequence[Volume], size_bytes: int) -> None:
        held, commit = self._by_rank(), self._commit()
        committed_by_rank = {
            rank: request.committed for request in self._needed.values() for rank in request.ranks
        }
        known = {
            rank: step_id for rank, step_id in committed_by_rank.items() if step_id is not None
        }
        committed = {**(dict.fromkeys(held, commit) if commit else {}), **known}
        for step_id, rank in copies_to_drop(held, committed):
            if any(volume.free_bytes() >= size_bytes for volume in volumes):
                return
            self._drop(step_id, rank, why="no space")

    def reuse_chunks_from(self, part: IncomingCopy, other: FileSource) -> None:
        """`IncomingCopy.reuse_matching_chunks` an image of the same step, if that can be read."""
        with self._failing(part):
            try:
                with other.open() as file:  # once: the shared blocks must be the verified ones
                    source = replace(other, open=lambda: contextlib.nullcontext(file))
                    with verified_chunks.open_verified(source) as image:
                        part.reuse_matching_chunks(image, file.fd, self._pace)
            except CopyFileError as broken:
                raise broken.error from None
            except (ImageError, StorageError) as error:
                warn("peer.delta_base_unusable", path=other.where, error=str(error))

    def get_incoming_copy(self, name: ShardName) -> IncomingCopy | None:
        """The incoming copy with this name; None if there is none."""
        where = (str(name.id), name.file)
        with self._lock:
            for path, part in self._parts.items():
                if path.parts[-2:] == where:
                    return part
        return None

    def get_root_digest(self, name: ShardName) -> str | None:
        """The root of a sealed copy, or of a base beside one; None if there is none."""
        if (copy := self._held.get((name.id, name.rank))) is not None and not name.is_base:
            return copy.root
        for volume in self._volumes if name.is_base else ():
            path = volume.root / DIRECTORY / str(name.id) / name.file
            with contextlib.suppress(ImageError, OSError):
                return base_control(path, volume.filesystem).root
        return None

    def write_chunk(self, part: IncomingCopy, chunk: int, data: memoryview, *, whose: str) -> None:
        """`IncomingCopy.write`. Raises DigestError, or StorageError (the part is gone)."""
        with self._failing(part):
            part.write(chunk, data, whose=whose)

    def seal(self, part: IncomingCopy) -> str:
        """`IncomingCopy.seal`. From then on it is a copy, or the base of one. Raises FormatError,
        also if the base of a copy is not there, StorageError."""
        with self._failing(part):
            filesystem = self.volume_of(part.path).filesystem
            check_base_beside_shard(part.path, part.manifest.control, filesystem)
            root = part.seal()
        copy = LocalShard.from_manifest(part.path, part.manifest)
        with self._lock:
            if self._parts.pop(part.path, None) is not None:
                self.shared_bytes += part.shared_bytes
            if not part.manifest.layout.is_base:
                self._held[copy.step_id, copy.rank] = copy
        return root

    @contextlib.contextmanager
    def _failing(self, part: IncomingCopy) -> Iterator[None]:
        """A file that failed once is not written to again. It is removed; the sender begins
        anew."""
        try:
            yield
        except OSError as error:
            with self._lock:
                self._parts.pop(part.path, None)
            with contextlib.suppress(OSError):
                part.discard()
            kind = NoSpaceError if error.errno in FULL else StorageError
            raise kind(f"cannot keep the copy {part.path}: {error}") from error

    # --- going -------------------------------------------------------------------------------

    def drop_superseded(self, request: CopiesToKeep, *, sender: int) -> int:
        """Delete copies that node rank `sender` no longer wants and has newer ones of; how many."""
        with self._lock:
            self._needed.pop(sender, None)
            # Of the wanted steps, only the commit is remembered.
            self._needed[sender] = CopiesToKeep(
                committed=request.committed, ranks=dict.fromkeys(request.ranks, ())
            )
            while sum(len(request.ranks) for request in self._needed.values()) > MOST_RANKS:
                self._needed.pop(next(iter(self._needed)))
            doomed = superseded_copies(self._by_rank(), request.ranks, committed=request.committed)
            for step_id, rank in doomed:
                self._drop(step_id, rank, why=_SUPERSEDED)
            self._drop_parts(request)
        return len(doomed)

    def make_room(self, size_bytes: int) -> bool:
        """Delete copies, oldest first, until one volume has this much space. False if none went."""
        with self._lock:
            before = len(self._held)
            self._free(self._volumes, size_bytes)
            return len(self._held) < before

    def _drop_parts(self, request: CopiesToKeep) -> None:
        """Delete unfinished copies that will never be finished, in memory and left-over files."""
        unwanted: dict[Path, Volume] = {}
        for volume in self._volumes:
            for path in _parts(volume):
                name = ShardName.parse(_final(path))
                if name.rank in request.ranks and name.id not in request.ranks[name.rank]:
                    unwanted[path] = volume
        for path, volume in unwanted.items():
            if (part := self._parts.pop(_final(path), None)) is not None:
                part.close()
            with contextlib.suppress(OSError):
                volume.filesystem.unlink(path)
                volume.filesystem.remove_directory(path.parent)

    def _drop(self, step_id: StepId, rank: int, *, why: str) -> None:
        copy = self._held.pop((step_id, rank), None)
        if copy is None:
            return
        try:
            filesystem = self.volume_of(copy.path).filesystem
            filesystem.unlink(copy.path)
            if copy.base_shard is not None:
                with contextlib.suppress(FileNotFoundError):
                    filesystem.unlink(copy.base_shard.path)
            with contextlib.suppress(OSError):  # copies of other ranks are the usual case
                filesystem.remove_directory(copy.path.parent)
        except OSError as error:
            warn("peer.copy_delete_failed", path=str(copy.path), error=str(error))
            return
        usual = why == _SUPERSEDED
        level = logging.DEBUG if usual else logging.INFO
        info("peer.copy_deleted", level=level, step=str(step_id), rank=rank, reason=why)

    def _by_rank(self) -> dict[int, list[StepId]]:
        found: dict[int, list[StepId]] = {}
        for step_id, rank in self._held:
            found.setdefault(rank, []).append(step_id)
        return found

    def close(self) -> None:
        """Leave unfinished copies to the next sidecar."""
        with self._lock:
            for part in self._parts.values():
                part.close()
            self._parts.clear()

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = NoSpaceError if error.errno in FULL else StorageError
            raise kind(f"{what}: {error}") from error


def _usable(volumes: Sequence[Volume]) -> list[Volume]:
    return [volume for volume in volumes if not volume.failed and not volume.read_only]


def _manifest(name: ShardName, data: memoryview, *, run: str, path: Path) -> Manifest:
    """What is sent as this copy. Raises ImageError."""
    expected = Shard(step_id=name.id, rank=name.rank, world=name.world)
    manifest = Manifest.parse(data, run=run, shard=None if name.is_base else expected, path=path)
    layout = manifest.layout
    if (layout.is_base, layout.rank, layout.world) != (name.is_base, name.rank, name.world):
        what = "base" if name.is_base else "image"
        raise ForeignError(f"not the {what} of rank {name.rank} of {name.world}", path=path)
    return manifest


def _made(volume: Volume, name: ShardName) -> Path:
    """The path of a copy on this volume; its directory is there. Raises OSError."""
    path = volume.root / DIRECTORY / str(name.id) / name.file
    for directory in (path.parent.parent, path.parent):
        if volume.filesystem.make_directory(directory):
            volume.filesystem.sync_directory(directory.parent)
    return path


def _link_base(name: ShardName, manifest: Manifest, volume: Volume) -> bool:
    """Whether the base lies beside the copy of some step on this volume. If so, it then lies beside
    that of this step, too. One of the same bytes that another step referred to first is not it."""
    filesystem, base_ref = volume.filesystem, BaseRef.of(manifest.control, manifest.layout)
    with contextlib.suppress(OSError):  # what cannot be linked is sent
        for known in RunDirectories(RunTree(volume.root / DIRECTORY), filesystem).find_base_files(
            name.file
        ):
            with contextlib.suppress(ImageError):
                if base_ref.matches_control_page(
                    base_control(known, filesystem, size_bytes=base_ref.size_bytes)
                ):
                    _link(known, _made(volume, name), filesystem)
                    return True
    return False


def _link(known: Path, path: Path, filesystem: Filesystem) -> None:
    if known != path:
        with contextlib.suppress(FileNotFoundError):  # another one, of a copy that never came
            filesystem.unlink(path)
        filesystem.link(known, path)
        filesystem.sync_directory(path.parent)


def _parts(volume: Volume) -> list[Path]:
    """Unfinished copies on this volume, and bases without their shards. Raises OSError, but not for
    absence."""
    directories = RunDirectories(RunTree(volume.root / DIRECTORY), volume.filesystem)
    found: list[Path] = []
    for step in step_directories(directories.tree, volume.filesystem):
        found += [step / name for name in volume.filesystem.names(step) if is_part(name)]
        found += directories.find_orphaned_base_files(step)
    return found


def _final(path: Path) -> Path:
    """The path that an unfinished copy will have."""
    return path.with_name(path.name.removeprefix(".").removesuffix(".part"))
