"""A user wants to go back to a step: all ranks restore the same one, or no rank goes on."""

from __future__ import annotations

import pytest

from keepstep.core.vote import Candidate, Candidates, choose_step, nothing_is_kept, vote_limit
from keepstep.errors import RestoreError
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep_sidecar.commit.lineage import Rollback
from keepstep_sidecar.config.sidecar import RollbackRequest, parse_restore_from

FIRST, SECOND = EpochId(1, "0000000a"), EpochId(2, "0000000b")


def step(number: int, epoch: EpochId = FIRST) -> StepId:
    return StepId(epoch, number)


def vote(*numbers: int, **fields: object) -> Candidates:
    held = tuple(Candidate(id=step(number), tier=Tier.LOCAL, world=2) for number in numbers)
    return Candidates(answer=Answer.STEPS, candidates=held, highest_epoch=1, **fields)  # type: ignore[arg-type]


def request(number: int) -> dict[str, object]:
    return {"wanted": str(step(number)), "limit": step(number), "exact": True}


def test_what_one_vote_names_all_ranks_restore() -> None:
    votes = [vote(3, 4, 5), vote(3, 4, 5, **request(3))]
    limit, exact = vote_limit(votes)
    decision = choose_step(votes, limit=limit, exact=exact)
    assert (decision.id, decision.epoch_number) == (step(3), 2)


def test_two_different_steps_are_refused() -> None:
    with pytest.raises(RestoreError, match="different steps"):
        vote_limit([vote(3, 4, **request(3)), vote(3, 4, **request(4))])


def test_a_step_that_nobody_knows_is_refused_with_what_there_is() -> None:
    with pytest.raises(RestoreError, match=r"going back to step 7 .*000000004"):
        vote_limit([vote(3, 4, wanted="7", exact=True), vote(3, 4)])
    with pytest.raises(RestoreError, match=r"going back to step 7 .*000000004"):
        vote_limit([vote(3, 4), vote(3, 4)], 7)


def test_without_a_wish_the_newest_step_wins() -> None:
    assert vote_limit([vote(3), vote(3)]) == (None, False)


# --- when a wish is fulfilled --------------------------------------------------------------------


def test_a_wish_is_done_with_once_an_epoch_began_from_its_step() -> None:
    epochs = [Epoch(FIRST, None)]
    rollback = Rollback(parse_restore_from("3", since=1), lambda: epochs)
    assert rollback.names(step(3))
    assert not rollback.names(step(4))
    epochs.append(Epoch(SECOND, step(3)))
    assert rollback.request is None
    assert not rollback.names(step(3))


def test_an_earlier_epoch_from_the_same_step_does_not_count() -> None:
    epochs = [Epoch(FIRST, None), Epoch(SECOND, step(3))]
    rollback = Rollback(parse_restore_from("3", since=2), lambda: epochs)
    assert rollback.request == RollbackRequest(number=3, since=2)


def test_a_number_means_its_newest_whole_step() -> None:
    rollback = Rollback(parse_restore_from("3"), tuple)
    held = [step(3), step(3, SECOND), step(4)]
    assert rollback.resolve([step(3)], held) == step(3)
    assert rollback.resolve([], held) == step(3, SECOND)
    assert rollback.resolve([], [step(4)]) is None


@pytest.mark.parametrize(
    ("ballot", "nothing"),
    [
        (Candidates(answer=Answer.NONE), True),
        (Candidates(answer=Answer.NONE, highest_epoch=1), True),
        (Candidates(answer=Answer.UNKNOWN, reason="it is being scanned"), False),
        (vote(3), False),
        (Candidates(answer=Answer.NONE, wanted="7"), False),
        (Candidates(answer=Answer.NONE, limit=step(9)), False),
    ],
)
def test_nothing_is_kept_where_all_could_look_and_nobody_wants_to_go_back(
    ballot: Candidates, nothing: bool
) -> None:
    assert nothing_is_kept([Candidates(answer=Answer.NONE), ballot]) is nothing


def test_a_script_may_ask_for_a_number_and_gets_the_newest_step_of_it_that_all_ranks_see() -> None:
    again = (Candidate(id=step(3, SECOND), tier=Tier.LOCAL, world=2),)
    ballot = vote(3, 4)
    other = Candidates(
        answer=Answer.STEPS, candidates=(*ballot.candidates, *again), highest_epoch=2
    )
    assert vote_limit([ballot, other], 3) == (step(3), True)
    assert vote_limit([other, other], 3) == (step(3, SECOND), True)


def test_a_number_that_only_one_rank_sees_is_refused_by_its_id() -> None:
    votes = [vote(2, 3, 4), vote(2, 4)]  # and no older one instead
    limit, exact = vote_limit(votes, 3)
    with pytest.raises(RestoreError, match=rf"{step(3)} was asked for, but not every rank"):
        choose_step(votes, limit=limit, exact=exact)


def test_what_a_person_asks_for_counts_before_what_the_script_does() -> None:
    assert vote_limit([vote(3, 4, **request(3)), vote(3, 4)], 4) == (step(3), True)
