"""The directories of a step's shards (pending, published, retired, quarantine) and moves between.

The directory of a step appears to readers, and disappears, by one rename, so readers never see a
part of its shards. When a method returns, its moves are on the medium. The caller (`Volume`) holds
its lock and handles OSError, which every method may raise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from keepstep.steps import StepId
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume import faults
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import Tree, is_shard, is_step, is_temporary, quarantine_name
from keepstep_sidecar.volume.scan import step_directories


class Directories:
    """The directories that `paths` names, and the moves between them."""

    def __init__(self, tree: Tree, filesystem: Filesystem) -> None:
        self._tree = tree
        self._filesystem = filesystem

    # --- looking -----------------------------------------------------------------------------

    def find(self, id: StepId, shard: str) -> Path | None:
        """The path of a shard, published or pending; None when it is neither."""
        places = (self._tree.published_step(id), self._tree.pending_step(id))
        found = (place / shard for place in places)
        # Check for a link first: its target is on another volume, which may be out of order.
        return next((path for path in found if not path.is_symlink() and path.is_file()), None)

    def locate(self, path: Path) -> Path:
        """`path`, or the file's current path if its step was published or hidden meanwhile."""
        if path.exists() or not is_step(path.parent.name):
            return path
        return self.find(StepId.parse(path.parent.name), path.name) or path

    def published_paths(self, id: StepId) -> tuple[Path, ...]:
        """The paths that this volume's shards of a step have once it is published."""
        names: set[str] = set()
        for place in (self._tree.published_step(id), self._tree.pending_step(id)):
            names.update(path.name for path in _shards(place))
        return tuple(self._tree.published_step(id) / name for name in sorted(names))

    def used_bytes(self, *, besides: Collection[Path]) -> int:
        """Blocks of all files below the root except `besides`, in bytes."""
        return sum(_blocks(path) for path in _walk(self._tree.root) if path not in besides)

    def disk_bytes(self, path: Path) -> int:
        """Blocks of a file, or of all files in a directory, in bytes; 0 when it is gone."""
        return sum(_blocks(one) for one in _walk(path)) if path.is_dir() else _blocks(path)

    def shards_in(self, directory: Path) -> list[Path]:
        """The shards in `directory` itself, without links to other volumes."""
        return [path for path in _shards(directory) if path.is_file()]

    def entries(self, directory: Path) -> list[Path]:
        """What `directory` holds, sorted; nothing when it is missing."""
        return _entries(directory)

    def quarantined(self) -> int:
        """Number of files in quarantine."""
        return sum(1 for _ in _entries(self._tree.quarantine))

    # --- moving ------------------------------------------------------------------------------

    def make_pending(self, id: StepId) -> Path:
        """Make the directory for a step's new shards. Its name survives a power cut."""
        for path in (self._tree.pending, self._tree.pending_step(id)):
            self._make(path)
        return self._tree.pending_step(id)

    def publish(self, id: StepId, elsewhere: Sequence[Path]) -> Path | None:
        """Show a step to readers by one rename of its whole directory. Returns that directory, or
        None if there are no shards. `elsewhere`: shards on other volumes, shown as links."""
        pending, published = self._tree.pending_step(id), self._tree.published_step(id)
        if not _shards(pending):
            return published if published.is_dir() else None
        if published.is_dir():
            # A shard was written again after the step had been hidden and shown. Join the two
            # first.
            self.unpublish(id)
        self._link(pending, elsewhere)
        self._move(pending, published, "publish")
        return published

    def _link(self, directory: Path, elsewhere: Sequence[Path]) -> None:
        missing = [path for path in elsewhere if not os.path.lexists(directory / path.name)]
        for path in missing:
            self._filesystem.symlink(path, directory / path.name)
        if missing:
            self._filesystem.sync_directory(directory)

    def unpublish(self, id: StepId) -> None:
        """Hide a step by one rename. Shards that are already pending join it first."""
        pending, published = self._tree.pending_step(id), self._tree.published_step(id)
        if not published.is_dir():
            return
        self._make(self._tree.pending)
        if pending.is_dir():
            self._merge(pending, published)
        self._move(published, pending, "unpublish")

    def _merge(self, source: Path, target: Path) -> None:
        """Move the files of `source` into `target`, and remove `source`."""
        for path in _entries(source):
            self._filesystem.rename(path, target / path.name)
        self._filesystem.sync_directory(target)
        self._filesystem.remove_directory(source)

    def retire(self, id: StepId) -> tuple[Path, ...]:
        """Take a step out of sight. Returns the directories that are left of it in `retired/`."""
        doomed = []
        for place in (self._tree.published_step(id), self._tree.pending_step(id)):
            if place.is_dir():
                self._make(self._tree.retired)
                target = _unused(self._tree.retired, place.name)
                # Make the move durable before the first unlink: after a power cut, a directory that
                # lost some of its shards must not come back.
                self._move(place, target, "retire")
                doomed.append(target)
        return tuple(doomed)

    def delete(self, directory: Path) -> int:
        """Delete a retired directory; of a link, only the name. Returns the bytes freed."""
        freed = 0
        if directory.is_symlink():
            self._filesystem.unlink(directory)
            return freed
        for path in _entries(directory):
            faults.point("retire.unlink")
            if not path.is_symlink() and path.is_dir():
                freed += self.delete(path)
                continue
            freed += _blocks(path)
            self._filesystem.unlink(path)
        self._filesystem.remove_directory(directory)
        faults.point("retire.done")
        return freed

    def discard(self, paths: Iterable[Path]) -> None:
        """Delete these files. One that cannot be deleted stays and is logged."""
        for path in paths:
            with _said(path), contextlib.suppress(FileNotFoundError):
                self._filesystem.unlink(path)

    def quarantine(self, path: Path, reason: str) -> Path:
        """Move one file to quarantine; hides its step if published. Returns the new path."""
        if self._tree.is_published(path):
            id = StepId.parse(path.parent.name)
            self.unpublish(id)
            path = self._tree.pending_step(id) / path.name
        self._make(self._tree.quarantine)
        names = (quarantine_name(path, reason, number) for number in count(1))
        targets = (self._tree.quarantine / name for name in names)
        target = next(target for target in targets if not target.exists())
        faults.point("quarantine.rename")
        self._filesystem.rename(path, target)
        self._filesystem.sync_directory(target.parent)
        self._filesystem.sync_directory(path.parent)
        return target

    def sweep(self, *, keep: Collection[Path]) -> None:
        """Remove what dead writers left: temporary files except `keep`, retired steps, empty steps.

        The volume is locked, so every writer except those of `keep` is dead. Something that cannot
        be removed (a file where a directory belongs, a file system that is read-only by now) stays
        and is logged. It must not hide the shards that a scan would find.
        """
        for directory in _entries(self._tree.retired):
            with _said(directory):
                self.delete(directory)
        for directory in list(step_directories(self._tree)):
            with _said(directory):
                self._sweep_step(directory, keep)

    def _sweep_step(self, directory: Path, keep: Collection[Path]) -> None:
        for path in _entries(directory):
            if is_temporary(path.name) and path not in keep:
                with _said(path):
                    self._filesystem.unlink(path)
        if not any(path.parent == directory for path in keep):
            with contextlib.suppress(OSError):  # not empty is the usual case
                self._filesystem.remove_directory(directory)

    # --- parts -------------------------------------------------------------------------------

    def _make(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            aside = _unused(path.parent, f"{path.name}.set-aside")
            warn("set aside", path=str(path), reason="no directory", moved_to=str(aside))
            self._filesystem.rename(path, aside)
        if self._filesystem.make_directory(path):
            self._filesystem.sync_directory(path.parent)

    def _move(self, source: Path, target: Path, what: str) -> None:
        """Rename a directory. On return, no power cut can undo it."""
        faults.point(f"{what}.rename")
        self._filesystem.rename(source, target)
        faults.point(f"{what}.sync")
        self._filesystem.sync_directory(target.parent)
        self._filesystem.sync_directory(source.parent)


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn("not removed", path=str(path), reason=str(error))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _shards(directory: Path) -> list[Path]:
    """The shards that lie in `directory` itself, without links to other volumes."""
    return [path for path in _entries(directory) if is_shard(path.name) and not path.is_symlink()]


def _unused(directory: Path, name: str) -> Path:
    paths = (directory / f"{name}.{number}" for number in count(1))
    return next(path for path in paths if not path.exists())


def _walk(root: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(root):
        yield from (Path(directory, name) for name in names)


def _blocks(path: Path) -> int:
    """Space that a file takes, in bytes; 0 when it is gone."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
