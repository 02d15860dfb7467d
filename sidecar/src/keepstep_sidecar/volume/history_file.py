"""`history.jsonl`: the history of the run on this machine, for later sidecars.

Each event is one line of JSON. The first line names the run and the history, and sums up older
events that are no longer in the file. Events are appended and never flushed, because only what
people are shown depends on them. So a power cut may take the end of the file. A line that is torn
or not an event is skipped. The file is replaced by the events known now when it reaches its size
limit, or when events were forgotten before they were written. The new file is written under another
name and then renamed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from keepstep.core.history import HistoryEvent, HistoryTotals
from keepstep.directory import OpenDirectory
from keepstep.errors import ForeignError, FormatError, ImageError, StorageError, VersionError
from keepstep.image import strictjson
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.volume.files import Filesystem, fault_point
from keepstep_sidecar.volume.run_tree import open_shard_file

FORMAT_VERSION: Final = 1
_LARGEST_BYTES: Final = 4 << 20
_LARGEST_HEAD: Final = 64 << 10
_LARGEST_LINE: Final = 4096
_LARGEST_NUMBER: Final = 1 << 53
_LARGEST_S: Final = 1e11
_AHEAD_S: Final = 86400.0
"""An event further in the future came from a wrong clock, or from something other than keepstep."""

_ID: Final = re.compile("[0-9a-f]{16}")
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """The first line. `id`: of this history, however often its file is replaced. `before`: sum of
    the events that came before those of this file."""

    format_version: int
    run: str
    id: str = ""
    before: HistoryTotals = dataclasses.field(default_factory=HistoryTotals)


_head, _event = msgspec.json.Decoder(_Head), msgspec.json.Decoder(HistoryEvent)


class HistoryFile:
    """Reads and appends the history. Blocking: a volume that hangs holds up only the thread that
    writes. Thread-safe. With `path` None, nothing is read or kept. After an error the next call
    tries again; an error is logged again only when it changes."""

    def __init__(self, path: Path | None, *, run: str) -> None:
        self.path = path
        """None when nothing is kept."""
        self._run = run
        self.id = secrets.token_hex(8)
        """The id of the history that `read` found; a new one if none was found."""
        self.written = 0
        """The number of the newest event in the file; -1: the next `append` replaces the file."""
        self._trouble = ""
        self._writing = threading.Lock()

    def read(self, *, now: float) -> tuple[list[HistoryEvent], HistoryTotals]:
        """The events of earlier sidecars, oldest first, and the sum of the events before them.
        Never raises. A file that cannot be read counts as empty and is replaced, unless a newer
        keepstep wrote it."""
        if self.path is None:
            return [], HistoryTotals()
        try:
            history_id, events, before = self._read(self.path, now)
        except FileNotFoundError:
            return [], HistoryTotals()
        except (ImageError, OSError) as error:
            warn("history.read_failed", path=str(self.path), error=str(error))
            if isinstance(error, VersionError):
                self.path = None
            else:
                self.written = -1
            return [], HistoryTotals()
        self.id, self.written = history_id, events[-1].sequence if events else 0
        return events, before

    def _read(self, path: Path, now: float) -> tuple[str, list[HistoryEvent], HistoryTotals]:
        with open_shard_file(path, Filesystem()) as fd:
            size = os.fstat(fd).st_size
            head = self._checked(os.pread(fd, _LARGEST_HEAD, 0).partition(b"\n")[0])
            data = os.pread(fd, _LARGEST_BYTES, max(0, size - _LARGEST_BYTES))
        events: list[HistoryEvent] = []
        for line in data.splitlines()[1:]:  # the first line is the head, or cut off
            if (event := _parse(line)) is None or event.until > now + _AHEAD_S:
                continue
            if not events or event.sequence > events[-1].sequence:
                events.append(event)
        sane = head.before.is_sane and head.before.mark <= now + _AHEAD_S
        return head.id, events, head.before if sane else HistoryTotals()

    def _checked(self, line: bytes) -> _Head:
        try:
            head = _head.decode(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"not a history: {error}") from None
        if head.format_version > FORMAT_VERSION:
            raise VersionError(f"a history of format {head.format_version}, by a newer keepstep")
        if not _ID.fullmatch(head.id):
            raise FormatError(f"not a history: its id is {strictjson.quote_text(head.id)}")
        if head.run != self._run:
            raise ForeignError(f"belongs to run {head.run[:80]!r}, not {self._run!r}")
        return head

    def append(self, events: Sequence[HistoryEvent], before: HistoryTotals) -> None:
        """Append those of `events` that are not in the file yet. `events`: all that are known.
        `before`: the sum of the events that came before them. Never raises."""
        with self._writing:
            if self.path is None or not events or events[-1].sequence <= self.written:
                return
            try:
                self._append(self.path, events, before)
            except (OSError, StorageError) as error:
                if str(error) != self._trouble:
                    warn("history.write_failed", path=str(self.path), error=str(error))
                self._trouble = str(error)
            else:
                self._trouble, self.written = "", events[-1].sequence

    def _append(self, path: Path, events: Sequence[HistoryEvent], before: HistoryTotals) -> None:
        fault_point("history.write")
        forgotten = events[0].sequence - 1 - self.written
        directory = OpenDirectory.open_path(path.parent)
        if self.written >= 0 and forgotten > 0:  # the head of a new file must sum them up
            info("history.shortened", path=str(path), events_removed=forgotten)
        elif self.written >= 0 and 0 < _plain_bytes(directory, path.name) < _LARGEST_BYTES:
            # Start with a newline, in case the last line is torn.
            news = (event for event in events if event.sequence > self.written)
            _write(directory, path.name, b"\n" + _lines(news))
            return
        head = _Head(format_version=FORMAT_VERSION, run=self._run, id=self.id, before=before)
        directory.write(path.name, msgspec.json.encode(head) + b"\n" + _lines(events))


def _plain_bytes(directory: OpenDirectory, name: str) -> int:
    """Size of the file; 0 if there is none, or it is a link or has several names. Such a file is
    replaced, and never written to."""
    found = directory.lstat(name)
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        return 0
    return found.st_size


def _write(directory: OpenDirectory, name: str, data: bytes) -> None:
    fd = directory.open_file(name, _FLAGS)
    try:
        if os.write(fd, data) != len(data):
            raise StorageError(f"{directory.path / name}: the volume is full")
    finally:
        os.close(fd)


def _parse(line: bytes) -> HistoryEvent | None:
    if not line or len(line) > _LARGEST_LINE:
        return None
    try:
        event = _event.decode(line)
    except (ValueError, RecursionError):
        return None
    return event if _is_sane(event) else None


def _is_sane(event: HistoryEvent) -> bool:
    """Whether the sum of such events stays within bounds."""
    counts = [
        number
        for number in (event.count, event.first, event.number, event.rank)
        if number is not None
    ]
    seconds = [event.seconds, *(dataclasses.astuple(event.restart) if event.restart else ())]
    return (
        0 < event.sequence < _LARGEST_NUMBER
        and 0.0 <= event.at <= event.until
        and all(0 <= count < _LARGEST_NUMBER for count in counts)
        and all(0.0 <= second < _LARGEST_S for second in seconds)
    )


_DEFAULTS: Final = {
    field.name: field.default
    for field in dataclasses.fields(HistoryEvent)
    if field.default is not dataclasses.MISSING
}


def _lines(events: Iterable[HistoryEvent]) -> bytes:
    """A line for each event, with the fields that differ from their defaults."""
    lines = []
    for event in events:
        values = {
            field.name: getattr(event, field.name) for field in dataclasses.fields(HistoryEvent)
        }
        written = {
            key: value for key, value in values.items() if _DEFAULTS.get(key, values) != value
        }
        lines.append(msgspec.json.encode(written) + b"\n")
    return b"".join(lines)
