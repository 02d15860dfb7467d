"""A run with peers, an archive, or neither: what the reconciler makes of the loss of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.retention import Retention
from keepstep.core.shard import Ranks, Shard
from keepstep.leader.durability import refuges, sole_nodes
from keepstep.leader.node_rank import Sender
from keepstep.leader.run_ledger import RunLedger
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank
from keepstep.wire.status import TierProgress
from keepstep_operator.api.model import NodeRecord
from keepstep_operator.api.policy import OnLoss, VolumeKind
from keepstep_operator.api.run import as_json
from keepstep_operator.api.tiers import Archive, Bucket, Peers
from keepstep_operator.reconcile.state.actions import WriteStatus
from keepstep_operator.reconcile.state.run import Run
from keepstep_operator.reconcile.state.run_view import is_certain, kept_steps
from keepstep_operator.reconcile.status.conditions import PROTECTED
from keepstep_operator.reconcile.status.tier_conditions import ARCHIVED, REPLICATED, RESTORE_FROM
from keepstep_operator.reconcile.writers.checkpoint_objects import (
    Changes,
    Seen,
    body_of,
    changes,
    seen,
    status_of,
)
from tests.chart.charts import crds, schema_of
from tests.operator.reconcile.samples import (
    IMAGE_BYTES,
    KEY,
    T0,
    Play,
    Sidecar,
    elsewhere,
    later,
    listed,
    pod,
    policy,
    run_object,
    step,
)

ARCHIVE = Archive(store=Bucket(kind="s3", name="ckpt"), every=100)


def running(*, known: Any = None, kind: VolumeKind = VolumeKind.HOST_PATH, **changes: Any):  # type: ignore[no-untyped-def]
    """Two pods on two nodes with steps 80 and 90 on local; each keeps copies of the other's 80."""
    known = known or policy(peers=Peers())
    pods = [pod(rank, volumes=(kind,), **changes) for rank in (0, 1)]
    sidecars = [
        Sidecar(rank=rank, address=f"10.0.0.{rank}:9465").staged(99, 100).durable(80, 90)
        for rank in (0, 1)
    ]
    for rank, one in enumerate(sidecars):
        one.kept = {1 - rank: [step(80)]} if known.policy.peers else {}
    play = Play(*pods, known_policy=known)
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, pods, sidecars


def types(play: Play) -> list[str]:
    return [one.type for one in play.status.conditions]


# --- peers ---------------------------------------------------------------------------------------


def test_each_sidecar_is_told_its_buddy_and_where_all_others_serve() -> None:
    play, pods, _ = running()
    (peer,) = play.told(pods[0]).peers
    assert (peer.node_rank, peer.address, peer.buddy) == (1, "10.0.0.1:9465", True)
    assert [one.buddies for one in play.status.ranks] == ["1", "0"]


def test_with_a_third_pod_only_the_next_is_a_buddy_and_the_other_serves() -> None:
    play, pods, sidecars = running()
    third = pod(2)
    play.see(third)
    for one in sidecars:
        one.world = 3
    play.hear_all(*zip(pods, sidecars, strict=True))
    play.hear(third, Sidecar(rank=2, world=3, address="10.0.0.2:9465").report())
    found = {one.node_rank: one.buddy for one in play.told(pods[0]).peers}
    assert found == {1: True, 2: False}


def test_nobody_is_a_buddy_before_every_pod_has_a_node() -> None:
    play, pods, _ = running()
    play.see(pod(2, node="", phase="Pending", training=False))
    told = play.told(pods[0]).peers
    assert [one.buddy for one in told] == [False]


def test_a_pod_that_is_made_again_moves_no_copies() -> None:
    play, pods, _ = running()
    third = pod(2)
    play.see(third)
    play.hear(third, Sidecar(rank=2, world=3, address="10.0.0.2:9465").report())
    before = play.registry.runs[KEY].peer_assignment.ring()
    play.lose(pods[1])
    assert play.registry.runs[KEY].peer_assignment.ring() == before
    assert {one.node_rank for one in play.told(pods[0]).peers} == {2}


