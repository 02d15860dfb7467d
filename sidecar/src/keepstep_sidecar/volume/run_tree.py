"""The directory of a run on one volume: what names mean, what lies there, and the moves between its
places.

    <root>/                                     <dir>/<run>
        .lock                                   held by the sidecar that owns the volume
        run.json                                the run's epochs
        history.jsonl                           what happened, shown to people
        <step>/rank-00000-of-00002.safetensors  a committed step: whole, visible to stock readers
        <step>/base-00000-of-00002.safetensors  what the shard of this rank refers to, if it does;
                                                steps with the same base have one file (hard links)
        pending/<step>/rank-...                 durable shards of steps not known to be committed
        pending/<step>/.rank-....tmp-<pid>-<n>  a shard being written
        quarantine/<step>.<shard>.<reason>.<n>  files that failed; kept, never read again
        retired/<step>.<n>/                     a step that is being deleted
        spare/rank-...                          retired shards that will be written over

A shard moves between these places by rename only, so it is always in exactly one of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from keepstep.core.shard import MOST_RANKS, Shard
from keepstep.directory import NotRegularFileError
from keepstep.errors import ForeignError, FormatError, ImageError, TornError
from keepstep.image import ControlPage
from keepstep.image.control_page import Manifest
from keepstep.steps import StepId, make_base_file_name, shard_name
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.files import (
    PAGE_BYTES,
    DurableFile,
    Filesystem,
    aligned_buffer,
    fault_point,
    has_same_attributes,
    is_open_only_as,
)

# --- names -----------------------------------------------------------------------------------


LOCK = ".lock"
RECORD = "run.json"
HISTORY = "history.jsonl"

_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,9})"
_SHARD = re.compile(rf"rank-{_NUMBER}-of-{_NUMBER}\.safetensors")
_BASE = re.compile(rf"base-{_NUMBER}-of-{_NUMBER}\.safetensors")
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9]+-[0-9]+")


@dataclass(frozen=True, kw_only=True)
class ShardName:
    """What a shard's path says; the control page inside must say the same. `is_base`: it is the
    path of what lies beside the shard, its base. Raises ValueError for ranks that no world has:
    what is held of a step is one bit for each."""

    id: StepId
    rank: int
    world: int
    is_base: bool = False

    def __post_init__(self) -> None:
        if not self.rank < self.world <= MOST_RANKS:
            raise ValueError(f"rank {self.rank} of {self.world}: a world has {MOST_RANKS} at most")

    @classmethod
    def parse(cls, path: Path) -> ShardName:
        """Read `.../<step>/rank-00000-of-00002.safetensors`, or the name of a base. Raises
        ValueError."""
        shard, base = _SHARD.fullmatch(path.name), _BASE.fullmatch(path.name)
        if not (match := shard or base):
            raise ValueError(f"not a shard's name: {path.name}")
        rank, world = int(match[1]), int(match[2])
        return cls(id=StepId.parse(path.parent.name), rank=rank, world=world, is_base=bool(base))

    @classmethod
    def of(cls, shard: Shard) -> ShardName:
        """The name of a shard, which is no base."""
        return cls(id=shard.step_id, rank=shard.rank, world=shard.world)

    @property
    def base_shard_name(self) -> ShardName:
        """The name of the base beside this shard."""
        return replace(self, is_base=True)

    @property
    def file(self) -> str:
        """The file name."""
        return (make_base_file_name if self.is_base else shard_name)(self.rank, self.world)


class RunTree:
    """Paths below `root`, which is absolute."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock, self.record, self.history = root / LOCK, root / RECORD, root / HISTORY
        self.pending, self.quarantine = root / "pending", root / "quarantine"
        self.retired, self.spare = root / "retired", root / "spare"

    def pending_step(self, step_id: StepId) -> Path:
        return self.pending / str(step_id)

    def published_step(self, step_id: StepId) -> Path:
        return self.root / str(step_id)

    def is_published(self, path: Path) -> bool:
        """Does `path` lie in a directory that readers see?"""
        return path.parent.parent == self.root and is_step(path.parent.name)


