"""What a fork means: from which step of the other run it begins, and which epochs are kin."""

from __future__ import annotations

import pytest

from keepstep.core.ledger import EpochStarted, Ledger
from keepstep.errors import UsageError
from keepstep.steps import Epoch, EpochId, StepId
from keepstep_sidecar.config.sidecar import Fork, parse_restore_from
from keepstep_sidecar.tiers.archive.index import epoch_families
from keepstep_sidecar.volume.run_record import RunRecord

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
def test_restore_from_parses_a_run_and_a_step(text: str, fork: Fork) -> None:
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
def test_restore_from_refuses_any_other_text(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_restore_from(text)


def test_a_fork_by_number_selects_the_current_step_and_by_id_exactly_that_step() -> None:
    assert parse_restore_from("a/100").filter_matching_steps(ARCHIVED, ALIVE, ()) == [NEW]
    assert parse_restore_from(f"a/{DEAD}").filter_matching_steps(ARCHIVED, ALIVE, ()) == [DEAD]
    assert parse_restore_from("a/7").filter_matching_steps(ARCHIVED, ALIVE, ()) == []
    assert parse_restore_from("a/latest").filter_matching_steps(ARCHIVED, ALIVE, ()) == ALIVE


def test_a_run_that_has_begun_from_one_step_begins_from_no_other() -> None:
    began = [Epoch(OWN, OLD, "a")]
    assert parse_restore_from("a/latest").filter_matching_steps(ARCHIVED, ALIVE, began) == [OLD]
    assert parse_restore_from("b/latest").filter_matching_steps(ARCHIVED, ALIVE, began) == ALIVE


def test_forks_of_one_step_belong_to_different_families_and_restarts_to_the_same() -> None:
    epoch, other = Epoch(OWN, OLD, "a"), Epoch(EpochId(3, "44444444"), OLD, "a")
    assert len(epoch_families([[epoch], [other]])) == 2
    restarts = [Epoch(OWN, OLD), Epoch(EpochId(3, "44444444"), OLD)]
    assert len(epoch_families([restarts[:1], restarts[1:]])) == 1


def test_the_origin_of_a_fork_is_stored_and_never_overwritten() -> None:
    epoch, seen = Epoch(OWN, OLD, "a"), Epoch(OWN, OLD)
    record = RunRecord(run="b").with_added_epochs(epoch)
    assert RunRecord.from_json(record.to_json(), path="run.json") == record  # type: ignore[arg-type]
    ledger = Ledger()
    for seen_epoch in (seen, epoch, seen):
        ledger.apply(EpochStarted(seen_epoch))
    assert ledger.epochs == (epoch,)
