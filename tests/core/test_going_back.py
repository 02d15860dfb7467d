"""A user wants to go back to a step: all ranks restore the same one, or no rank goes on."""

from __future__ import annotations

import pytest

from keepstep.core.restore_vote import (
    Candidate,
    Candidates,
    choose_step,
    find_step_limit,
    nothing_is_kept,
)
from keepstep.errors import RestoreError
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep_sidecar.commit.lineage import Rollback
from keepstep_sidecar.config.sidecar import RollbackRequest, parse_restore_from

FIRST, SECOND = EpochId(1, "0000000a"), EpochId(2, "0000000b")


def step(number: int, epoch: EpochId = FIRST) -> StepId:
    return StepId(epoch, number)


def vote(*numbers: int, **fields: object) -> Candidates:
    held = tuple(Candidate(id=step(number), tier=Tier.LOCAL, world=2) for number in numbers)
    return Candidates(answer=TierAnswer.STEPS, candidates=held, highest_epoch=1, **fields)  # type: ignore[arg-type]


def request(number: int) -> dict[str, object]:
    return {"wanted": str(step(number)), "limit": step(number), "exact": True}


def test_all_ranks_restore_the_rollback_step_that_one_rank_requests() -> None:
    votes = [vote(3, 4, 5), vote(3, 4, 5, **request(3))]
    limit, exact = find_step_limit(votes)
    decision = choose_step(votes, limit=limit, exact=exact)
    assert (decision.id, decision.epoch_number) == (step(3), 2)


def test_requests_for_two_different_rollback_steps_are_refused() -> None:
    with pytest.raises(RestoreError, match="different steps"):
        find_step_limit([vote(3, 4, **request(3)), vote(3, 4, **request(4))])


def test_a_rollback_to_an_unknown_step_is_refused_with_the_available_steps() -> None:
    with pytest.raises(RestoreError, match=r"going back to step 7 .*000000004"):
        find_step_limit([vote(3, 4, wanted="7", exact=True), vote(3, 4)])
    with pytest.raises(RestoreError, match=r"going back to step 7 .*000000004"):
        find_step_limit([vote(3, 4), vote(3, 4)], 7)


def test_the_newest_step_is_restored_without_a_rollback_request() -> None:
    assert find_step_limit([vote(3), vote(3)]) == (None, False)


# --- when a wish is fulfilled --------------------------------------------------------------------


def test_a_rollback_request_ends_once_an_epoch_has_started_from_its_step() -> None:
    epochs = [Epoch(FIRST, None)]
    rollback = Rollback(parse_restore_from("3", since=1), lambda: epochs)
    assert rollback.names(step(3))
    assert not rollback.names(step(4))
    epochs.append(Epoch(SECOND, step(3)))
    assert rollback.request is None
    assert not rollback.names(step(3))


def test_an_earlier_epoch_from_the_same_step_does_not_end_a_rollback_request() -> None:
    epochs = [Epoch(FIRST, None), Epoch(SECOND, step(3))]
    rollback = Rollback(parse_restore_from("3", since=2), lambda: epochs)
    assert rollback.request == RollbackRequest(number=3, since=2)


def test_a_rollback_by_number_selects_the_newest_complete_step_with_that_number() -> None:
    rollback = Rollback(parse_restore_from("3"), tuple)
    held = [step(3), step(3, SECOND), step(4)]
    assert rollback.resolve([step(3)], held) == step(3)
    assert rollback.resolve([], held) == step(3, SECOND)
    assert rollback.resolve([], [step(4)]) is None


@pytest.mark.parametrize(
    ("ballot", "nothing"),
    [
        (Candidates(answer=TierAnswer.NONE), True),
        (Candidates(answer=TierAnswer.NONE, highest_epoch=1), True),
        (Candidates(answer=TierAnswer.UNKNOWN, reason="it is being scanned"), False),
        (vote(3), False),
        (Candidates(answer=TierAnswer.NONE, wanted="7"), False),
        (Candidates(answer=TierAnswer.NONE, limit=step(9)), False),
    ],
)
def test_a_run_counts_as_empty_only_if_every_rank_could_scan_and_none_requests_a_rollback(
    ballot: Candidates, nothing: bool
) -> None:
    assert nothing_is_kept([Candidates(answer=TierAnswer.NONE), ballot]) is nothing


def test_a_rollback_by_a_script_selects_the_newest_step_of_that_number_that_all_ranks_hold() -> (
    None
):
    again = (Candidate(id=step(3, SECOND), tier=Tier.LOCAL, world=2),)
    ballot = vote(3, 4)
    other = Candidates(
        answer=TierAnswer.STEPS, candidates=(*ballot.candidates, *again), highest_epoch=2
    )
    assert find_step_limit([ballot, other], 3) == (step(3), True)
    assert find_step_limit([other, other], 3) == (step(3, SECOND), True)


def test_a_rollback_to_a_step_that_only_one_rank_holds_is_refused_with_its_id() -> None:
    votes = [vote(2, 3, 4), vote(2, 4)]  # and no older one instead
    limit, exact = find_step_limit(votes, 3)
    with pytest.raises(RestoreError, match=rf"{step(3)} was asked for, but not every rank"):
        choose_step(votes, limit=limit, exact=exact)


def test_a_rollback_request_of_a_user_takes_precedence_over_the_script() -> None:
    assert find_step_limit([vote(3, 4, **request(3)), vote(3, 4)], 4) == (step(3), True)