def temporary_name(shard: str, *, pid: int, number: int) -> str:
    """A name that readers of `*.safetensors` do not see, and that a scan tells from a shard."""
    return f".{shard}.tmp-{pid}-{number}"


def is_temporary(name: str) -> bool:
    """Is this a name that `temporary_name` makes?"""
    return _TEMPORARY.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Is this the name of a shard? Other files in a step's directory are not ours."""
    return _SHARD.fullmatch(name) is not None


def is_base(name: str) -> bool:
    """Is this the name of the base of a shard?"""
    return _BASE.fullmatch(name) is not None


def is_step(name: str) -> bool:
    """Is this the name of a step's directory?"""
    try:
        StepId.parse(name)
    except ValueError:
        return False
    return True


def quarantine_name(path: Path, reason: str, number: int) -> str:
    """`<step>.<shard>.<reason>.<n>`. Unlike a shard's name, it does not end in .safetensors."""
    match = _TEMPORARY.fullmatch(path.name)
    shard = (match[1] if match else path.name).removesuffix(".safetensors")
    slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40] or "unknown"
    return f"{path.parent.name}.{shard}.{slug}.{number}"


# --- what lies there -------------------------------------------------------------------------


BAD_BLOCKS = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""Errors for lost blocks, from a drive or from a file system with its own checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard(Shard):
    """A shard on a volume. `published`: readers can see the step's directory, because the step was
    committed."""

    path: Path = field(compare=False)
    published: bool = field(default=False, compare=False)

    @classmethod
    def from_manifest(
        cls, path: Path, manifest: Manifest, *, published: bool = False
    ) -> LocalShard:
        """A shard as the file itself describes it."""
        return cls(**manifest.shard.base_fields, path=path, published=published)

    @property
    def base_shard(self) -> LocalShard | None:
        """Its base, which lies beside it; None if it is whole."""
        if self.base is None:
            return None
        path = self.path.with_name(make_base_file_name(self.rank, self.world))
        return LocalShard(**self.base.base_fields, path=path)


@dataclass(frozen=True, kw_only=True)
class RefusedFile:
    """A file that is not a shard of this run, and why. `unread`: its drive gave an error.
    `moved_to`: its path in quarantine.

    After a `VersionError` the file stays where it is: a newer keepstep can read it.
    """

    path: Path
    error: ImageError
    unread: bool = False
    moved_to: Path | None = None


@dataclass(frozen=True, kw_only=True)
class VolumeScan:
    """Everything on a volume, sorted by step and rank. `unread`: the volumes of a set that could
    not be scanned, by their roots, and why. What they hold is unknown."""

    shards: tuple[LocalShard, ...] = ()
    problems: tuple[RefusedFile, ...] = ()
    unread: Mapping[Path, str] = field(default_factory=dict)


def scan_shards(root: Path, *, run: str, filesystem: Filesystem | None = None) -> VolumeScan:
    """Look at every shard below `root` (`<dir>/<run>`). A missing root gives an empty scan.

    Raises OSError when the content cannot be determined: unknown is not the same as absent.
    """
    tree = RunTree(root.absolute())
    filesystem = filesystem or open_filesystem(tree.root)
    with contextlib.suppress(FileNotFoundError):
        filesystem.open_directory(tree.root)  # raises if it is a file
    shards: list[LocalShard] = []
    problems: list[RefusedFile] = []
    for directory in step_directories(tree, filesystem):
        for path in (directory / name for name in filter(is_shard, filesystem.names(directory))):
            found = filesystem.lstat(path)
            if found is None or stat.S_ISLNK(found.st_mode):  # a link: a shard on another volume
                continue
            seen = _checked(path, filesystem, run=run, published=tree.is_published(path))
            if isinstance(seen, LocalShard):
                shards.append(seen)
            elif seen is not None:
                problems.append(seen)
    shards.sort(key=lambda shard: (shard.step_id, shard.rank))
    return VolumeScan(shards=tuple(shards), problems=tuple(problems))