def test_a_sidecar_is_told_that_it_knows_all_peers_once_every_rank_was_heard() -> None:
    pods = [pod(rank) for rank in (0, 1)]
    play = Play(*pods, known_policy=policy(peers=Peers()))
    play.hear(pods[0], Sidecar(rank=0, address="10.0.0.0:9465").report())
    assert not play.registry.reply(pods[0].uid, at=play.now).all_peers
    play.hear(pods[1], Sidecar(rank=1, address="10.0.0.1:9465").report())
    told = play.told(pods[0])
    assert (told.all_peers, [one.node_rank for one in told.peers]) == (True, [1])


def test_buddies_leave_the_zone_where_nodes_are_known_to_be_in_one() -> None:
    zone = "topology.kubernetes.io/zone"
    play, *_ = running(known=policy(peers=Peers(topology_key=zone)))
    third = pod(2)
    play.see(third)
    play.hear(third, Sidecar(rank=2, world=3, address="10.0.0.2:9465").report())
    for node, name in (("node-0", "a"), ("node-1", "a"), ("node-2", "b")):
        play.registry.node_seen(NodeRecord(name=node, labels={zone: name}))
    assert play.registry.runs[KEY].peer_assignment.ring() == {0: (2,), 1: (2,), 2: (1,)}


def test_without_peers_in_the_policy_there_are_none_and_no_word_of_them() -> None:
    play, pods, _ = running(known=policy())
    assert play.told(pods[0]).peers == ()
    assert types(play) == ["Protected", "FullyInjected", "Committing"]
    assert play.status.survives == ["ContainerRestart", "PodRestart"]


def test_copies_on_another_node_outlive_a_node_and_the_status_says_from_which_step() -> None:
    play, *_ = running()
    status = play.status
    assert status.survives == ["ContainerRestart", "PodRestart", "NodeLoss"]
    assert status.watermarks["peer"] == str(step(80))
    assert play.condition(REPLICATED) == (
        "True",
        "Replicated",
        "step 80 is left whichever node is lost",
    )
    assert "the loss of a pod or its node goes back to step 80" in play.condition(PROTECTED)[2]


def test_the_copies_of_a_rank_do_not_count_as_its_pod() -> None:
    play, pods, _ = running()
    assert play.status.ranks[0].ranks == "0"
    assert play.status.ranks[0].local == 90
    play.lose(pods[0])
    run = play.registry.runs[KEY]
    assert not run.ledger.settled


def test_copies_on_the_same_node_outlive_no_node() -> None:
    play, *_ = running(node="node-7")
    assert play.status.survives == ["ContainerRestart", "PodRestart"]
    status, reason, message = play.condition(REPLICATED)
    assert (status, reason) == ("False", "OneNode")
    assert "node-7" in message
    assert play.condition(PROTECTED)[:2] == ("False", "OneNode")


def test_a_buddy_that_cannot_be_reached_is_told_with_its_own_words() -> None:
    play, pods, sidecars = running()
    away = TierProgress(where="node rank 1", backlog=2, trouble="node rank 1: connection refused")
    sidecars[0].more = {"tiers": {Tier.PEER: away}}
    play.hear(pods[0], sidecars[0].report())
    status, reason, message = play.condition(REPLICATED)
    assert (status, reason) == ("False", "Troubled")
    assert "gpt-worker-0" in message
    assert "connection refused" in message
    assert play.condition(PROTECTED)[:2] == ("False", "Troubled")
    sidecars[0].more = {"tiers": {Tier.PEER: replace(away, backlog=0, trouble="")}}
    play.hear(pods[0], sidecars[0].report())
    assert play.condition(PROTECTED)[0] == "True"


def test_a_backlog_that_lasts_is_told_and_costs_no_write_a_report() -> None:
    play, pods, sidecars = running()
    slow = TierProgress(where="node rank 1", backlog=1, behind_s=299)
    sidecars[0].more = {"tiers": {Tier.PEER: slow}}
    play.hear(pods[0], sidecars[0].report())
    assert play.condition(REPLICATED)[0] == "True"
    said = set()
    for waited in (300, 301, 900):
        sidecars[0].more = {"tiers": {Tier.PEER: replace(slow, behind_s=waited, sent=waited)}}
        play.hear(pods[0], sidecars[0].report())
        said.add(play.condition(REPLICATED))
    assert {one[:2] for one in said} == {("False", "Behind")}
    assert len(said) == 1


