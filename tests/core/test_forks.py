"""What a fork means: from which step of the other run it begins, and which epochs are kin."""

from __future__ import annotations

import pytest

from keepstep.core.ledger import EpochStarted, Ledger
from keepstep.errors import UsageError
from keepstep.steps import Epoch, EpochId, StepId
from keepstep_sidecar.config.sidecar import Fork, parse_restore_from
from keepstep_sidecar.tiers.archive.index import epoch_families
from keepstep_sidecar.volume.run_file import RunRecord

FIRST, SECOND, OWN = EpochId(1, "11111111"), EpochId(2, "22222222"), EpochId(3, "33333333")
OLD, DEAD, NEW = StepId(FIRST, 50), StepId(FIRST, 100), StepId(SECOND, 100)
ARCHIVED, ALIVE = [OLD, DEAD, NEW], [OLD, NEW]


@pytest.mark.parametrize(
    ("text", "fork"),
    [
        ("gpt/1200", Fork(run="gpt", number=1200)),
        ("gpt.v2_a-b/latest", Fork(run="gpt.v2_a-b")),
        (f"gpt/{NEW}", Fork(run="gpt", id=NEW)),
    ],
)
def test_a_fork_names_a_run_and_a_step(text: str, fork: Fork) -> None:
    assert parse_restore_from(text) == fork
    assert str(fork) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("team/gpt/1200", "cannot name a run"),
        ("../1200", "cannot name a run"),
        ("/1200", "cannot name a run"),
        ("gpt/", "RUN/STEP of another run"),
        ("gpt/-1", "RUN/STEP of another run"),
        ("gpt/newest", "RUN/STEP of another run"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_restore_from(text)


def test_a_number_means_the_living_step_and_an_id_that_very_one() -> None:
    assert parse_restore_from("a/100").chosen(ARCHIVED, ALIVE, ()) == [NEW]
    assert parse_restore_from(f"a/{DEAD}").chosen(ARCHIVED, ALIVE, ()) == [DEAD]
    assert parse_restore_from("a/7").chosen(ARCHIVED, ALIVE, ()) == []
    assert parse_restore_from("a/latest").chosen(ARCHIVED, ALIVE, ()) == ALIVE


def test_a_run_that_has_begun_from_one_step_begins_from_no_other() -> None:
    began = [Epoch(OWN, OLD, "a")]
    assert parse_restore_from("a/latest").chosen(ARCHIVED, ALIVE, began) == [OLD]
    assert parse_restore_from("b/latest").chosen(ARCHIVED, ALIVE, began) == ALIVE


def test_forks_of_one_step_are_no_kin_but_restarts_are() -> None:
    epoch, other = Epoch(OWN, OLD, "a"), Epoch(EpochId(3, "44444444"), OLD, "a")
    assert len(epoch_families([[epoch], [other]])) == 2
    restarts = [Epoch(OWN, OLD), Epoch(EpochId(3, "44444444"), OLD)]
    assert len(epoch_families([restarts[:1], restarts[1:]])) == 1


def test_the_origin_is_on_record_and_stays_there() -> None:
    epoch, seen = Epoch(OWN, OLD, "a"), Epoch(OWN, OLD)
    record = RunRecord(run="b").with_epochs(epoch)
    assert RunRecord.from_json(record.to_json(), path="run.json") == record  # type: ignore[arg-type]
    ledger = Ledger()
    for seen_epoch in (seen, epoch, seen):
        ledger.apply(EpochStarted(seen_epoch))
    assert ledger.epochs == (epoch,)
