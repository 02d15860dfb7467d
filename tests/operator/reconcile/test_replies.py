"""What a reply says of the other pods: when, to whom, and what that costs in a large run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.wire.reports import ReportReply
from keepstep_operator.api.model import PodRecord
from keepstep_operator.api.tiers import Peers
from keepstep_operator.reconcile.state.node_rank import Places
from tests.operator.reconcile.samples import KEY, Play, Sidecar, pod, policy


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


# --- what all places add up to -------------------------------------------------------------------

_PLACES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.none() | st.integers(1, 3)),
    max_size=12,
)


@given(_PLACES)
def test_what_places_add_up_to_is_what_a_look_at_all_says(
    changes: list[tuple[int, bool, bool, int | None]],
) -> None:
    play = Crowd(4)
    lives = dict.fromkeys(range(4), 1)
    pods: dict[int, PodRecord] = dict(enumerate(play.pods))
    for rank, gone, alive, staged in changes:
        sidecar = play.sidecars[rank]
        if gone:
            play.lose(pods[rank])
            lives[rank] += 1
            pods[rank] = pod(rank, life=lives[rank])
            play.see(pods[rank])
        else:
            sidecar.alive, sidecar.ready = alive, alive
            if staged is not None:
                sidecar.staged(staged)
            play.hear(pods[rank], sidecar.report())
        check(play.registry.runs[KEY].ledger.places)


def check(places: Places) -> None:
    there = [one for one in places.values() if not one.gone]
    assert places.settled == all(one.settled for one in there)
    for union, name in ((places.own, "own"), (places.alive, "alive")):
        found = 0
        for one in there:
            found |= getattr(one, name)
        assert union.once == found
    assert places.worlds == set().union(*(one.worlds for one in there))
    staged: dict[object, int] = {}
    for one in there:
        for id, ranks in one.staged:
            staged[id] = staged.get(id, 0) | ranks
    for id in staged:
        epoch = id.epoch  # type: ignore[attr-defined]
        of = {one.step: ranks for one, ranks in staged.items() if one.epoch == epoch}  # type: ignore[attr-defined]
        assert places.staged(epoch) == of