def test_a_pod_that_serves_nobody_is_named() -> None:
    play, pods, sidecars = running()
    sidecars[1].address = ""
    play.hear(pods[1], sidecars[1].report())
    status, reason, message = play.condition(REPLICATED)
    assert (status, reason) == ("Unknown", "NotServing")
    assert "gpt-worker-1" in message


# --- archive -------------------------------------------------------------------------------------


def archived(*, kind: VolumeKind = VolumeKind.EMPTY_DIR, **changes: Any):  # type: ignore[no-untyped-def]
    play, pods, sidecars = running(known=policy(archive=ARCHIVE), kind=kind, **changes)
    for one in sidecars:
        one.archive = [step(70), step(80)]
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, pods, sidecars


def test_an_archive_outlives_nodes_and_with_the_label_jobs() -> None:
    play, *_ = archived()
    assert play.status.survives == ["ContainerRestart", "PodRestart", "NodeLoss"]
    assert play.status.watermarks["archive"] == str(step(80))
    assert play.condition(ARCHIVED) == (
        "True",
        "Archived",
        "step 80 is in s3://ckpt, and 1 older",
    )
    labelled, *_ = archived(labelled=True)
    assert labelled.status.survives[-1] == "JobRecreate"


def test_a_node_that_is_lost_with_neither_is_a_doubt_and_never_a_fresh_start() -> None:
    play, pods, _ = running(known=policy(on_loss=OnLoss.WAIT), kind=VolumeKind.EMPTY_DIR)
    play.lose(pods[0])
    reply = play.registry.reply(pods[1].uid, at=play.now)
    assert reply.plan is None
    assert play.status.survives == []
    status, reason, message = play.condition(PROTECTED)
    assert (status, reason) == ("False", "PodsMissing")
    assert "starts wait until it is back" in message
    assert "keepstep.dev/fresh-start=allow" in message


def test_an_archive_that_is_down_is_told_with_the_newest_step_there() -> None:
    play, pods, sidecars = archived()
    down = TierProgress(where="s3://ckpt", backlog=3, trouble="503 SlowDown", failures=9)
    sidecars[0].more = {"tiers": {Tier.ARCHIVE: down}}
    play.hear(pods[0], sidecars[0].report())
    status, reason, message = play.condition(ARCHIVED)
    assert (status, reason) == ("False", "Troubled")
    assert "503 SlowDown" in message
    assert "Newest step there: 80" in message
    assert play.condition(PROTECTED)[:2] == ("False", "Troubled")


def test_what_was_archived_is_told_after_the_job_is_over() -> None:
    play, pods, _ = archived()
    for one in pods:
        play.see(replace(one, phase="Succeeded", training=False))
    play.wait(1)
    assert play.status.phase == "Finished"
    assert play.condition(ARCHIVED)[0] == "True"


# --- holders -------------------------------------------------------------------------------------


def test_holders_are_the_nodes_whose_drives_outlive_their_pods() -> None:
    play, pods, _ = running()
    found = [(one.node, one.node_ranks, one.copies, one.step) for one in play.status.holders]
    assert found == [("node-0", "0", "1", 90), ("node-1", "1", "0", 90)]
    play.lose(pods[0])
    assert [one.node for one in play.status.holders] == ["node-0", "node-1"], "it stays there"
    fleeting, *_ = running(kind=VolumeKind.EMPTY_DIR)
    assert fleeting.status.holders == []


# --- nodes that go -------------------------------------------------------------------------------


def test_a_cordoned_node_with_the_only_copy_is_warned_of_once_and_while_it_lasts() -> None:
    play, pods, sidecars = running()
    play.registry.node_seen(NodeRecord(name="node-1", cordoned=True))
    play.registry.node_seen(NodeRecord(name="node-9", cordoned=True))
    play.wait(1)
    play.wait(1)
    (event,) = play.events("NodeDraining")
    assert event.startswith("node node-1 is cordoned, and some shards of step 90")
    assert play.actions.count(WriteStatus(KEY)) >= 1
    assert any("node-1 is cordoned" in one for one in play.status.warnings)
    assert "node-1 is cordoned" in play.condition(PROTECTED)[2]
    for rank, one in enumerate(sidecars):
        one.kept = {1 - rank: [step(80), step(90)]}
    play.hear_all(*zip(pods, sidecars, strict=True))
    play.wait(1)
    assert play.status.warnings == []
    play.registry.node_gone("node-1")
    play.wait(1)
    assert len(play.events("NodeDraining")) == 1


