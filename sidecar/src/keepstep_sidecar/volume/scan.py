"""What a volume holds, as the header and the control page of each shard say.

Read-only: it takes no lock, and moves and repairs nothing (`Volume.scan` does that with the
result). So `keepstep steps` can look at a volume with or without a live sidecar.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.directory import NoFileError
from keepstep.errors import FormatError, ImageError, TornError
from keepstep.image import Layout
from keepstep.image.manifest import Manifest
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import ShardName, Tree, is_shard, is_step

BAD_BLOCKS = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""Errors for lost blocks, from a drive or from a file system with its own checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard(Shard):
    """A shard on a volume. `published`: readers can see the step's directory, because the step was
    committed."""

    path: Path = field(compare=False)
    layout: Layout = field(compare=False)
    published: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, path: Path, manifest: Manifest, *, published: bool = False) -> LocalShard:
        """A shard as the file itself describes it."""
        told = {one.name: getattr(manifest.shard, one.name) for one in fields(Shard)}
        return cls(**told, path=path, layout=manifest.layout, published=published)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A file that is not a shard of this run, and why. `moved_to`: its path in quarantine.

    After a `VersionError` the file stays where it is: a newer keepstep can read it.
    """

    path: Path
    error: ImageError
    moved_to: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Everything on a volume, sorted by step and rank. `unread`: the volumes of a set that could
    not be scanned, by their roots, and why. What they hold is unknown."""

    shards: tuple[LocalShard, ...] = ()
    problems: tuple[Refused, ...] = ()
    unread: Mapping[Path, str] = field(default_factory=dict)


def survey(root: Path, *, run: str, filesystem: Filesystem | None = None) -> Scan:
    """Look at every shard below `root` (`<dir>/<run>`). A missing root gives an empty scan.

    Raises OSError when the content cannot be determined: unknown is not the same as absent.
    """
    tree = Tree(root.absolute())
    filesystem = filesystem or holding(tree.root)
    with contextlib.suppress(FileNotFoundError):
        filesystem.directory(tree.root)  # raises if it is a file
    shards: list[LocalShard] = []
    problems: list[Refused] = []
    for path in _files(tree, filesystem):
        seen = _look(path, filesystem, run=run, published=tree.is_published(path))
        if isinstance(seen, LocalShard):
            shards.append(seen)
        elif seen is not None:
            problems.append(seen)
    shards.sort(key=lambda shard: (shard.step_id, shard.rank))
    return Scan(shards=tuple(shards), problems=tuple(problems))


def holding(root: Path) -> Filesystem:
    """A file system that holds `root`, if that exists. Raises OSError if it is a link or a file."""
    filesystem = Filesystem()
    with contextlib.suppress(FileNotFoundError):
        filesystem.hold(root)
    return filesystem


def step_directories(tree: Tree, filesystem: Filesystem) -> Iterator[Path]:
    """Directories of steps, published ones first. Empty if there are none or no volume. A file or a
    link where one belongs is none. But of a link in the place of `pending` it is unknown what lies
    behind it: OSError."""
    for parent in (tree.root, tree.pending):
        found = filesystem.lstat(parent)
        if found is not None and stat.S_ISLNK(found.st_mode):
            filesystem.directory(parent)  # raises
        named = (parent / name for name in filesystem.names(parent) if is_step(name))
        yield from filter(filesystem.is_directory, named)


def _files(tree: Tree, filesystem: Filesystem) -> Iterator[Path]:
    """All that is named like a shard, without links: those stand for shards on other volumes."""
    for directory in step_directories(tree, filesystem):
        for name in filter(is_shard, filesystem.names(directory)):
            found = filesystem.lstat(directory / name)
            if found is not None and not stat.S_ISLNK(found.st_mode):
                yield directory / name


def strangers(tree: Tree, filesystem: Filesystem) -> list[Path]:
    """`.safetensors` files in steps' directories that are not shards. The sidecar neither reads nor
    moves them. But a stock reader of the directory would take them for a part of the step."""
    found: list[Path] = []
    for directory in step_directories(tree, filesystem):
        found += [directory / name for name in filesystem.names(directory)]
    return [path for path in found if path.suffix == ".safetensors" and not is_shard(path.name)]


def _look(
    path: Path, filesystem: Filesystem, *, run: str, published: bool
) -> LocalShard | Refused | None:
    """What a file is; None when the volume's owner moved or retired it meanwhile.

    Whatever error a reader meets, the file counts as refused, so that one bad file never hides the
    good ones.
    """
    try:
        with opened(path, filesystem) as fd:
            return LocalShard.of(path, read_manifest(fd, path, run=run), published=published)
    except ImageError as error:
        return Refused(path=path, error=error)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in BAD_BLOCKS:
            raise
        return Refused(path=path, error=FormatError(f"unreadable: {error.strerror}", path=path))
    except MemoryError:
        raise
    except Exception as error:
        return Refused(path=path, error=FormatError(f"unreadable: {error!r}", path=path))


@contextlib.contextmanager
def opened(path: Path, filesystem: Filesystem) -> Iterator[int]:
    """Open a shard for reading; yields the descriptor. Raises FormatError for anything that is no
    regular file, OSError."""
    try:
        fd = filesystem.open(path, os.O_RDONLY)
    except NoFileError:
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

    return Manifest.read(read, os.fstat(fd).st_size, run=run, shard=shard, path=path)
