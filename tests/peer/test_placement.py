"""Who is whose buddy, which copies may go, and which others may still have."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.retention import copies_to_drop, superseded_copies
from keepstep.leader.buddies import PlaceLocation
from keepstep.leader.buddies import choose_buddies as assigned
from keepstep.steps import EpochId, StepId
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.tiers.peer.peer_list import PeerList
from keepstep_sidecar.tiers.peer.protocol import CopiesToKeep, PodShardListing

_RANKS = st.sets(st.integers(0, 30), max_size=12)
_STEPS = st.builds(
    lambda epoch, step: StepId(EpochId(epoch, "0" * 8), step), st.integers(1, 2), st.integers(0, 8)
)
_HELD = st.dictionaries(st.integers(0, 3), st.sets(_STEPS, max_size=8), max_size=4)


# --- buddies -------------------------------------------------------------------------------------


def buddies(own: int, others: set[int], replicas: int) -> tuple[int, ...]:
    """Each on a node of its own."""
    spots = {rank: PlaceLocation(str(rank), str(rank)) for rank in (own, *others)}
    return assigned(spots, replicas=replicas)[own]


@given(own=st.integers(0, 30), others=_RANKS, replicas=st.integers(1, 4))
def test_a_pod_gets_the_requested_number_of_copy_peers_and_never_itself(
    own: int, others: set[int], replicas: int
) -> None:
    chosen = buddies(own, others, replicas)
    assert len(chosen) == min(replicas, len(others - {own}))
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= others - {own}


@given(ranks=_RANKS, replicas=st.integers(1, 4))
def test_every_pod_stores_as_many_copies_as_it_sends(ranks: set[int], replicas: int) -> None:
    kept = Counter(buddy for own in ranks for buddy in buddies(own, ranks, replicas))
    assert set(kept.values()) <= {min(replicas, len(ranks) - 1)}
    assert set(kept) == (ranks if len(ranks) > 1 else set())


@given(ranks=_RANKS.filter(bool), replicas=st.integers(1, 4), chance=st.randoms())
def test_losing_one_pod_reassigns_only_the_copies_that_it_stored(
    ranks: set[int], replicas: int, chance: random.Random
) -> None:
    lost = chance.choice(sorted(ranks))
    for own in ranks - {lost}:
        before, after = (buddies(own, those, replicas) for those in (ranks, ranks - {lost}))
        stay = [buddy for buddy in before if buddy != lost]
        assert list(after[: len(stay)]) == stay
        assert len(after) - len(stay) <= (lost in before)


# --- which copies go -----------------------------------------------------------------------------


def _left(held: dict[int, set[StepId]], gone: list[tuple[StepId, int]]) -> dict[int, set[StepId]]:
    return {
        rank: {step_id for step_id in ids if (step_id, rank) not in gone}
        for rank, ids in held.items()
    }


@given(held=_HELD, requests=_HELD, committed=st.none() | _STEPS)
def test_a_copy_is_superseded_only_by_a_newer_needed_and_committed_copy(
    held: dict[int, set[StepId]], requests: dict[int, set[StepId]], committed: StepId | None
) -> None:
    request = CopiesToKeep(
        committed=committed, ranks={rank: tuple(sorted(ids)) for rank, ids in requests.items()}
    )
    gone = superseded_copies(held, request.ranks, committed=committed)
    left = _left(held, gone)
    assert gone == sorted(set(gone))
    for step_id, rank in gone:
        assert step_id not in requests[rank]
        assert any(
            committed is not None and step_id < newer <= committed and newer in requests[rank]
            for newer in left[rank]
        )
    assert superseded_copies(left, request.ranks, committed=committed) == []


@given(held=_HELD, committed=st.dictionaries(st.integers(0, 3), _STEPS))
def test_a_full_volume_leaves_each_rank_its_newest_committed_copy(
    held: dict[int, set[StepId]], committed: dict[int, StepId]
) -> None:
    gone = copies_to_drop(held, committed)
    assert gone == sorted(gone), "the oldest go first, whosever they are"
    for rank, left in _left(held, gone).items():
        known = {
            step_id for step_id in held[rank] if rank in committed and step_id <= committed[rank]
        }
        assert left == ({max(known)} if known else held[rank])


def test_earlier_listings_count_for_a_silent_agent_but_not_for_a_machine_that_votes_itself() -> (
    None
):
    directory = PeerList(complete=True)
    machine, agent = Peer(node_rank=1, address="10.0.0.1:9465"), "10.0.0.9:9465"
    directory.replace_peers((machine,), own="", agents={"node-9": agent})
    assert directory.is_last_listing_valid(agent)
    directory.record_pod_answer(agent, PodShardListing(run="gpt"))
    assert not directory.is_last_listing_valid(agent), "it says itself what it holds"
    directory.record_pod_answer(agent, None, "no answer in time")
    assert directory.is_last_listing_valid(agent)
    assert not directory.is_last_listing_valid(machine.address)
    directory.replace_peers((), own="", complete=False)
    assert directory.is_last_listing_valid(agent)
    assert not directory.is_last_listing_valid(machine.address)