def lying(*places: tuple[str, int, tuple[int, ...]]) -> dict[str, int]:
    """Node -> the ranks, as bits, that it has an image of, or a twin's."""
    found: dict[str, int] = {}
    for node, rank, twins in places:
        found[node] = found.get(node, 0) | sum(1 << one for one in (rank, *twins))
    return found


@pytest.mark.parametrize(
    ("copies", "sole"),
    [
        ([("a", 0, ()), ("b", 1, ())], {"a", "b"}),
        ([("a", 0, ()), ("b", 0, ()), ("a", 1, ())], {"a"}),
        ([("a", 0, ()), ("b", 0, ()), ("a", 1, ()), ("b", 1, ())], set()),
        ([("a", 0, ()), ("a", 0, ()), ("a", 1, ()), ("b", 1, ())], {"a"}),
        ([("a", 0, (1,)), ("b", 1, (0,))], set()),
        ([("a", 0, (1,))], {"a"}),
        ([("a", 0, ())], None),
        ([], None),
    ],
)
def test_a_node_is_the_only_one_for_what_no_other_node_and_no_twin_elsewhere_holds(
    copies: list[tuple[str, int, tuple[int, ...]]], sole: set[str] | None
) -> None:
    assert sole_nodes(lying(*copies), world=2) == sole


# --- the archive's due steps ---------------------------------------------------------------------


def test_all_sidecars_are_told_which_commit_stands_in_for_a_due_one_until_it_is_archived() -> None:
    play, pods, sidecars = running(known=policy(archive=ARCHIVE))

    def commit(*steps: int) -> set[StepId | None]:
        for one in sidecars:
            one.staged(steps[-1]).durable(*steps)
        play.hear_all(*zip(pods, sidecars, strict=True))
        return {play.registry.reply(pod.uid, at=play.now).archive for pod in pods}

    assert commit(80, 90, 99) == {None}
    assert commit(90, 99, 101) == {step(101)}, "100 was never committed"
    assert commit(99, 101, 102) == {step(101)}, "as long as it is not there"
    for one in sidecars:
        one.archive = [step(101)]
    assert commit(101, 102, 110) == {None}
    assert commit(110, 200, 201) == {None}, "200 was committed itself"


# --- restoreFrom ---------------------------------------------------------------------------------


def test_a_run_is_rolled_back_at_its_next_restart_once_and_then_goes_on_as_usual() -> None:
    play, pods, sidecars = running(known=policy())
    play.find(run_object(restore_from="80", generation=2))
    reply = play.registry.reply(pods[0].uid, at=play.now)
    assert (reply.restore_from, reply.plan) == (step(80), step(80))
    assert step(80) in reply.pinned, "it must not be retired meanwhile"
    assert play.condition(RESTORE_FROM)[:2] == ("Unknown", "Telling"), "a restart may not heed it"
    play.registry.reply(pods[1].uid, at=play.now)
    status, reason, message = play.condition(RESTORE_FROM)
    assert (status, reason) == ("Unknown", "Waiting")
    assert str(step(80)) in message
    again = later(2, 80)
    for one in sidecars:
        one.restored(again, tier=Tier.LOCAL)
    play.hear_all(*zip(pods, sidecars, strict=True))
    assert play.condition(RESTORE_FROM)[:2] == ("True", "Restored")
    reply = play.registry.reply(pods[0].uid, at=play.now)
    assert (reply.restore_from, reply.pinned) == (None, ())
    assert play.events("RolledBack") == [
        f"epoch {again.id} went on from step 80, as spec.restoreFrom asked"
    ]
    assert reply.plan == step(80), "step 90 is dead"