def open_filesystem(root: Path) -> Filesystem:
    """A file system that holds `root`, if that exists. Raises OSError if it is a link or a file."""
    filesystem = Filesystem()
    with contextlib.suppress(FileNotFoundError):
        filesystem.open_root(root)
    return filesystem


def step_directories(tree: RunTree, filesystem: Filesystem) -> Iterator[Path]:
    """Directories of steps, published ones first. Empty if there are none or no volume. A file or a
    link where one belongs is none. But of a link in the place of `pending` it is unknown what lies
    behind it: OSError."""
    for parent in (tree.root, tree.pending):
        found = filesystem.lstat(parent)
        if found is not None and stat.S_ISLNK(found.st_mode):
            filesystem.open_directory(parent)  # raises
        named = (parent / name for name in filesystem.names(parent) if is_step(name))
        yield from filter(filesystem.is_directory, named)


def find_foreign_safetensors(tree: RunTree, filesystem: Filesystem) -> list[Path]:
    """`.safetensors` files in steps' directories that are not shards. The sidecar neither reads nor
    moves them. But a stock reader of the directory would take them for a part of the step."""
    found: list[Path] = []
    for directory in step_directories(tree, filesystem):
        found += [directory / name for name in filesystem.names(directory)]
    return [
        path
        for path in found
        if path.suffix == ".safetensors" and not (is_shard(path.name) or is_base(path.name))
    ]


def _checked(
    path: Path, filesystem: Filesystem, *, run: str, published: bool
) -> LocalShard | RefusedFile | None:
    """What a file is; None when the volume's owner moved or retired it meanwhile.

    Whatever error a reader meets, the file counts as refused, so that one bad file never hides the
    good ones.
    """
    try:
        with open_shard_file(path, filesystem) as fd:
            manifest = read_manifest(fd, path, run=run)
        check_base_beside_shard(path, manifest.control, filesystem)
        return LocalShard.from_manifest(path, manifest, published=published)
    except ImageError as error:
        return RefusedFile(path=path, error=error)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in BAD_BLOCKS:
            raise
        refusal = FormatError(f"unreadable: {error.strerror}", path=path)
        return RefusedFile(path=path, error=refusal, unread=True)
    except MemoryError:
        raise
    except Exception as error:
        return RefusedFile(path=path, error=FormatError(f"unreadable: {error!r}", path=path))


@contextlib.contextmanager
def open_shard_file(path: Path, filesystem: Filesystem) -> Iterator[int]:
    """Open a shard for reading; yields the descriptor. Raises FormatError for anything that is no
    regular file, OSError."""
    try:
        fd = filesystem.open(path, os.O_RDONLY)
    except NotRegularFileError:
        raise FormatError("not a regular file", path=path) from None
    try:
        yield fd
    finally:
        os.close(fd)


def read_manifest(fd: int, path: Path, *, run: str) -> Manifest:
    """The manifest of an open shard, checked against `run` and the shard's name.

    Raises FormatError, TornError, ForeignError or VersionError, which all name `path`; OSError.
    """
    try:
        name = ShardName.parse(path)
    except ValueError as error:
        raise FormatError(str(error), path=path) from None
    shard = Shard(step_id=name.id, rank=name.rank, world=name.world)

    def read(begin: int, end: int) -> bytes:
        if len(data := os.pread(fd, end - begin, begin)) < end - begin:
            raise TornError(f"truncated: it ends before byte {end}")
        return data

    manifest = Manifest.read(read, os.fstat(fd).st_size, run=run, shard=shard, path=path)
    if manifest.layout.is_base:
        raise ForeignError("a base of other steps, no shard", path=path)
    return manifest


