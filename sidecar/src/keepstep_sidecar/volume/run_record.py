"""`run.json`: what shards do not tell, above all the run's epochs and their parents.

It also records the steps at which the script failed by itself. In a run that spans several pods, it
records the last step known to be committed and the pinned steps, because the shards of one pod do
not tell these.

The file is replaced as a whole (`files.DurableFile`): after a power cut there is either the old
or the new file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.errors import ForeignError, FormatError, VersionError
from keepstep.image import strictjson
from keepstep.steps import Epoch, EpochId, StepId, merge_epochs
from keepstep_sidecar.volume.files import Filesystem, replace_file
from keepstep_sidecar.volume.run_tree import open_shard_file

FORMAT_VERSION = 1
_SIZE_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The run's name and its epochs, oldest first.

    `committed`: the last commit that this machine was told of, None for none. `pinned`: the steps
    that must not be deleted. `failures`: steps at which the script failed by itself. `asked`: the
    step that the script itself asked for, in the newest epoch that this record has. `strangers`:
    epochs in the archive that another run of this name began while this one trained.
    """

    run: str
    epochs: tuple[Epoch, ...] = ()
    committed: StepId | None = None
    pinned: frozenset[StepId] = frozenset()
    failures: frozenset[StepId] = frozenset()
    asked: StepId | None = None
    strangers: frozenset[EpochId] = frozenset()

    @classmethod
    def union(cls, records: Sequence[RunRecord]) -> RunRecord:
        """What several volumes of a run have on record, taken together. What the script asked for
        is told by the one that knows the newest epoch."""
        began = [record for record in records if record.epochs]
        newest = max(began, key=lambda record: record.epochs[-1].id, default=None)
        return cls(
            run=records[0].run,
            epochs=merge_epochs(epoch for record in records for epoch in record.epochs),
            committed=max(
                (record.committed for record in records if record.committed), default=None
            ),
            pinned=frozenset().union(*(record.pinned for record in records)),
            failures=frozenset().union(*(record.failures for record in records)),
            asked=None if newest is None else newest.asked,
            strangers=frozenset().union(*(record.strangers for record in records)),
        )

    def with_added_epochs(self, *epochs: Epoch) -> RunRecord:
        """This record with `epochs` added; the same object when all of them are already known."""
        known = merge_epochs((*self.epochs, *epochs))
        return self if known == self.epochs else replace(self, epochs=known)

    def to_json(self) -> bytes:
        """The content of `run.json`."""
        record = {
            "format_version": FORMAT_VERSION,
            "run": self.run,
            "committed": None if self.committed is None else str(self.committed),
            **({"pinned": sorted(map(str, self.pinned))} if self.pinned else {}),
            **({"failures": sorted(map(str, self.failures))} if self.failures else {}),
            **({"asked": str(self.asked)} if self.asked is not None else {}),
            **({"strangers": sorted(map(str, self.strangers))} if self.strangers else {}),
            "epochs": [epoch_json(epoch) for epoch in self.epochs],
        }
        return json.dumps(record, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, path: Path) -> RunRecord:
        """Inverse of `to_json`. Raises FormatError or VersionError, which name `path`."""
        try:
            return _read(strictjson.Reader(data, what="run.json"))
        except VersionError as error:
            raise VersionError(error.reason, path=path) from None
        except FormatError as error:
            hint = "delete it if the epochs in the shards are enough"
            raise FormatError(f"not a run record ({error.reason}); {hint}", path=path) from None


def _read(reader: strictjson.Reader) -> RunRecord:
    fields: dict[str, Any] = {}
    for key in reader.iterate_keys():
        if key == "epochs":
            fields[key] = tuple(parse_epoch(reader.value()) for _ in reader.iter_item_indices())
        elif key in ("pinned", "failures"):
            fields[key] = frozenset(read_step(reader.value()) for _ in reader.iter_item_indices())
        elif key == "strangers":
            fields[key] = frozenset(_epoch_id(reader.value()) for _ in reader.iter_item_indices())
        else:
            value = reader.value()
            if key == "format_version":
                strictjson.check_newest_version(value, FORMAT_VERSION)
            if key in ("format_version", "run", "committed", "asked"):
                fields[key] = value
    reader.end()
    if missing := {"format_version", "run", "epochs"} - fields.keys():
        raise FormatError(f"without {' and '.join(sorted(missing))}")
    committed, asked = fields.get("committed"), fields.get("asked")
    return RunRecord(
        run=strictjson.as_text(fields["run"], "run"),
        epochs=fields["epochs"],
        committed=None if committed is None else read_step(committed),
        pinned=fields.get("pinned", frozenset()),
        failures=fields.get("failures", frozenset()),
        asked=None if asked is None else read_step(asked),
        strangers=fields.get("strangers", frozenset()),
    )


def epoch_json(epoch: Epoch) -> dict[str, str | None]:
    """An epoch as a mapping, to be written as JSON."""
    parent = None if epoch.parent is None else str(epoch.parent)
    return {
        "id": str(epoch.id),
        "parent": parent,
        **({"origin": epoch.origin} if epoch.origin else {}),
    }


def parse_epoch(value: object) -> Epoch:
    """Inverse of `epoch_json`. Raises FormatError."""
    epoch = strictjson.as_mapping(value, "epoch")
    parent, epoch_id = epoch.get("parent"), _epoch_id(epoch.get("id"))
    origin = strictjson.as_text(epoch.get("origin", ""), "the origin of an epoch")
    return Epoch(epoch_id, None if parent is None else read_step(parent), origin)


def _epoch_id(value: object) -> EpochId:
    try:
        return EpochId.parse(strictjson.as_text(value, "the id of an epoch"))
    except ValueError as error:
        raise FormatError(strictjson.error_text(error)) from None


def read_step(value: object) -> StepId:
    """A step from parsed JSON. Raises FormatError."""
    try:
        return StepId.parse(strictjson.as_text(value, "a step"))
    except ValueError as error:
        raise FormatError(strictjson.error_text(error)) from None


def load_run_record(path: Path, *, run: str) -> RunRecord:
    """Read `path`; an empty record when there is no file.

    Raises FormatError, VersionError, OSError, or ForeignError when the record is another run's.
    """
    try:
        with open_shard_file(path, Filesystem()) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read(_SIZE_LIMIT_BYTES)
    except FileNotFoundError:
        return RunRecord(run=run)
    record = RunRecord.from_json(data, path=path)
    if record.run != run:
        raise ForeignError(f"belongs to run {record.run!r}, not {run!r}", path=path)
    return record


def save_run_record(path: Path, record: RunRecord, *, filesystem: Filesystem) -> None:
    """Replace `path` by `record`, durably. Raises OSError; if that happens before the rename,
    `path` is as it was."""
    with replace_file(path, filesystem=filesystem, phase="record") as file:
        file.write(memoryview(record.to_json()), 0)
        file.flush()
        file.give_name()