def test_a_rollback_that_came_about_is_not_done_again_by_a_new_reconciler() -> None:
    play, pods, sidecars = running(known=policy())
    asks = run_object(restore_from="80", generation=2)
    play.find(asks)
    again = later(2, 80)
    for one in sidecars:
        one.restored(again, tier=Tier.LOCAL).durable(85, epoch=again)
    play.hear_all(*zip(pods, sidecars, strict=True))
    heir = Play(known_policy=policy())
    heir.find(replace(asks, status=as_json(play.status)))
    for one in pods:
        heir.see(one)
    heir.hear_all(*zip(pods, sidecars, strict=True))
    reply = heir.registry.reply(pods[0].uid, at=heir.now)
    assert (reply.restore_from, reply.plan) == (None, step(85, again))
    assert heir.events("RolledBack") == []


@pytest.mark.parametrize("asked", ["85", "0007.ffffffff-000000080", "nonsense?"])
def test_a_step_that_nobody_holds_changes_nothing_and_says_what_there_is(asked: str) -> None:
    play, pods, _ = running(known=policy())
    play.find(run_object(restore_from=asked, generation=2))
    reply = play.registry.reply(pods[0].uid, at=play.now)
    assert (reply.restore_from, reply.plan) == (None, step(100))
    status, reason, message = play.condition(RESTORE_FROM)
    assert (status, reason) == ("False", "NotFound")
    assert str(step(90)) in message


def test_a_wish_from_before_the_first_report_is_found_when_reports_come() -> None:
    pods = [pod(rank) for rank in (0, 1)]
    play = Play(*pods)
    play.find(run_object(restore_from=f"{KEY.name}/80", generation=2))
    assert play.condition(RESTORE_FROM)[:2] == ("Unknown", "NoReports")
    for one in pods:
        play.hear(one, Sidecar(rank=one.node_rank).durable(80, 90).report())
    assert play.registry.reply(pods[0].uid, at=play.now).restore_from == step(80)


def test_a_step_of_another_run_is_refused_and_changes_nothing() -> None:
    play, pods, _ = running(known=policy())
    play.find(run_object(restore_from="other/80", generation=2))
    status, reason, message = play.condition(RESTORE_FROM)
    assert (status, reason) == ("False", "OtherRun")
    assert "other/80" in message
    assert "keepstep.dev/restore-from" in message, "how a fork is asked for"
    assert play.registry.reply(pods[0].uid, at=play.now).restore_from is None


# --- Checkpoint objects --------------------------------------------------------------------------


def objects(play: Play) -> dict[str, tuple[str, ...]]:
    return {one.step: one.tiers for one in kept_steps(play.registry.runs[KEY])}


def due_for(run: Run, there: Mapping[str, Seen]) -> Changes:
    return changes(kept_steps(run), there, certain=is_certain(run))


def test_a_step_that_is_pinned_or_archived_deserves_an_object_with_its_tiers() -> None:
    play, *_ = archived()
    play.find(run_object(pins=(str(step(90)), str(step(1)))))
    assert objects(play) == {
        str(step(90)): ("local",),
        str(step(80)): ("local", "archive"),
        str(step(70)): ("archive",),
    }


def test_objects_are_made_again_from_reports_alone_and_gone_when_their_step_is() -> None:
    play, pods, sidecars = archived()
    run = play.registry.runs[KEY]
    due = due_for(run, {})
    assert [one.step for one in due.made] == [str(step(80)), str(step(70))]
    there = {
        one.name: seen(
            {
                **body_of(one, namespace="team", owner_uid="run-1"),
                "status": status_of(one, since="", at=T0),
            }
        )
        for one in due.made
    }
    assert len(due_for(run, there)) == 0
    for one in sidecars:
        one.archive = [step(80)]
    play.hear(pods[0], sidecars[0].report())
    play.hear(pods[1], sidecars[1].report())
    assert due_for(run, there).gone == (f"{KEY.name}-{step(70)}",)


def test_while_anybody_is_silent_no_object_is_deleted() -> None:
    play, pods, sidecars = archived()
    run = play.registry.runs[KEY]
    there = {"gpt-1a2b3c4d-0001.aaaaaaaa-000000060": Seen(tiers=("archive",))}
    assert due_for(run, there).gone != ()
    sidecars[0].archive = None
    play.hear(pods[0], sidecars[0].report())
    play.lose(pods[1])
    assert due_for(run, there).gone == ()
    empty = Play(*pods, known_policy=policy(archive=ARCHIVE))
    assert due_for(empty.registry.runs[KEY], there).gone == ()


