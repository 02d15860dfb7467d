"""What `ReportedCopies` remembers of all copies of a step equals what a look at each copy finds."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.commit_rule import (
    RankBitmapUnion,
    RankReport,
    ReportedCopies,
    ReportedTier,
    StepImagesAtPlace,
    combine_rank_reports,
    each_rank,
)
from keepstep.core.ledger import Event, Ledger, LedgerConfig, Reported, ReportedHoldingsLost
from keepstep.core.shard import Shard
from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, StepId, Tier

_EPOCH = EpochId(1, "aaaaaaaa")
_IMAGES = st.lists(
    st.tuples(
        st.integers(1, 2), st.sampled_from([None, "a", "a", "b"]), st.sampled_from([4, 4, 5])
    ),
    max_size=3,
)
_REPORTS = st.dictionaries(
    st.integers(0, 3), st.dictionaries(st.sampled_from(Tier), _IMAGES, max_size=3), max_size=3
)
_CHANGES = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(_REPORTS, st.none(), st.integers(0, 3))), max_size=12
)


def reported(rank: int, tiers: Mapping[Tier, list[tuple[int, str | None, int]]]) -> RankReport:
    return {
        tier: ReportedTier.from_shards(
            tuple(
                Shard(step_id=StepId(_EPOCH, step), rank=rank, world=world, root=root)
                for step, root, world in images
            )
        )
        for tier, images in tiers.items()
    }


def check(copies: ReportedCopies, step_id: StepId) -> None:
    there = copies.copies(step_id)
    assert copies.worlds(step_id) == {held.place[2] for held in there}
    for tier in NEAREST_FIRST:
        ranks = [held.ranks for held in there if held.place[1] is tier]
        assert copies.compute_rank_mask_on_tier(step_id, tier) == sum(
            {1 << at for rank in ranks for at in each_rank(rank)}
        )
    roots = [
        (rank, held.get_image_digest_number(rank))
        for held in there
        for rank in each_rank(held.ranks)
        if held.get_image_digest_number(rank)
    ]
    differ = {rank for rank, root in roots for other, its in roots if rank == other and root != its}
    doubled = {rank for held in there for rank in each_rank(held.doubled)}
    assert copies.find_conflicting_ranks(step_id) == sorted(differ | doubled)


@given(changes=_CHANGES)
def test_completeness_matches_a_reference_model_after_any_reports_and_losses(
    changes: list[tuple[int, object]],
) -> None:
    copies = ReportedCopies()
    for node, change in changes:
        if isinstance(change, dict):
            reports = {rank: reported(rank, tiers) for rank, tiers in change.items()}
            copies.replace(node, combine_rank_reports(reports))
        else:
            copies.forget_reports(node_rank=node, rank=change)  # type: ignore[arg-type]
        for step_id in copies.held_steps:
            check(copies, step_id)


@given(changes=st.lists(st.tuples(st.integers(0, 1), _REPORTS), max_size=8))
def test_reports_of_several_ranks_together_equal_reports_of_single_ranks(
    changes: list[tuple[int, dict[int, dict[Tier, list[tuple[int, str | None, int]]]]]],
) -> None:
    completeness, all_at_once = ReportedCopies(), ReportedCopies()
    for node, change in changes:
        reports = {rank: reported(rank, tiers) for rank, tiers in change.items()}
        all_at_once.replace(node, combine_rank_reports(reports))
        completeness.replace(
            node, [each for rank in reports for each in combine_rank_reports({rank: reports[rank]})]
        )
        assert completeness.held_steps == all_at_once.held_steps
        for step_id in completeness.held_steps:
            assert completeness.find_conflicting_ranks(
                step_id
            ) == all_at_once.find_conflicting_ranks(step_id)
            assert {each.place: _content(each) for each in completeness.copies(step_id)} == {
                each.place: _content(each) for each in all_at_once.copies(step_id)
            }


def _content(held: StepImagesAtPlace) -> list[tuple[int, int]]:
    return [(rank, held.get_image_digest_number(rank)) for rank in each_rank(held.ranks)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 31)), max_size=12))
def test_an_incremental_rank_union_equals_a_recomputed_union(
    changes: list[tuple[int, int]],
) -> None:
    union, of = RankBitmapUnion(), dict[int, int]()
    for key, ranks in changes:
        union.replace_bitmap(key, ranks)
        of[key] = ranks
        there = [rank for ranks in of.values() for rank in each_rank(ranks)]
        assert {*each_rank(union.once)} == {*there}
        assert {*each_rank(union.twice)} == {rank for rank in there if there.count(rank) > 1}


@given(changes=_CHANGES, world=st.sampled_from([None, 4]))
def test_the_commits_of_a_ledger_do_not_depend_on_when_they_are_queried(
    changes: list[tuple[int, object]], world: int | None
) -> None:
    asked, left = (Ledger(LedgerConfig(world=world)) for _ in range(2))
    for node, change in changes:
        event: Event
        if isinstance(change, dict):
            reports = {rank: reported(rank, tiers) for rank, tiers in change.items()}
            event = Reported(
                node_rank=node, ranks=combine_rank_reports(reports), epochs=(Epoch(_EPOCH),)
            )
        else:
            event = ReportedHoldingsLost(node, change)  # type: ignore[arg-type]
        asked.apply(event)
        left.apply_event(event)
    left.actions()
    for tier in Tier:
        assert asked.committed(tier) == left.committed(tier)
    assert asked.lineage == left.lineage
    assert asked._alarmed == left._alarmed
