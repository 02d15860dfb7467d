"""Sets of ranks as runs: they hold the same ranks in few numbers, and a claim of many ranks costs
no work."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.commit_rule import rank_bitmap
from keepstep.core.shard import MOST_RANKS, MOST_RUNS, Ranks

RANKS = st.sets(st.integers(0, 300), max_size=60)


@given(RANKS | st.builds(lambda a, n, d: {*range(a, a + n * d, d)}, *[st.integers(1, 60)] * 3))
def test_a_run_length_encoding_contains_exactly_its_ranks(those: Collection[int]) -> None:
    made = Ranks.of(those)
    assert [*made] == sorted(those)
    assert (len(made), bool(made), made.last) == (len(those), bool(those), max(those, default=-1))
    assert made.bits == rank_bitmap(those)
    assert [index for index in range(4000) if index in made] == sorted(those)
    assert Ranks.of(reversed([*made])) == Ranks(made.runs)


def test_the_same_local_rank_of_every_node_is_encoded_as_one_range() -> None:
    made = Ranks.of(range(3, 16_384, 8))
    assert made.runs == ((3, 16_379, 8),)
    assert made.bits is Ranks.of(range(3, 16_384, 8)).bits


def test_ranks_with_missing_nodes_are_encoded_as_two_ranges() -> None:
    assert Ranks.of([0, 8, 16, 40, 48]).runs == ((0, 16, 8), (40, 48, 8))


@pytest.mark.parametrize(
    "runs",
    [
        ((1, 0, 1),),
        ((-1, 3, 1),),
        ((0, 4, 0),),
        ((0, 4, -1),),
        ((0, 4, 3),),
        ((0, 8, 4), (4, 12, 4)),
        ((8, 16, 8), (0, 4, 4)),
    ],
)
def test_an_invalid_rank_range_is_refused(runs: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match="no runs"):
        Ranks(runs)


def test_a_range_of_a_trillion_ranks_answers_membership_without_being_expanded() -> None:
    claimed = Ranks(((0, 10**12, 1),))
    assert len(claimed) == 10**12 + 1
    assert 10**12 in claimed
    assert 10**12 + 1 not in claimed
    assert not claimed.is_encoded_as_ranges


def test_rank_sets_with_many_ranges_or_a_huge_world_are_not_short() -> None:
    assert Ranks.of([MOST_RANKS - 1]).is_encoded_as_ranges
    assert not Ranks.of([MOST_RANKS]).is_encoded_as_ranges
    squares = [index * index for index in range(2 * MOST_RUNS + 2)]
    assert not Ranks.of(squares).is_encoded_as_ranges
    assert Ranks.of(squares[: 2 * MOST_RUNS]).is_encoded_as_ranges