def check_base_beside_shard(shard: Path, control: ControlPage, filesystem: Filesystem) -> None:
    """Check that what a shard refers to lies beside it. As of a shard, the bytes are not read.
    Raises ImageError, naming the shard; OSError."""
    if (ref := control.base) is None:
        return
    path = shard.with_name(make_base_file_name(control.rank, control.world))
    try:
        found = base_control(path, filesystem, size_bytes=ref.size_bytes)
    except FileNotFoundError:
        raise FormatError(
            f"{path.name}, which holds its frozen parameters, is gone: use another step", path=shard
        ) from None
    except ImageError as error:
        raise type(error)(f"its base {path.name}: {error.reason}", path=shard) from None
    if not ref.matches_control_page(found) or found.run != control.run:
        raise ForeignError(f"{path.name} is not the base that it names", path=shard)


def base_control(
    path: Path, filesystem: Filesystem, *, size_bytes: int | None = None
) -> ControlPage:
    """The control page of a base, which must have this size if one is given. Raises ImageError,
    OSError."""
    with open_shard_file(path, filesystem) as fd:
        found = os.fstat(fd).st_size
        if size_bytes not in (None, found):
            raise TornError(f"{found} bytes, not {size_bytes}", path=path)
        return ControlPage.from_bytes(os.pread(fd, PAGE_BYTES, max(0, found - PAGE_BYTES)))


# --- moves -----------------------------------------------------------------------------------


_QUARANTINED = 16
"""So many files stay in quarantine at most."""


