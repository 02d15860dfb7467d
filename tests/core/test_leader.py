"""What the leader of a run believes and says; the rest is in `test_led_run` and, with processes, in
tests/sidecar/test_leader.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.commit_rule import ReportedTier, merge_equal_reports
from keepstep.core.retention import Retention
from keepstep.core.shard import Ranks, Shard, ShardsOfStep
from keepstep.errors import UsageError
from keepstep.leader.leader import Leader
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import (
    LeaderReply,
    MemberReport,
    PinnedSteps,
    Report,
    ReportedRanks,
)
from keepstep.wire.run_reports import RunPolicy

EPOCH = Epoch(EpochId(1, "0" * 8))
LISTED = ReportedTier(answer=TierAnswer.STEPS)
POLICY = RunPolicy(keep=Retention(last=1), outlives_pod=False, replicas=1, restarts=False)


def at(step: int) -> StepId:
    return StepId(EPOCH.id, step)


def rank(number: int, *steps: int, tier: Tier = Tier.LOCAL, alive: bool = True) -> ReportedRanks:
    held = {Tier.MEMORY: ReportedTier.from_shards(()), Tier.LOCAL: ReportedTier.from_shards(())}
    shards = tuple(Shard(step_id=at(step), rank=number, world=2, root="r") for step in steps)
    staged = at(max(steps)) if steps and alive else None
    tiers = {**held, tier: ReportedTier.from_shards(shards)}
    ranks = Ranks.of((number,))
    return ReportedRanks(ranks=ranks, world=2, alive=alive, staged=staged, tiers=tiers)


class Run:
    """A leader of two machines, each with a rank."""

    def __init__(self) -> None:
        self.leader = Leader(life="0", nodes=2, policy=POLICY)
        self.sequence = 0

    def report(self, *ranks: ReportedRanks, node_rank: int) -> Report:
        self.sequence += 1
        return Report(
            sidecar="test",
            started_at=1.0,
            sequence=self.sequence,
            ready=True,
            epochs=(EPOCH,),
            ranks=ranks,
            peer_address=f"10.0.0.{node_rank}:9465",
        )

    def reports(self, node_rank: int, *ranks: ReportedRanks, **fields: object) -> LeaderReply:
        """The answer to a whole report."""
        report = self.report(*ranks, node_rank=node_rank)
        frame = {"life": f"{node_rank}", "nodes": 2, "report": report, **fields}
        self.leader.take(node_rank, MemberReport(**frame), at=0.0)  # type: ignore[arg-type]
        reply = self.leader.news(node_rank)
        assert reply is not None
        return reply


@pytest.fixture
def run() -> Run:
    return Run()


def test_steps_are_retired_only_while_all_machines_are_connected(run: Run) -> None:
    assert run.reports(0, rank(0, 1, 2)).reply.retire == ()
    run.reports(1, rank(1, 1, 2))
    assert run.reports(0, rank(0, 1, 2)).reply.retire == (at(1),)
    run.leader.left(1)
    reply = run.reports(0, rank(0, 1, 2)).reply
    assert (reply.retire, reply.commits) == ((), (at(1), at(2)))


@pytest.mark.parametrize("tier", [Tier.LOCAL, Tier.MEMORY, Tier.PEER])
def test_a_machine_cannot_commit_a_step_for_a_rank_that_trains_elsewhere(
    run: Run, tier: Tier
) -> None:
    run.reports(0, rank(0, 1))
    run.reports(1, rank(1, 1))
    lie = rank(0, 2, tier=tier, alive=False)
    reply = run.reports(1, rank(1, 1, 2), lie)
    assert reply.reply.committed[str(Tier.LOCAL)] == at(1)
    assert reply.reply.changes_since == 0, "it is to say so again, as its owner may say so later"
    run.reports(0, rank(0, 1, 2))
    assert run.reports(1, rank(1, 1, 2), lie).reply.committed[str(Tier.LOCAL)] == at(2)


def test_ranks_that_are_reported_together_are_validated_separately(run: Run) -> None:
    run.reports(0, rank(0, 1))
    run.reports(1, rank(1, 1))
    (both,) = merge_equal_reports(rank(number, 1, 2, alive=False) for number in (0, 1))
    run.reports(1, both)
    assert run.leader.ledger.core.compute_rank_mask_on_tier(at(2), Tier.LOCAL) == 0b10


def test_changes_relative_to_a_lost_report_are_ignored(run: Run) -> None:
    run.reports(0, rank(0, 1))
    run.reports(1, rank(1, 1))
    run.sequence += 1  # this report is lost
    changes = replace(run.report(rank(1, 3), node_rank=1), since=run.sequence - 1)
    run.leader.take(1, MemberReport(life="1", nodes=2, report=changes), at=0.0)
    reply = run.leader.news(1)
    assert reply is not None
    assert reply.reply.changes_since == 0
    assert run.leader.ledger.list_steps_on_node_volumes(1) == {at(1)}


def test_peer_copies_of_a_machine_that_lost_its_drive_are_used_for_the_restore_plan(
    run: Run,
) -> None:
    run.reports(0, rank(0, 1))
    run.reports(1, rank(1, 1))
    run.leader.left(0)
    run.reports(0, rank(0), life="new")
    copy = rank(0, 1, tier=Tier.PEER, alive=False)
    assert run.reports(1, rank(1, 1), copy).reply.plan == at(1)


def test_a_member_with_another_number_of_nodes_is_refused(run: Run) -> None:
    run.reports(0, rank(0, 1))
    with pytest.raises(UsageError, match="of 3 nodes asks to join a run of 2"):
        run.reports(1, rank(1, 1), nodes=3)
    with pytest.raises(UsageError, match="DuplicateNodeRank"):
        run.reports(0, rank(0), life="second")
    assert run.leader.list_unconnected_node_ranks() == [1]


@pytest.mark.parametrize(
    ("ranks", "world"), [((), 2), ((2,), 2), ((0, 2), 2), ((0,), 1 << 17), ((1 << 16,), 1 << 16)]
)
def test_a_report_for_a_rank_outside_the_world_is_refused(
    run: Run, ranks: tuple[int, ...], world: int
) -> None:
    with pytest.raises(UsageError, match=rf"ranks .* of {world} are invalid"):
        run.reports(1, ReportedRanks(ranks=Ranks.of(ranks), world=world, alive=True))
    assert run.leader.list_unconnected_node_ranks() == [0, 1]


def test_a_report_that_contains_a_rank_twice_is_refused(run: Run) -> None:
    both = replace(rank(0), ranks=Ranks.of((0, 1)))
    with pytest.raises(UsageError, match="reported twice"):
        run.reports(1, rank(1, 1), both)
    assert run.leader.list_unconnected_node_ranks() == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": (1 << 63,)},
        {"sizes": (-1,)},
        {"sizes": ()},
        {"roots": ("r", "r")},
        {"params_digests": ("p", "p")},
        {"alike": (Ranks.of([0]),)},
        {"alike": (Ranks.of([1, 2]),)},
        {"alike": (Ranks(((0, 1 << 40, 1),)),)},
        {"world": 1},
        {"world": 1 << 17},
    ],
    ids=str,
)
def test_a_report_of_an_impossible_image_is_refused(run: Run, wrong: dict[str, object]) -> None:
    run.reports(1, rank(1, 1))
    image = ShardsOfStep.from_shard(Shard(step_id=at(2), rank=1, world=2, root="r"))
    lie = replace(LISTED, shards=(replace(image, **wrong),))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"ranks .* report invalid images"):
        run.reports(1, replace(rank(1), tiers={Tier.LOCAL: lie}))
    assert run.leader.ledger.list_steps_on_node_volumes(1) == {at(1)}


def test_machines_receive_the_peer_addresses_once_all_have_reported(run: Run) -> None:
    assert run.reports(0, rank(0)).reply.peers == ()
    reply = run.reports(1, rank(1)).reply
    (peer,) = reply.peers
    assert (peer.node_rank, peer.address, peer.buddy) == (0, "10.0.0.0:9465", True)
    assert (reply.all_peers, run.reports(0, rank(0)).reply.peers[0].buddy) == (True, True)


def test_a_machine_that_has_reported_only_changes_does_not_count_as_reported(run: Run) -> None:
    """Its connection is new, and its report goes on from one that an earlier leader had."""
    run.reports(0, rank(0))
    changes = replace(run.report(rank(1), node_rank=1), since=run.sequence - 1)
    run.leader.take(1, MemberReport(life="1", nodes=2, report=changes), at=0.0)
    reply = run.reports(0, rank(0), rank(1, alive=False)).reply
    assert not reply.all_peers, "what it holds is not known"
    run.reports(1, rank(1))
    assert run.reports(0, rank(0)).reply.all_peers


def test_the_pins_with_the_highest_version_are_used(run: Run) -> None:
    run.reports(0, rank(0, 1))
    reply = run.reports(1, rank(1, 1), pins=PinnedSteps(version=2, steps=(at(1),)))
    assert (reply.reply.pinned, reply.pins.version) == ((at(1),), 2)
    assert run.reports(0, rank(0, 1), pins=PinnedSteps(version=1)).reply.pinned == (at(1),)


def test_a_leader_that_ends_waits_until_its_members_have_acted_on_that(run: Run) -> None:
    run.reports(0, rank(0, 1))
    run.reports(1, rank(1, 1))
    run.leader.closing = True
    reply = run.leader.news(1)
    assert reply is not None
    assert reply.closing
    assert not run.leader.have_members_acknowledged_end()
    run.reports(1, rank(1, 1), heard=reply.number)
    assert run.leader.have_members_acknowledged_end()


def test_the_leader_tracks_any_number_of_kept_steps_per_machine() -> None:
    keep = 4500
    policy = replace(POLICY, keep=Retention(last=keep))
    leader = Leader(life="0", nodes=1, policy=policy)
    member = replace(rank(0, *range(keep + 2)), world=1)
    local = tuple(replace(held, world=1) for held in member.shards(Tier.LOCAL))
    member = replace(member, tiers={**member.tiers, Tier.LOCAL: replace(LISTED, shards=local)})
    report = Report(sidecar="test", started_at=1.0, sequence=1, ready=True, ranks=(member,))
    report_ = MemberReport(life="0", nodes=1, report=replace(report, epochs=(EPOCH,)))
    leader.take(0, report_, at=0.0)
    reply = leader.news(0)
    assert reply is not None
    assert reply.reply.retire == (at(0), at(1))
    newer = Shard(step_id=at(keep + 2), rank=0, world=1, root="r")
    moved = replace(member, tiers={Tier.LOCAL: ReportedTier.from_shards((newer,))})
    moved.tiers[Tier.LOCAL] = replace(moved.tiers[Tier.LOCAL], gone=())
    change = replace(report, sequence=2, since=1, ranks=(moved,))
    leader.take(0, MemberReport(life="0", nodes=1, report=change), at=0.0)
    reply = leader.news(0)
    assert reply is not None
    assert reply.reply.retire == (at(0), at(1), at(2))


def test_a_commit_is_sent_to_machines_at_once_and_other_changes_with_the_next_reply(
    run: Run,
) -> None:
    run.reports(0, rank(0, 1, 2))
    run.reports(1, rank(1, 1, 2))
    run.reports(0, rank(0, 1, 2))
    run.reports(1, rank(1, 2))
    assert run.leader.news(0) is None, "step 1 is gone elsewhere, so it is no commit any more"
    run.reports(0, rank(0, 1, 2, 3))
    run.reports(1, rank(1, 2, 3))
    reply = run.leader.news(0)
    assert reply is not None
    assert reply.reply.committed[str(Tier.LOCAL)] == at(3)


def wrote(run: Run, node_rank: int, *steps: int) -> None:
    """A machine that is known tells of further steps on its drives."""
    held = ReportedTier.from_shards(
        Shard(step_id=at(step), rank=node_rank, world=2, root="r") for step in steps
    )
    tiers = {Tier.LOCAL: replace(held, gone=())}
    staged = ReportedRanks(
        ranks=Ranks.of((node_rank,)), world=2, alive=True, staged=at(max(steps)), tiers=tiers
    )
    since = run.leader.ledger.places[node_rank].sidecar.sequence
    changes = replace(run.report(staged, node_rank=node_rank), since=since, epochs=())
    frame = MemberReport(life=f"{node_rank}", nodes=2, report=changes)
    run.leader.take(node_rank, frame, at=0.0)
    run.leader.draw_conclusions(at=0.0)


def test_a_member_that_wrote_a_step_is_answered_with_its_commit(run: Run) -> None:
    for number in (0, 1):
        run.reports(number, rank(number, 1))
    assert run.leader.list_members_with_news() == [0, 1]
    wrote(run, 0, 2)
    assert run.leader.list_members_with_news(patient=True) == []
    assert run.leader.owes_answer
    wrote(run, 1, 2)
    assert run.leader.list_members_with_news(patient=True) == [0, 1]
    assert not run.leader.owes_answer
    (answer,) = (reply for reply in (run.leader.news(0),) if reply is not None)
    assert answer.reply.committed[str(Tier.LOCAL)] == at(2)
    assert answer.reply.changes_since == answer.answers


def test_a_member_receives_a_reply_even_if_its_step_is_not_committed(run: Run) -> None:
    for number in (0, 1):
        run.reports(number, rank(number, 1))
    run.leader.list_members_with_news()
    wrote(run, 0, 2)
    assert run.leader.list_members_with_news(patient=True) == []
    assert run.leader.list_members_with_news() == [0]
    answer = run.leader.news(0)
    assert answer is not None
    assert answer.answers == answer.reply.changes_since == run.sequence
    assert run.leader.list_members_with_news() == []