# The archive as many pods tell of it: each of its own ranks all, two of the others the newest.


NUMBERS = list(range(1000, 11000, 1000))
NEWEST = NUMBERS[-3:]


def told_of(rank: int, *numbers: int) -> ReportedRank:
    """What a pod says of another one's rank: only what it saw archived."""
    held = tuple(
        Shard(
            step_id=step(one),
            rank=rank,
            world=2,
            root=f"{step(one)}/{rank}",
            size_bytes=IMAGE_BYTES,
        )
        for one in numbers
    )
    return ReportedRank(
        rank=rank,
        world=2,
        alive=False,
        tiers=elsewhere(archive=held),
    )


class ToldByBoth:
    """Two pods, both of which also tell of the other's rank."""

    def __init__(self) -> None:
        archive = Archive(store=Bucket(kind="s3", name="ckpt"), every=100)
        self.pods = [pod(rank) for rank in (0, 1)]
        self.play = Play(*self.pods, known_policy=policy(archive=archive))
        self.sidecars = [Sidecar(rank=rank).staged(10001).durable(10000) for rank in (0, 1)]
        for one in self.sidecars:
            one.archive = [step(number) for number in NUMBERS]

    def report(self, rank: int, *elsewhere: int) -> Report:
        mine = self.sidecars[rank].report()
        return replace(mine, ranks=(*mine.ranks, told_of(1 - rank, *elsewhere)))

    def hear(self, *elsewhere: int, who: tuple[int, ...] = (0, 1)) -> None:
        for rank in who:
            self.play.hear(self.pods[rank], self.report(rank, *elsewhere))

    def archived(self) -> list[int]:
        return [id.step for id in self.play.registry.runs[KEY].ledger.archived()]


def test_who_names_the_newest_steps_of_another_rank_hides_none_of_the_older_ones() -> None:
    run = ToldByBoth()
    for _ in range(3):
        for rank in (0, 1):
            run.hear(*NEWEST, who=(rank,))
            run.hear(*NEWEST, who=(1 - rank,))
            assert run.archived() == NUMBERS


def test_a_step_among_the_newest_that_went_is_gone_though_only_another_pod_looks() -> None:
    run = ToldByBoth()
    run.hear(*NEWEST)
    run.play.lose(run.pods[1])
    run.hear(NEWEST[0], NEWEST[2], who=(0,))
    assert run.archived() == [number for number in NUMBERS if number != NEWEST[1]]


# A run that began from a step of another one: what its status and events say of it.


PARENT = StepId(EpochId(3, "abcdef01"), 1200)
BEGAN = Epoch(EpochId(4, "10fedcba"), PARENT, "gpt-1a2b3c4d")
ORIGIN = f"gpt-1a2b3c4d/{PARENT}"


def forked() -> tuple[Play, list[Sidecar]]:
    """Two pods that have just begun from the other run's step."""
    pods = [pod(rank) for rank in (0, 1)]
    sidecars = [Sidecar(rank=rank, epochs=[]) for rank in (0, 1)]
    play = Play(*pods, known_policy=policy())
    play.hear_all(*zip(pods, sidecars, strict=True))
    for one in sidecars:
        one.restored(BEGAN, tier=Tier.ARCHIVE).staged(1201, epoch=BEGAN)
    play.hear_all(*zip(pods, sidecars, strict=True))
    return play, sidecars


def test_a_fork_is_told_with_its_origin_and_is_no_restart() -> None:
    play, _ = forked()
    assert play.events("Forked") == [
        "began from step 1200 of run gpt-1a2b3c4d from archive in 1.5 s"
    ]
    assert play.events("Restored") == play.events("FreshStart") == []
    assert (play.status.origin, play.status.restarts, play.status.lost_steps) == (ORIGIN, 0, 0)
    allowed = schema_of(crds()["CheckpointRun"])["properties"]["status"]["properties"]
    assert allowed["origin"]["maxLength"] >= len(as_json(play.status)["origin"])


# What the loss of a node would leave stays, however old it is.


EPOCH = EpochId(1, "00000001")


def _id(step: int) -> StepId:
    return StepId(EPOCH, step)


