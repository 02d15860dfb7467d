"""What the loss of a node would leave stays, however old it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.retention import Retention
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportedShard
from keepstep_operator.reconcile.state.durability import refuges
from keepstep_operator.reconcile.state.node_rank import Sender
from keepstep_operator.reconcile.state.run_ledger import RunLedger
from tests.operator.reconcile.samples import elsewhere, listed

EPOCH = EpochId(1, "00000001")


def _id(step: int) -> StepId:
    return StepId(EPOCH, step)


def _held(step: int, rank: int) -> ReportedShard:
    return ReportedShard(id=_id(step), world=2, root=f"{step}-{rank}")


def _rank(rank: int, *, local: list[int], peer: list[int], alive: bool) -> ReportedRank:
    return ReportedRank(
        rank=rank,
        world=2,
        alive=alive,
        tiers=elsewhere(peer=(_held(one, rank) for one in peer))
        | {Tier.LOCAL: listed(_held(one, rank) for one in local)},
    )


class Pair:
    """Two pods on two nodes, each the other's buddy."""

    def __init__(self) -> None:
        self.ledger = RunLedger()
        self.ledger.configure(keep=Retention(), pins=())
        self.sequence = 0

    def hear(self, *, local: list[int], peer: list[int]) -> None:
        """Both hold these steps themselves, and these of each other."""
        self.sequence += 1
        for own in (0, 1):
            sender = Sender(
                pod=f"p{own}",
                node_rank=own,
                node=f"n{own}",
                created_at="2026",
                local_stays=True,
            )
            report = Report(
                sidecar="x",
                started_at=1.0,
                sequence=self.sequence,
                sent_at=0.0,
                ready=True,
                ranks=(
                    _rank(own, local=local, peer=[], alive=True),
                    _rank(1 - own, local=[], peer=peer, alive=False),
                ),
                epochs=(Epoch(EPOCH, None),),
                peer_address="a:1",
            )
            self.ledger.take(sender, report, at=float(self.sequence))

    def expendable(self) -> list[int]:
        return [one.step for one in self.ledger.expendable()]


def test_with_a_link_slower_than_the_steps_the_last_copied_step_stays_on_local_too() -> None:
    pair = Pair()
    pair.hear(local=[3, 4, 5], peer=[4])
    assert pair.expendable() == [3]
    pair.hear(local=[4, 5, 6], peer=[4])
    assert pair.expendable() == []
    pair.ledger.pod_gone("p1", local_stays=False)
    assert pair.ledger.restorable() == _id(4), "one node is lost, the run is not"


def test_it_goes_when_a_newer_step_is_copied() -> None:
    pair = Pair()
    pair.hear(local=[4, 5, 6, 7, 8], peer=[4, 8])
    assert pair.expendable() == [4, 5, 6]


_NODES = st.frozensets(st.sampled_from("abcd"))


@given(sole=st.dictionaries(st.integers(0, 20).map(_id), st.none() | _NODES))
def test_for_every_node_the_newest_step_that_its_loss_leaves_is_kept(
    sole: dict[StepId, frozenset[str] | None],
) -> None:
    kept = refuges(sole)
    needed = set()
    for node in {one for nodes in sole.values() for one in nodes or ()}:
        left = [id for id, nodes in sole.items() if nodes is not None and node not in nodes]
        needed |= {max(left)} if left else set()
    assert kept == needed
