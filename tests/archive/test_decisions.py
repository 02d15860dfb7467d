"""What an archive decides without looking at a network: expiry, kinship, records."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.retention import Retention
from keepstep.core.shard import Shard
from keepstep.errors import FormatError, TornError, UsageError, VersionError
from keepstep.steps import Epoch, EpochId, StepId, make_base_file_name, shard_name
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.index import (
    ABANDONED_S,
    ArchiveContents,
    ArchivedStep,
    epoch_families,
    expired_steps,
    names_to_delete,
)
from keepstep_sidecar.tiers.archive.step_record import StepRecord
from keepstep_sidecar.tiers.archive.store import StoredObject

FIRST = Epoch(EpochId(1, "aaaaaaaa"))
NOW = 1e9


def at(step: int, epoch: Epoch = FIRST) -> StepId:
    return StepId(epoch.id, step)


# --- expiry --------------------------------------------------------------------------------------


def complete(
    step_id: StepId, *, epochs: tuple[Epoch, ...] = (FIRST,), at_s: float = NOW
) -> ArchivedStep:
    record = StepRecord(
        run="gpt",
        id=step_id,
        world=1,
        epochs=epochs,
        shards=(Shard(step_id=step_id, rank=0, world=1, size_bytes=9, root="r"),),
        written_at=at_s,
    )
    return ArchivedStep(id=step_id, files=files(shard_name(0, 1), "step.json"), record=record)


def files(*names: str, age_s: float = 2 * ABANDONED_S) -> dict[str, StoredObject]:
    return {
        name: StoredObject(name=name, bytes=9, modified_at=NOW - age_s, etag="") for name in names
    }


def gone(
    steps: Collection[ArchivedStep], policy: Retention, pinned: Collection[StepId] = ()
) -> list[StepId]:
    survey = ArchiveContents(steps=tuple(sorted(steps, key=lambda step: step.id)))
    policy = replace(policy, pinned=frozenset(pinned))
    return [step.id for step in expired_steps(survey, policy, epochs=(), now=NOW)]


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.sets(st.integers(1, 60)),
)
def test_the_newest_step_and_pinned_steps_are_kept_under_every_policy(
    steps: set[int], last: int, every: int | None, pins: set[int]
) -> None:
    pinned = {at(step) for step in pins}
    doomed = gone([complete(at(s)) for s in steps], Retention(last=last, every_steps=every), pinned)
    assert at(max(steps)) not in doomed
    assert not pinned & set(doomed)
    kept = {at(step) for step in steps} - set(doomed)
    assert len(kept) >= min(last, len(steps))
    assert doomed == sorted(doomed)


def test_the_first_step_of_every_six_hours_is_kept() -> None:
    hours = [0, 1, 5, 6, 7, 12]
    steps = [complete(at(hour), at_s=hour * 3600.0) for hour in hours]
    assert [step_id.step for step_id in gone(steps, Retention(last=1, every_s=6 * 3600.0))] == [
        1,
        5,
        7,
    ]


def test_steps_of_an_unknown_epoch_are_never_deleted() -> None:
    """An epoch that nobody recorded separates the old steps from the new ones."""
    lost = Epoch(EpochId(5, "eeeeeeee"), StepId(EpochId(4, "dddddddd"), 7))
    steps = [complete(at(1)), complete(at(2)), complete(at(9, lost), epochs=(lost,))]
    assert gone(steps, Retention(last=1)) == []


def test_a_damaged_step_is_never_deleted_automatically() -> None:
    broken = ArchivedStep(id=at(1), files=files("step.json"), fault="damaged")
    assert gone([broken, complete(at(2)), complete(at(3))], Retention(last=1)) == [at(2)]


def test_a_recently_linked_base_does_not_delay_the_deletion_of_a_partial_step() -> None:
    base = files(make_base_file_name(0, 1), age_s=0.0)
    for more, goes in ((files(shard_name(0, 1)), [at(1)]), ({}, [])):
        left = ArchivedStep(id=at(1), files={**base, **more})
        assert gone([left, complete(at(2))], Retention(last=1)) == goes


@pytest.mark.parametrize(("age_s", "goes"), [(ABANDONED_S + 1, True), (ABANDONED_S - 1, False)])
def test_a_partly_uploaded_step_is_deleted_once_its_upload_has_stalled(
    age_s: float, goes: bool
) -> None:
    part = ArchivedStep(id=at(1), files=files(shard_name(0, 2), age_s=age_s))
    assert gone([part, complete(at(2))], Retention()) == ([at(1)] if goes else [])
    newest = ArchivedStep(id=at(3), files=files(shard_name(0, 2), age_s=age_s))
    assert gone([complete(at(2)), newest], Retention()) == []


def test_the_record_is_deleted_first_and_foreign_files_are_never_deleted() -> None:
    step = ArchivedStep(id=at(1), files=files(shard_name(0, 1), "step.json", "notes.txt"))
    names = names_to_delete(step, "gpt")
    assert [Path(name).name for name in names] == ["step.json", shard_name(0, 1)]


# --- kinship -------------------------------------------------------------------------------------


def test_epochs_belong_to_one_family_through_a_parent_or_a_common_record() -> None:
    child = Epoch(EpochId(2, "bbbbbbbb"), at(5))
    fresh = Epoch(EpochId(3, "cccccccc"))  # began anew, knowingly, beside the others
    stranger = Epoch(EpochId(1, "99999999"))
    assert len(epoch_families([[FIRST], [child], [child, fresh]])) == 1
    assert epoch_families([[FIRST], [stranger], [child]]) == [
        {stranger.id},
        {FIRST.id, child.id},
    ]
    assert epoch_families([[], [FIRST]]) == [{FIRST.id}]


# --- records and settings ------------------------------------------------------------------------


def test_a_step_record_survives_a_json_round_trip() -> None:
    record = complete(at(7), epochs=(FIRST, Epoch(EpochId(2, "bbbbbbbb"), at(5)))).record
    assert record is not None
    assert StepRecord.from_json(record.to_json(), path="there") == record


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"world": 2}, TornError),
        ({"format_version": 99}, VersionError),
        ({"shards": None}, TornError),
        ({"seal": 5}, TornError),
    ],
)
def test_a_record_that_was_changed_is_refused(change: dict[str, Any], error: type) -> None:
    record = complete(at(7)).record
    assert record is not None
    body = {**json.loads(record.to_json()), **change}
    with pytest.raises(error, match="there"):
        StepRecord.from_json(json.dumps(body).encode(), path="there")


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_as_a_step_record(noise: bytes) -> None:
    with pytest.raises(FormatError):
        StepRecord.from_json(noise, path="there")


@pytest.mark.parametrize(
    ("url", "message"),
    [("ftp://host/x", "not one of"), ("s3:///x", "no bucket"), ("file://x/y", "file:///mnt")],
)
def test_an_invalid_archive_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ArchiveConfig(url=url)


def test_the_archive_interval_is_rounded_up_to_a_multiple_of_the_persist_interval() -> None:
    config = ArchiveConfig(url="s3://b/x/y", every=10)
    assert (config.bucket, config.prefix, config.step_interval(4)) == ("b", "x/y", 12)
