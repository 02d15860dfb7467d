"""What the ranks of a save or a load agree on, without any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.restore_vote import Candidate, Candidates, Offer
from keepstep.dcp.session import Ballot, LoadStepBallot, choose_load_step, choose_save_epoch
from keepstep.errors import NothingCommonError, RestoreError, UsageError
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer

EPOCH = Epoch(EpochId(1, "0123abcd"))


def id_of(step: int) -> StepId:
    return StepId(EPOCH.id, step)


def ballot(*steps: int, step: int | None = None, failed: tuple[int, ...] = ()) -> LoadStepBallot:
    """Of a rank whose sidecar can bring these."""
    offers = tuple(Offer(id=id_of(step), tier=Tier.ARCHIVE, world=2) for step in steps)
    answer = TierAnswer.STEPS if steps else TierAnswer.NONE
    gone = frozenset(map(id_of, failed))
    return LoadStepBallot(vote=Candidates(answer=answer, offers=offers), step=step, failed=gone)


def test_the_newest_step_that_all_ranks_can_read_is_loaded() -> None:
    assert choose_load_step([ballot(1, 5, 7), ballot(1, 5), ballot(1, 5, 6)]) == id_of(5)


def test_a_step_that_one_rank_could_not_read_is_left_out_by_all() -> None:
    assert choose_load_step([ballot(1, 5), ballot(1, 5, failed=(5,))]) == id_of(1)


def test_a_load_by_step_number_never_falls_back_to_another_step() -> None:
    assert choose_load_step([ballot(1, 5, step=1), ballot(1, 5, step=1)]) == id_of(1)
    with pytest.raises(RestoreError, match="rank 1: no committed step 5 to load"):
        choose_load_step([ballot(1, 5, step=5), ballot(1, step=5)])
    with pytest.raises(UsageError, match="rank 1 for 5"):
        choose_load_step([ballot(1, 5, step=1), ballot(1, 5, step=5)])


def test_a_run_starts_fresh_only_if_no_rank_ever_committed_a_step() -> None:
    assert choose_load_step([ballot(), ballot()]) is None
    with pytest.raises(RestoreError, match=r"rank 1: no committed step .*another rank can bring"):
        choose_load_step([ballot(5), ballot()])


def test_unreadable_storage_is_an_error_and_not_a_fresh_start() -> None:
    unknown = Candidates(answer=TierAnswer.UNKNOWN, reason="/nvme0 is not mounted")
    with pytest.raises(RestoreError, match=r"rank 0.*/nvme0 is not mounted"):
        choose_load_step([replace(ballot(), vote=unknown), ballot()])


def test_a_load_without_access_to_the_shards_of_other_ranks_fails_and_names_the_fix() -> None:
    own = Candidate(id=id_of(3), tier=Tier.LOCAL, world=2)
    vote = Candidates(answer=TierAnswer.STEPS, candidates=(own,))
    with pytest.raises(NothingCommonError, match="by peers or by an archive"):
        choose_load_step([replace(ballot(), vote=vote), replace(ballot(), vote=vote)])


def test_a_requested_rollback_loads_exactly_that_step() -> None:
    back = replace(ballot(1, 5).vote, wanted="1", limit=id_of(1), exact=True)
    assert choose_load_step([replace(ballot(), vote=back), ballot(1, 5)]) == id_of(1)


@pytest.mark.parametrize(("worlds", "stays"), [((2, 2), True), ((1, 2), False), ((1,), True)])
def test_a_save_with_another_world_size_starts_a_new_epoch(
    worlds: tuple[int, ...], stays: bool
) -> None:
    ballots = [
        Ballot(step=9, epoch=EPOCH, world=world, loaded=None, highest_epoch=1) for world in worlds
    ]
    agreed = choose_save_epoch(ballots, nonce="89abcdef")
    assert all((agreement.epoch == EPOCH) is stays for agreement in agreed)
    assert [agreement.world for agreement in agreed] == [len(worlds)] * len(worlds)