@dataclass(frozen=True)
class RunDirectories:
    """The directories of `tree`, and the moves between them. `lock`: for those who change names
    there."""

    tree: RunTree
    filesystem: Filesystem
    lock: threading.RLock = field(default_factory=threading.RLock)

    # --- looking -----------------------------------------------------------------------------

    def find_shard_path(self, step_id: StepId, shard: str) -> Path | None:
        """The path of a shard, published or pending; None when it is neither."""
        places = (self.tree.published_step(step_id), self.tree.pending_step(step_id))
        found = (place / shard for place in places)
        return next(filter(self.filesystem.is_file, found), None)

    def find_current_path(self, path: Path) -> Path:
        """`path`, or the file's current path if its step was published or hidden meanwhile."""
        if self.filesystem.lstat(path) is not None or not is_step(path.parent.name):
            return path
        return self.find_shard_path(StepId.parse(path.parent.name), path.name) or path

    def published_paths_of_step(self, step_id: StepId) -> tuple[Path, ...]:
        """The paths that this volume's shards of a step have once it is published."""
        names: set[str] = set()
        for place in (self.tree.published_step(step_id), self.tree.pending_step(step_id)):
            names.update(path.name for path in self.shards_in(place))
            bases = (path for path in self.entries(place) if is_base(path.name))
            names.update(path.name for path in bases if self.filesystem.is_file(path))
        return tuple(self.tree.published_step(step_id) / name for name in sorted(names))

    def used_bytes(self, *, besides: Collection[Path]) -> int:
        """Blocks of all files below the root except `besides`, in bytes; of one with several names,
        once."""
        found = self.filesystem.walk(self.tree.root)
        files = {(info.st_dev, info.st_ino): info for path, info in found if path not in besides}
        return sum(map(_bytes, files.values()))

    def count_allocated_bytes(self, path: Path) -> int:
        """Blocks of a file, or of all files in a directory, in bytes; 0 when it is gone, and for a
        file that has another name, whose blocks stay."""
        found = self.filesystem.lstat(path)
        if found is None:
            return 0
        if not stat.S_ISDIR(found.st_mode):
            return _bytes(found)
        return sum(_bytes(info) for _, info in self.filesystem.walk(path) if info.st_nlink == 1)

    def shards_in(self, directory: Path) -> list[Path]:
        """The shards in `directory` itself, without links to other volumes."""
        named = [path for path in self.entries(directory) if is_shard(path.name)]
        return [path for path in named if self.filesystem.is_file(path)]

    def entries(self, directory: Path) -> list[Path]:
        """What `directory` holds, sorted; nothing when it is missing, a link or a file."""
        return [directory / name for name in self.filesystem.names(directory)]

    def count_quarantined_files(self) -> int:
        """Number of files in quarantine."""
        return len(self.filesystem.names(self.tree.quarantine))

    # --- moving ------------------------------------------------------------------------------

    def find_base_files(self, name: str) -> Iterator[Path]:
        """All files of this name in steps' directories, those of the newest step first."""
        places = sorted(
            step_directories(self.tree, self.filesystem),
            key=lambda place: StepId.parse(place.name),
            reverse=True,
        )
        for path in (place / name for place in places):
            if self.filesystem.is_file(path):
                yield path

    def make_pending(self, step_id: StepId) -> Path:
        """Make the directory for a step's new shards. Its name survives a power cut."""
        for path in (self.tree.pending, self.tree.pending_step(step_id)):
            self.make_directory(path)
        return self.tree.pending_step(step_id)

    def publish_step(self, step_id: StepId, elsewhere: Sequence[Path]) -> Path | None:
        """Show a step to readers by one rename of its whole directory. Returns that directory, or
        None if there are no shards. `elsewhere`: shards on other volumes, shown as links."""
        pending, published = self.tree.pending_step(step_id), self.tree.published_step(step_id)
        if not self.shards_in(pending):
            return published if self.filesystem.is_directory(published) else None
        if self.filesystem.is_directory(published):
            # A shard was written again after the step had been hidden and shown. Join the two
            # first.
            self.unpublish(step_id)
        self._link(pending, elsewhere)
        self._move(pending, published, "publish")
        return published

    def _link(self, directory: Path, elsewhere: Sequence[Path]) -> None:
        there = self.filesystem.names(directory)
        missing = [path for path in elsewhere if path.name not in there]
        for path in missing:
            self.filesystem.symlink(path, directory / path.name)
        if missing:
            self.filesystem.sync_directory(directory)

    def unpublish(self, step_id: StepId) -> None:
        """Hide a step by one rename. Shards that are already pending join it first."""
        pending, published = self.tree.pending_step(step_id), self.tree.published_step(step_id)
        if not self.filesystem.is_directory(published):
            return
        self.make_directory(self.tree.pending)
        if self.filesystem.is_directory(pending):
            for path in self.entries(pending):
                if is_base(path.name):  # to rename one name of a file to another does nothing
                    with contextlib.suppress(FileNotFoundError):
                        self.filesystem.unlink(published / path.name)
                self.filesystem.rename(path, published / path.name)
            self.filesystem.sync_directory(published)
            self.filesystem.remove_directory(pending)
        self._move(published, pending, "unpublish")

    def delete_step(self, step_id: StepId) -> tuple[Path, ...]:
        """Take a step out of sight. Returns the directories that are left of it in `retired/`."""
        doomed = []
        for place in (self.tree.published_step(step_id), self.tree.pending_step(step_id)):
            if self.filesystem.is_directory(place):
                self.make_directory(self.tree.retired)
                target = self._unused(self.tree.retired, place.name)
                # Make the move durable before the first unlink: after a power cut, a directory that
                # lost some of its shards must not come back.
                self._move(place, target, "retire")
                doomed.append(target)
        return tuple(doomed)

    def delete_retired_directory(self, directory: Path) -> int:
        """Delete a retired directory; of a link, only the name. Returns the bytes freed."""
        found = self.filesystem.lstat(directory)
        if found is not None and stat.S_ISLNK(found.st_mode):
            self.filesystem.unlink(directory)
            return 0
        freed = self.count_allocated_bytes(directory)
        for path in self.entries(directory):
            fault_point("retire.unlink")
            if self.filesystem.is_directory(path):
                self.filesystem.open_directory(directory).remove(path.name)
            else:
                self.filesystem.unlink(path)
        self.filesystem.remove_directory(directory)
        fault_point("retire.done")
        return freed

    def delete_files(self, paths: Iterable[Path]) -> None:
        """Delete these files. One that cannot be deleted stays and is logged."""
        for path in paths:
            with _explained(path), contextlib.suppress(FileNotFoundError):
                self.filesystem.unlink(path)

    def quarantine_file(self, path: Path, reason: str) -> Path:
        """Move one file to quarantine; hides its step if published. Returns the new path."""
        if self.tree.is_published(path):
            step_id = StepId.parse(path.parent.name)
            self.unpublish(step_id)
            path = self.tree.pending_step(step_id) / path.name
        self.make_directory(self.tree.quarantine)
        names = (quarantine_name(path, reason, number) for number in count(1))
        targets = (self.tree.quarantine / name for name in names)
        target = next(target for target in targets if self.filesystem.lstat(target) is None)
        fault_point("quarantine.rename")
        self.filesystem.rename(path, target)
        self.filesystem.sync_directory(target.parent)
        self.filesystem.sync_directory(path.parent)
        self._bound_quarantine(newest=target)
        return target

    def drop_quarantine(self) -> bool:
        """Delete the files in quarantine: others need the space. Returns whether there were any."""
        doomed = self.entries(self.tree.quarantine)
        if doomed:
            warn("quarantine.emptied", path=str(self.tree.quarantine), files=len(doomed))
        self.delete_files(doomed)
        return bool(doomed)

    def _bound_quarantine(self, *, newest: Path) -> None:
        """Delete the oldest files if there are many, or if they take a tenth of the drive. The
        newest one is kept: it holds bad blocks, or tells what went wrong."""
        found = self.filesystem.walk(self.tree.quarantine)
        there = {path: info for path, info in found if path != newest}
        left_bytes = self.filesystem.size_bytes(self.tree.root) // 10 - self.count_allocated_bytes(
            newest
        )
        order = sorted(there, key=lambda path: there[path].st_ctime, reverse=True)
        for number, path in enumerate(order, start=2):
            left_bytes -= _bytes(there[path])
            if number > _QUARANTINED or left_bytes < 0:
                self.delete_files([path])

    def remove_leftovers(self, *, keep: Collection[Path]) -> None:
        """Remove what dead writers left: temporary files except `keep`, retired steps, empty steps.

        The volume is locked, so every writer except those of `keep` is dead. Something that cannot
        be removed (a file where a directory belongs, a file system that is read-only by now) stays
        and is logged. It must not hide the shards that a scan would find.
        """
        for directory in self.entries(self.tree.retired):
            with _explained(directory):
                self.delete_retired_directory(directory)
        for directory in list(step_directories(self.tree, self.filesystem)):
            with _explained(directory):
                self._sweep_step(directory, keep)

    def _sweep_step(self, directory: Path, keep: Collection[Path]) -> None:
        for path in self.entries(directory):
            if is_temporary(path.name) and path not in keep:
                with _explained(path):
                    self.filesystem.unlink(path)
        if not any(path.parent == directory for path in keep):
            self.delete_files(self.find_orphaned_base_files(directory))
        if not any(path.parent == directory for path in keep):
            with contextlib.suppress(OSError):  # not empty is the usual case
                self.filesystem.remove_directory(directory)

    def find_orphaned_base_files(self, directory: Path) -> list[Path]:
        """The bases of shards that are not there: whoever was to write these was killed, or they
        lie in quarantine."""
        names = self.filesystem.names(directory)
        alone = [name for name in names if is_base(name) and "rank" + name[4:] not in names]
        return [directory / name for name in alone]

    # --- parts -------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """Make one of the directories; a file or a link in its place is set aside."""
        found = self.filesystem.lstat(path)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            aside = self._unused(path.parent, f"{path.name}.set-aside")
            warn(
                "volume.path_moved_aside",
                path=str(path),
                reason="no directory",
                moved_to=str(aside),
            )
            self.filesystem.rename(path, aside)
        if self.filesystem.make_directory(path):
            self.filesystem.sync_directory(path.parent)

    def _unused(self, directory: Path, name: str) -> Path:
        paths = (directory / f"{name}.{number}" for number in count(1))
        return next(path for path in paths if self.filesystem.lstat(path) is None)

    def _move(self, source: Path, target: Path, what: str) -> None:
        """Rename a directory. On return, no power cut can undo it."""
        fault_point(f"{what}.rename")
        self.filesystem.rename(source, target)
        fault_point(f"{what}.sync")
        self.filesystem.sync_directory(target.parent)
        self.filesystem.sync_directory(source.parent)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn("volume.delete_failed", path=str(path), error=str(error))


