"""Parts of replicated tensors: disjoint, covering, and equal to within a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.state import sharding

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
bulks = st.lists(
    st.builds(sharding.ReplicatedTensorSize, shapes, st.sampled_from([1, 2, 4, 8])), max_size=20
)


@given(bulks.map(tuple), st.integers(1, 9))
def test_parts_are_disjoint_and_cover_every_row(tensors, sharers):
    for bulk, rows in zip(tensors, sharding.compute_row_partitions(tensors, sharers), strict=True):
        assert rows[0] == 0
        assert rows[-1] == bulk.shape[bulk.dim]
        assert list(rows) == sorted(rows)
        assert len(rows) == sharers + 1


@given(bulks.map(tuple), st.integers(1, 9))
def test_the_parts_of_a_tensor_differ_from_equal_shares_by_at_most_one_row(tensors, sharers):
    cuts = sharding.compute_row_partitions(tensors, sharers)
    share = sum(tensor.bytes for tensor in tensors) / sharers
    coarsest = max((tensor.cut_unit_bytes for tensor in tensors), default=0)
    for number in range(sharers):
        mine = sum(
            (rows[number + 1] - rows[number]) * bulk.bytes // bulk.shape[bulk.dim]
            for bulk, rows in zip(tensors, cuts, strict=True)
        )
        assert abs(mine - share) <= coarsest + 1


@given(bulks.map(tuple), st.integers(1, 9))
def test_small_tensors_are_never_cut(tensors, sharers):
    for bulk, rows in zip(tensors, sharding.compute_row_partitions(tensors, sharers), strict=True):
        if bulk.bytes <= sharding.SMALL_BYTES:
            assert set(rows) == {0, bulk.shape[bulk.dim]}


def agreed(claims, nodes, *, spread=False):
    """What each rank comes to, of what all ranks claim: the collective, played through."""
    answers = [[], []]
    for rank, mine in enumerate(claims):
        play(answers, 0, mine, rank, nodes, spread)
    for rank, mine in enumerate(claims):
        play(answers, 1, mine, rank, nodes, spread)
    return [play(answers, 2, mine, rank, nodes, spread) for rank, mine in enumerate(claims)]


class Later(Exception):
    """The others have not said what they have to say."""


def play(answers, rounds, mine, rank, nodes, spread):
    at = iter(range(3))

    def gather(value):
        number = next(at)
        if number == rounds:
            answers[number].append(value)
            raise Later
        return answers[number]

    try:
        return sharding.agree_on_topology(
            lambda: mine, gather, rank=rank, world=len(nodes), node=nodes[rank], spread=spread
        )
    except Later:
        return None


def test_a_name_that_two_ranks_use_gets_a_rank_suffix_on_the_second():
    first, second = agreed([{("a", None), ("c", None)}, {("b", None), ("c", None)}], "nn")
    assert [first.find_rank_of_stored_name((name, None)) for name in "ac"] == [None, None]
    assert [second.find_rank_of_stored_name((name, None)) for name in "bc"] == [None, 1]


def test_a_tensor_created_after_the_agreement_has_a_rank_suffix_on_every_rank():
    ranks = agreed([{("a", None)}, {("a", None)}], "nn")
    assert [rank.find_rank_of_stored_name(("late", None)) for rank in ranks] == [0, 1]


def test_ranks_that_share_a_tensor_are_one_owner():
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    ranks = agreed([{("w", pair)} for pair in pairs], "nnnn")
    stored = zip(ranks, [("w", pair) for pair in pairs], strict=True)
    owners = [rank.find_rank_of_stored_name(name) for rank, name in stored]
    assert owners == [None, None, 2, 2]


def test_the_replica_of_a_part_is_on_another_node():
    everyone = (0, 1, 2, 3)
    ranks = agreed([{("w", everyone)}] * 4, "xxyy")
    assert [rank.select_staging_ranks(everyone) for rank in ranks] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
    ]
    assert [rank.twins([everyone]) for rank in ranks] == [(2,), (3,), (0,), (1,)]


def test_nodes_with_different_numbers_of_ranks_have_no_replicas():
    everyone = (0, 1, 2)
    ranks = agreed([{("w", everyone)}] * 3, "xxy")
    assert [rank.twins([everyone]) for rank in ranks] == [(), (), ()]


def test_parts_that_are_spread_over_ranks_have_no_replica():
    everyone = (0, 1, 2, 3)
    ranks = agreed([{("w", everyone)}] * 4, "xxyy", spread=True)
    assert [rank.select_staging_ranks(everyone) for rank in ranks] == [everyone] * 4
    assert [rank.twins([everyone]) for rank in ranks] == [()] * 4
