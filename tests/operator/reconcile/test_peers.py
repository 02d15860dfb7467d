"""Who keeps whose copies, and what a reply says of the other pods."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keepstep.leader.buddies import Spot, buddies
from keepstep.wire.reports import ReportReply
from keepstep_operator.api.tiers import Peers
from tests.operator.reconcile.samples import Play, Sidecar, pod, policy

_SPOTS = st.dictionaries(
    st.integers(0, 40),
    st.tuples(st.integers(0, 6), st.integers(0, 3)).map(
        lambda both: Spot(f"node-{both[0]}", f"zone-{both[0] % (both[1] + 1)}")
    ),
    max_size=24,
)


def _by_node(*nodes: str) -> dict[int, Spot]:
    return {rank: Spot(node, node) for rank, node in enumerate(nodes)}


def test_the_first_copy_goes_to_another_zone_and_the_next_to_another_node_where_zones_are_out() -> (
    None
):
    spots = {rank: Spot(f"node-{rank}", f"zone-{rank // 2}") for rank in range(4)}
    found = buddies(spots, replicas=3)
    for rank, chosen in found.items():
        assert spots[chosen[0]].domain != spots[rank].domain
        assert sorted((rank, *chosen)) == [0, 1, 2, 3]


@given(spots=_SPOTS, replicas=st.integers(1, 4))
def test_every_copy_is_on_a_node_of_its_own_and_there_are_as_many_as_nodes_allow(
    spots: dict[int, Spot], replicas: int
) -> None:
    found = buddies(spots, replicas=replicas)
    nodes = len({spot.node for spot in spots.values()})
    assert set(found) == set(spots)
    for rank, chosen in found.items():
        there = [spots[one].node for one in (rank, *chosen)]
        assert len(set(there)) == len(there)
        assert len(chosen) == min(replicas, nodes - 1)


@given(spots=_SPOTS)
def test_the_first_copy_leaves_the_domain_whenever_another_node_of_another_domain_is_there(
    spots: dict[int, Spot],
) -> None:
    for rank, chosen in buddies(spots, replicas=1).items():
        own = spots[rank]
        others = any(one.domain != own.domain and one.node != own.node for one in spots.values())
        assert not others or spots[chosen[0]].domain != own.domain


@given(nodes=st.integers(2, 12), pods=st.integers(1, 4), replicas=st.integers(1, 3))
def test_where_nodes_have_as_many_pods_each_pod_keeps_as_much_as_it_sends(
    nodes: int, pods: int, replicas: int
) -> None:
    spots = _by_node(*(f"node-{at % nodes:02d}" for at in range(nodes * pods)))
    found = buddies(spots, replicas=replicas)
    kept = Counter(one for chosen in found.values() for one in chosen)
    assert {kept[rank] for rank in spots} == {min(replicas, nodes - 1)}


@given(spots=_SPOTS, replicas=st.integers(1, 3), seed=st.randoms())
def test_the_order_in_which_pods_were_seen_changes_nothing(
    spots: dict[int, Spot], replicas: int, seed: object
) -> None:
    ranks = list(spots)
    seed.shuffle(ranks)  # type: ignore[attr-defined]
    shuffled = {rank: spots[rank] for rank in ranks}
    assert buddies(shuffled, replicas=replicas) == buddies(spots, replicas=replicas)


@given(nodes=st.integers(2, 12), replicas=st.integers(1, 3), lost=st.integers(0, 11))
def test_with_a_pod_on_each_node_the_loss_of_one_moves_only_the_copies_that_it_kept(
    nodes: int, replicas: int, lost: int
) -> None:
    spots = _by_node(*(f"node-{at:02d}" for at in range(nodes)))
    before = buddies(spots, replicas=replicas)
    after = buddies({rank: spots[rank] for rank in spots if rank != lost}, replicas=replicas)
    for rank, chosen in after.items():
        stay = [one for one in before[rank] if one != lost]
        assert list(chosen[: len(stay)]) == stay


# What a reply says of the other pods: when, to whom, and what that costs in a large run.


class Crowd(Play):
    """A run of pods that serve, one rank each; `told` says what each of their sidecars holds."""

    def __init__(self, pods: int) -> None:
        self.pods = [pod(rank) for rank in range(pods)]
        super().__init__(*self.pods, known_policy=policy(peers=Peers()))
        self.sidecars = [
            Sidecar(rank=rank, world=pods, address=f"10.0.0.{rank}:9465") for rank in range(pods)
        ]
        self.holds = [""] * pods
        self.known: list[dict[int, str]] = [{} for _ in range(pods)]

    def exchange(self, rank: int) -> ReportReply:
        """A report and its reply, taken in as a sidecar does."""
        self.hear(self.pods[rank], self.sidecars[rank].report())
        reply = self.told(self.pods[rank], holds=self.holds[rank])
        if reply.peers_version != self.holds[rank]:
            self.known[rank] = {one.node_rank: one.address for one in reply.peers}
        self.holds[rank] = reply.peers_version
        return reply

    def exchange_all(self) -> list[ReportReply]:
        return [self.exchange(rank) for rank in range(len(self.pods))]

    def serving(self, but: int) -> dict[int, str]:
        return {one.rank: one.address for one in self.sidecars if one.rank != but}


def test_a_list_that_the_sidecar_holds_is_not_repeated_and_a_changed_one_reaches_all() -> None:
    play = Crowd(3)
    play.exchange_all()
    assert [len(one.peers) for one in play.exchange_all()] == [2, 2, 0], "the last one heard of all"
    assert [one.peers for one in play.exchange_all()] == [()] * 3
    play.sidecars[1].address = "10.0.0.99:9465"
    play.exchange(1)
    play.exchange_all()
    assert play.known == [play.serving(but=rank) for rank in range(3)]


def test_a_list_that_got_lost_is_told_again_and_so_it_is_to_a_sidecar_that_began_anew() -> None:
    play = Crowd(3)
    play.exchange_all()
    play.exchange_all()
    play.sidecars[1].address = "10.0.0.99:9465"
    play.exchange(1)
    lost = play.told(play.pods[0], holds=play.holds[0])
    assert lost.peers == play.told(play.pods[0], holds=play.holds[0]).peers != ()
    assert len(play.told(play.pods[2], holds="").peers) == 2


def test_a_pod_that_is_gone_is_named_no_more() -> None:
    play = Crowd(3)
    play.exchange_all()
    play.exchange_all()
    play.lose(play.pods[2])
    reply = play.told(play.pods[0], holds=play.holds[0])
    assert [one.node_rank for one in reply.peers] == [1]