def _held(step: int, rank: int, *, alike: Ranks) -> Shard:
    root = f"{step}-{rank}"
    return Shard(step_id=_id(step), rank=rank, world=2, root=root, alike=alike)


def _rank(
    rank: int, *, local: Iterable[int], peer: Iterable[int], alive: bool, alike: Ranks
) -> ReportedRank:
    return ReportedRank(
        rank=rank,
        world=2,
        alive=alive,
        tiers=elsewhere(peer=(_held(one, rank, alike=alike) for one in peer))
        | {Tier.LOCAL: listed(_held(one, rank, alike=alike) for one in local)},
    )


class Pair:
    """Two pods on two nodes, each the other's buddy. `twins`: they are replicas."""

    def __init__(self, *, twins: bool = False) -> None:
        self.alike = Ranks.of((0, 1) if twins else ())
        self.ledger = RunLedger()
        self.ledger.configure(keep=Retention(), pins=())
        self.sequence = 0

    def hear(self, *, local: Iterable[int], peer: Iterable[int]) -> None:
        """Both hold these steps themselves, and these of each other."""
        self.report((local, local), (peer, peer))

    def report(self, local: Sequence[Iterable[int]], peer: Sequence[Iterable[int]]) -> None:
        """By node rank: the steps that each holds itself, and those that it holds of the other."""
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
                ready=True,
                ranks=(
                    _rank(own, local=local[own], peer=[], alive=True, alike=self.alike),
                    _rank(1 - own, local=[], peer=peer[own], alive=False, alike=self.alike),
                ),
                epochs=(Epoch(EPOCH, None),),
                peer_address="a:1",
            )
            self.ledger.take(sender, report, at=float(self.sequence))

    def expendable(self) -> list[int]:
        return [one.step for one in self.ledger.expendable()]

    def survives(self) -> int | None:
        """The step that is said to be left whichever node is lost."""
        step = self.ledger.safety().step
        return None if step is None else step.step

    def goes_on_from(self, *, without: int) -> int:
        """The step that a restart goes on from after the loss of this node; -1: of none."""
        self.ledger.pod_gone(f"p{without}", local_stays=False)
        step = self.ledger.core.restart_step(world=2)
        return -1 if step is None else step.step


def test_with_a_link_slower_than_the_steps_the_last_copied_step_stays_on_local_too() -> None:
    pair = Pair()
    pair.hear(local=[3, 4, 5], peer=[4])
    assert pair.expendable() == [3]
    pair.hear(local=[4, 5, 6], peer=[4])
    assert pair.expendable() == []
    pair.ledger.pod_gone("p1", local_stays=False)
    assert pair.ledger.restorable() == _id(4), "one node is lost, the run is not"


@pytest.mark.parametrize("lost", [0, 1])
def test_replicas_with_copies_are_said_to_go_on_from_the_newest_copy_as_they_do(lost: int) -> None:
    pair = Pair(twins=True)
    pair.hear(local=[18, 20, 23], peer=[18, 20])
    assert pair.survives() == 20
    assert pair.goes_on_from(without=lost) == 20


def test_replicas_without_copies_are_said_to_go_on_from_the_other_replica() -> None:
    pair = Pair(twins=True)
    pair.hear(local=[20, 23], peer=[])
    assert pair.survives() == 23
    assert pair.goes_on_from(without=1) == 23


_SOME_STEPS = st.frozensets(st.integers(1, 6))


@given(
    twins=st.booleans(),
    local=st.tuples(_SOME_STEPS, _SOME_STEPS),
    peer=st.tuples(_SOME_STEPS, _SOME_STEPS),
)
def test_after_the_loss_of_any_node_a_run_goes_on_from_no_older_step_than_was_said(
    twins: bool,
    local: tuple[frozenset[int], frozenset[int]],
    peer: tuple[frozenset[int], frozenset[int]],
) -> None:
    pairs = Pair(twins=twins), Pair(twins=twins)
    for pair in pairs:
        pair.report(local, peer)
    said = pairs[0].survives()
    commits = {id.step for id in pairs[0].ledger.commits()}
    outcomes = {pair.goes_on_from(without=lost) for lost, pair in enumerate(pairs)}
    assert said is None or min(outcomes) >= said
    if outcomes <= commits:
        assert min(outcomes) == said, "nor is less said than is so"


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