def _bytes(found: os.stat_result) -> int:
    """Space that a file takes."""
    return found.st_blocks * 512


# --- spare files -----------------------------------------------------------------------------


class SpareFiles:
    """Shards of retired steps, kept to be written over by the next images (docs/adr/0015), by the
    name of their shard: a rank's next image is most likely of the same size.

    Writing over blocks that a file has already is faster than writing a new file, because neither
    file system nor drive has to allocate any. All that is known of a spare file is what
    lies in `spare/`, where no reader looks. Where anything is in doubt, a new file is written.
    """

    def __init__(self, directories: RunDirectories) -> None:
        self._directories = directories
        self._tree, self._filesystem = directories.tree, directories.filesystem

    def disk_bytes(self) -> int:
        """Space that spare files take. It counts as free."""
        return self._directories.count_allocated_bytes(self._tree.spare)

    def keep(self, retired: Sequence[Path]) -> int:
        """Keep the shards in these retired directories, in place of all that was kept before.
        Returns their bytes. A shard stays where it is if less than its size is free: others may
        need that."""
        shards = [path for directory in retired for path in self._directories.shards_in(directory)]
        kept: dict[str, int] = {}
        with contextlib.suppress(OSError):  # what is not kept will be deleted, as without all this
            self._directories.make_directory(self._tree.spare)
            for path in shards:
                size_bytes = self._directories.count_allocated_bytes(path)
                if self._filesystem.free_bytes(self._tree.root) >= size_bytes:
                    self._filesystem.rename(path, self._tree.spare / path.name)
                    kept[path.name] = size_bytes
        if shards:
            self._delete(besides=kept)
        return sum(kept.values())

    def reuse_spare_file(self, new: DurableFile, *, size_bytes: int, claimed: Path) -> bool:
        """Put the spare file of this shard in the place of the `new`, empty file. False if there is
        none, or if it must not be used. `claimed`: another temporary name.

        It must be of this size, and else like the new file; and nobody may have it open, or have
        another name for it, since its bytes will change. Its seal is gone from the medium before
        they do: a power cut never leaves a seal on other bytes.
        """
        with contextlib.suppress(OSError):  # most often, there is none
            self._filesystem.rename(self._tree.spare / new.path.name, claimed)
            if self._unsealed(claimed, new.fd, size_bytes):
                self._filesystem.rename(claimed, new.temporary)
                return True
        self._directories.delete_files([claimed])
        return False

    def _unsealed(self, path: Path, new: int, size_bytes: int) -> bool:
        fd = self._filesystem.open(path, os.O_RDWR)
        try:
            found = os.fstat(fd)
            if found.st_size != size_bytes or found.st_nlink > 1:
                return False
            if not (has_same_attributes(fd, new) and is_open_only_as(fd)):
                return False
            fault_point("spare.unseal")
            with aligned_buffer(PAGE_BYTES) as zeros, memoryview(zeros) as page:
                self._filesystem.write(fd, page, size_bytes - PAGE_BYTES)
            fault_point("spare.sync")
            self._filesystem.sync_data(fd)
            return True
        finally:
            self._filesystem.close_file(fd)

    def delete_all(self) -> bool:
        """Delete all spare files. Returns whether there were any."""
        return self._delete(besides=())

    def _delete(self, *, besides: Collection[str]) -> bool:
        doomed = [p for p in self._directories.entries(self._tree.spare) if p.name not in besides]
        self._directories.delete_files(doomed)
        return bool(doomed)
