"""What a leader reports of its run, and what it does with the operator's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keepstep.core.history import Badput
from keepstep.core.shard import Ranks
from keepstep.leader.leader import Leader
from keepstep.leader.run_report import build_run_report, fit_to_size
from keepstep.steps import Tier
from keepstep.wire.member_reports import ReportedGoodput, ReportedVolume
from keepstep.wire.run_reports import (
    LARGEST_BYTES,
    AdvisoryKind,
    KeptStep,
    MemberState,
    RestoreFromState,
    RunReport,
)
from keepstep.wire.status import RemoteTierProgress
from tests.leader.plays import FIRST, IMAGE_BYTES, T0, WAY_OUT, Play, Sidecar, later, member, step


def two(**of_both: object) -> tuple[Sidecar, Sidecar]:
    return Sidecar(rank=0, **of_both), Sidecar(rank=1, **of_both)  # type: ignore[arg-type]


def kinds(report: RunReport) -> list[AdvisoryKind]:
    return [doubt.kind for doubt in report.doubts]


def text(report: RunReport, kind: AdvisoryKind) -> str:
    return next(doubt.text for doubt in report.doubts if doubt.kind is kind)


# --- the report ----------------------------------------------------------------------------------


def test_a_report_contains_the_full_state_of_a_run() -> None:
    a, b = two()
    a.saved(8, 9).staged(10)
    b.saved(8, 9).staged(10)
    a.archive, b.archive = [step(8)], [step(8)]
    full = ReportedVolume(engine="direct", used_bytes=3, free_bytes=1, name="nvme")
    b.more["volumes"] = (full,)
    play = Play(a, b, archive_every=8)
    report = play.post()
    assert report == RunReport(
        leader="leader-1",
        sequence=2,
        world=2,
        alive=2,
        known=2,
        settled=True,
        epochs=(FIRST,),
        step=10,
        behind=1,
        committed=step(9),
        commits=(step(8), step(9)),
        watermarks={Tier.MEMORY: step(10), Tier.LOCAL: step(9), Tier.ARCHIVE: step(8)},
        held_by=(Tier.MEMORY, Tier.LOCAL),
        kept=(
            KeptStep(
                step=str(step(8)),
                ranks=2,
                tiers=(Tier.LOCAL, Tier.ARCHIVE),
                size_bytes=2 * IMAGE_BYTES,
            ),
        ),
        certain=True,
        archived=1,
        safe=replace(
            report.safe, restart=step(10), node=step(8), pod=step(8), archived=step(8),
            sole=("node-0", "node-1"),
        ),
        fullest=0.75,
        sidecar="0.1.0",
        library="0.1.0",
        pinned="mlock",
        restore_known=report.restore_known,
        nodes=report.nodes,
        record=report.record,
    )  # fmt: skip
    first, second = report.nodes
    assert (first.node_rank, first.pod, first.node, first.ranks) == (0, "pod-0", "node-0", "0")
    assert (second.memory, second.local, second.state) == (10, 9, MemberState.CONNECTED)
    assert [(holder.node, holder.node_ranks, holder.step) for holder in report.record.holders] == [
        ("node-0", "0", 9),
        ("node-1", "1", 9),
    ]


def test_the_largest_run_fits_into_a_report() -> None:
    warnings = tuple("w" * 500 for _ in range(10))
    sidecars = [
        Sidecar(rank=rank, world=600, more={"warnings": warnings}).saved(1) for rank in range(600)
    ]
    for sidecar in sidecars:
        sidecar.archive = [step(number) for number in range(150)]
    report = Play(*sidecars, archive_every=1).post()  # within all bounds: see `Play.observe`
    assert (report.archived, len(report.kept), len(report.nodes)) == (150, 100, 64)
    assert report.kept[0].step == str(step(149))


def test_a_report_that_is_too_large_is_truncated_and_marked_as_uncertain() -> None:
    a, b = two()
    a.archive = b.archive = [step(number) for number in range(8)]
    report = Play(a.saved(8), b.saved(8), archive_every=1).post()
    cut = fit_to_size(report, lambda report: LARGEST_BYTES + len(report.kept) - 4)
    assert [checkpoint.step for checkpoint in cut.kept] == [
        str(step(number)) for number in (7, 6, 5, 4)
    ]
    assert (report.certain, cut.certain) == (True, False)
    assert (cut.doubts, cut.committed) == (report.doubts, report.committed)


def troubled(sidecar: Sidecar, tier: Tier, **progress: object) -> None:
    sidecar.more["tiers"] = {tier: RemoteTierProgress(where="there", **progress)}  # type: ignore[arg-type]


def never_saved(play: Play, a: Sidecar, b: Sidecar) -> None:
    pass


def stalls(play: Play, a: Sidecar, b: Sidecar) -> None:
    play.deliver(a.saved(1), b.staged(1))
    play.wait(601)


def loses_a_part(play: Play, a: Sidecar, b: Sidecar) -> None:
    play.deliver(a.saved(40, 50), b.saved(40, 50))
    play.leader.left(1)
    play.post(members=(member(a),), policy=replace(play.policy, outlives_pod=False))


def cannot_write(play: Play, a: Sidecar, b: Sidecar) -> None:
    b.more["volumes"] = (
        ReportedVolume(engine="", used_bytes=0, free_bytes=0, name="nvme", failed="no space"),
    )
    play.deliver(a.saved(1), b.staged(1))


def warns(play: Play, a: Sidecar, b: Sidecar) -> None:
    b.more["warnings"] = ("hugetlbfs is full",)
    play.deliver(a.staged(1), b.staged(1))


def refuses(play: Play, a: Sidecar, b: Sidecar) -> None:
    b.more |= {"refusals": 2, "refused": "no common step"}
    play.deliver(a.saved(1), b.saved(1))


def no_peer(play: Play, a: Sidecar, b: Sidecar) -> None:
    play.post(policy=replace(play.policy, replicas=1))
    b.more["peer_address"] = ""
    play.deliver(a.saved(1), b.saved(1))


def archive_is_away(play: Play, a: Sidecar, b: Sidecar) -> None:
    troubled(b, Tier.ARCHIVE, trouble="403 from the bucket")
    play.deliver(a.saved(1), b.saved(1))


def peers_lag(play: Play, a: Sidecar, b: Sidecar) -> None:
    troubled(b, Tier.PEER, backlog=1, behind_s=301.0)
    play.deliver(a.saved(1), b.saved(1))


def lacks_ranks(play: Play, a: Sidecar, b: Sidecar) -> None:
    a.world = b.world = 3
    play.deliver(a.staged(1), b.staged(1))
    play.wait(61)


@pytest.mark.parametrize(
    ("happens", "kind", "doubt_text"),
    [
        (never_saved, AdvisoryKind.NOTHING_KEPT, "does the script call checkpointer.save(step)"),
        (stalls, AdvisoryKind.COMMIT_STALLED, "The volumes of pod worker-1 hold the oldest step"),
        (cannot_write, AdvisoryKind.COMMIT_STALLED, "volume nvme of pod worker-1 on node node-1"),
        (warns, AdvisoryKind.SIDECAR_TROUBLED, "pod worker-1 says: hugetlbfs is full"),
        (refuses, AdvisoryKind.RESTORE_REFUSED, "2 starts were refused: no common step"),
        (
            loses_a_part,
            AdvisoryKind.PART_GONE,
            f"begin again at step 0: {WAY_OUT}. 1 pods have not",
        ),
        (loses_a_part, AdvisoryKind.NOTHING_KEPT, None),
        (no_peer, AdvisoryKind.PEERS_NOT_SERVING, "pod worker-1 do not serve"),
        (archive_is_away, AdvisoryKind.ARCHIVE_TROUBLED, "pod worker-1 says: 403 from the bucket"),
        (peers_lag, AdvisoryKind.PEERS_BEHIND, "shards of pod worker-1 wait to be sent to there"),
        (lacks_ranks, AdvisoryKind.RANKS_ABSENT, "the run has 3 ranks, but its pods serve 2"),
    ],
)
def test_each_advisory_names_the_problem_and_its_location(
    happens: Callable[[Play, Sidecar, Sidecar], None], kind: AdvisoryKind, doubt_text: str | None
) -> None:
    a, b = two()
    play = Play(a, b)
    play.post()
    happens(play, a, b)
    report = play.observe()
    if doubt_text is None:
        assert kind not in kinds(report)
    else:
        assert doubt_text in text(report, kind)


def test_a_healthy_run_has_no_advisories() -> None:
    a, b = two()
    play = Play(a.saved(1), b.saved(1))
    assert play.post().doubts == ()
    play.wait(10_000)
    assert play.observe().doubts == (), "nothing is staged that is not committed"


# --- without an operator -------------------------------------------------------------------------


def test_steps_are_committed_and_retired_without_a_reply_of_the_operator() -> None:
    a, b = two()
    play = Play()
    play.deliver(a.saved(1, 2), b.saved(1))
    assert play.replies(a).commits == (step(1),)
    assert play.replies(a).retire == ()
    play.deliver(b.durable(2))
    assert (play.replies(a).commits, play.replies(a).retire) == ((step(1), step(2)), (step(1),))


def test_a_disconnected_member_stops_retirement_and_is_reported_missing_after_a_timeout() -> None:
    a, b = two()
    play = Play(a, b)
    play.post()
    play.deliver(a.saved(1, 2), b.saved(1, 2))
    play.leader.left(1)
    assert play.replies(a).retire == ()
    assert (play.observe().missing, play.observe().settled) == ("", False)
    play.wait(91)
    assert play.observe().missing == "1"
    assert play.observe().nodes[1].state is MemberState.SILENT


def test_two_pods_with_node_rank_0_never_lead_one_run() -> None:
    """Each may have a part of the members: neither retires anything."""
    a, b = two()
    old, new = Play(a.saved(1, 2)), Play(b.saved(1, 2))
    assert old.replies(a).retire == new.replies(b).retire == ()


# --- the record ----------------------------------------------------------------------------------


def goodput(productive: float, *, until: float) -> ReportedGoodput:
    return ReportedGoodput(
        id=f"{0:016x}", since=T0, until=until, epoch=FIRST.id, step=9, steps=10,
        productive_s=productive, badput=Badput(),
    )  # fmt: skip


def test_a_new_leader_continues_from_the_record_without_counting_restarts_twice() -> None:
    a, b = two()
    play = Play(a.saved(1), b.saved(1))
    play.post()
    a.more["goodput"] = goodput(100.0, until=T0 + 200)
    play.deliver(a, b)
    epoch = later(2, 1)
    play.deliver(a.restored(epoch, lost=3), b.restored(epoch, lost=2))
    play.wait(100)
    report = play.post()
    assert (report.record.restarts, report.record.lost_steps) == (1, 2)
    assert report.recent[0].message == "restored step 1 from memory in 1.5 s; 2 steps lost"
    play.wait(100)
    assert play.post().record.goodput.productive_seconds == 100  # type: ignore[union-attr]

    play.lead()
    a.more["goodput"] = goodput(150.0, until=T0 + 250)
    play.deliver(a, b)
    play.wait(60)
    first = play.observe()
    assert (first.sequence, first.record.restarts, first.recent) == (1, 0, ())
    play.post()
    play.wait(60)
    record = play.observe().record
    assert (record.restarts, record.lost_steps) == (1, 2)
    assert record.goodput is not None
    assert (record.goodput.productive_seconds, record.goodput.wall_seconds) == (150, 250)


def test_an_invalid_field_in_an_edited_record_is_ignored() -> None:
    a, b = two()
    play = Play()
    wrong = replace(play.record, counted="once", restore_from=RestoreFromState(asked="x", step="y"))
    play = Play(a.saved(1), b.saved(1), record=wrong)
    assert play.post().committed == step(1)


# --- pods and nodes ------------------------------------------------------------------------------


def test_losing_the_last_step_with_a_deleted_pod_is_reported_and_a_new_pod_replaces_it() -> None:
    a, b = two()
    play = Play(a, b, outlives_pod=False)
    play.post()
    play.deliver(a.saved(40, 50), b.saved(40, 50))
    play.post()
    play.leader.left(1)
    assert play.observe().safe.restart == step(50), "it may be there still"
    report = play.post(members=(member(a),))
    assert (report.safe.restart, report.nodes[1].state) == (None, MemberState.GONE)
    assert report.recent[0].type == "LastStepLost"
    assert f"restarts wait for what is missing. To begin again at step 0: {WAY_OUT}" in (
        report.recent[0].message
    )
    play.deliver(Sidecar(rank=1, pod="pod-1-new", started_at=T0 + 1))
    report = play.observe()
    assert (report.committed, report.nodes[1].pod) == (None, "pod-1-new")
    assert (
        text(report, AdvisoryKind.COMMIT_LOST) == "step 50 was committed, and a part of it is gone"
    )


def test_a_step_lost_with_a_pod_is_reported_even_if_its_successor_connects_first() -> None:
    a, b = two()
    play = Play(a.saved(50), b.saved(50), outlives_pod=False)
    play.post()
    play.leader.left(1)
    new = Sidecar(rank=1, pod="pod-1-new", started_at=T0 + 1)
    play.deliver(new)
    assert [event.type for event in play.observe().recent] == ["LastStepLost"]
    play.post(members=(member(a), member(new)))
    play.deliver(new)
    assert [event.type for event in play.observe().recent] == ["LastStepLost"], "once"


def test_no_step_is_reported_lost_when_the_volumes_outlive_the_pod() -> None:
    play, _, _, _ = moved()
    assert "LastStepLost" not in [event.type for event in play.observe().recent]
    play.post()
    assert "LastStepLost" not in [event.type for event in play.observe().recent]


@pytest.mark.parametrize("seen_leaving", [True, False])
def test_a_pod_that_ends_while_it_is_deleted_is_deleted_and_one_that_fails_is_not(
    seen_leaving: bool,
) -> None:
    for deleted in (True, False):
        a, b = two()
        play = Play(a.saved(50), b.saved(50), outlives_pod=False)
        play.post()
        if deleted and seen_leaving:
            play.post(members=(member(a), replace(member(b), leaving=True)))
        play.leader.left(1)
        report = play.post(members=(member(a), replace(member(b), over=True, leaving=deleted)))
        assert ([event.type for event in report.recent] == ["LastStepLost"]) is deleted


def test_a_restarted_operator_does_not_report_unlisted_pods_as_deleted() -> None:
    a, b = two()
    play = Play(a.saved(1), b.saved(1), outlives_pod=False)
    play.post()
    play.leader.left(1)
    assert play.post(members=(), complete=False).safe.restart == step(1)
    assert play.post(members=(member(a),), complete=True).safe.restart is None


def test_a_connected_member_counts_as_present_although_the_operator_does_not_list_it() -> None:
    a, b = two()
    play = Play(a.saved(1), b.saved(1), outlives_pod=False)
    assert play.post(members=(), complete=True).safe.restart == step(1)


def moved() -> tuple[Play, Sidecar, Sidecar, Sidecar]:
    """Two pods on hostPath volumes, step 40 committed; then the second one moves."""
    a, b = two()
    play = Play(a, b)
    play.post()
    play.deliver(a.saved(40), b.saved(40))
    play.leader.left(1)
    new = Sidecar(rank=1, pod="pod-1-new", node="node-2", started_at=T0 + 9, epochs=[])
    play.deliver(new)
    play.answer = replace(play.answer, members=(member(a), member(new)))
    return play, a, b, new


def test_a_rescheduled_pod_waits_for_the_agent_of_its_old_node_if_one_exists() -> None:
    play, a, _, new = moved()
    assert "whose agent is not ready" in play.replies(new).awaits, "nobody was asked yet"
    assert play.replies(a).awaits == ""
    report = play.post()
    assert kinds(report) == [AdvisoryKind.PART_GONE, AdvisoryKind.LEFT_NOT_SERVED]
    assert play.replies(new).awaits == "", "there are no agents"
    play.post(agents={"node-1": ""})
    assert "whose agent is not ready" in play.replies(new).awaits
    report = play.post(agents={"node-1": "10.1.0.1:26741"})
    assert (play.replies(new).agents, play.replies(new).awaits) == (
        {"node-1": "10.1.0.1:26741"},
        "",
    )
    assert play.replies(a).agents == {}, "only who left something is told"
    assert report.committed == step(40), "it lies there still"
    assert text(report, AdvisoryKind.LEFT_SERVED) == (
        "shards of node ranks 1 are served by the agent of node node-1"
    )
    events = [event for event in play.post().recent if event.type == "LeftShardsServed"]
    assert [event.message for event in events] == [text(report, AdvisoryKind.LEFT_SERVED)], "once"
    assert [(holder.node, holder.node_ranks) for holder in report.record.holders] == [
        ("node-1", "1"),
        ("node-0", "0"),
    ]


def test_a_new_leader_still_uses_shards_on_a_node_without_pods_of_the_run() -> None:
    play, a, _, new = moved()
    play.post()
    play.wait(40)
    play.post()
    play.lead()
    play.deliver(a, new)
    play.post(agents={"node-1": "10.1.0.1:26741"})
    assert play.replies(new).agents == {"node-1": "10.1.0.1:26741"}


def test_members_use_the_agent_of_a_former_node_until_a_newer_step_is_committed() -> None:
    play, a, _, new = moved()
    play.post(agents={"node-1": "10.1.0.1:26741"})
    epoch = later(2, 40)
    play.deliver(a.restored(epoch).staged(41, epoch=epoch))
    play.deliver(new.restored(epoch).saved(41, epoch=epoch))
    assert play.replies(new).agents
    play.deliver(a.durable(41, epoch=epoch), new)
    assert play.replies(new).agents == {}
    assert [holder.node for holder in play.observe().record.holders] == ["node-0", "node-2"]


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_newer_image_on_a_replica_replaces_the_agent_only_if_the_policy_has_peers(
    replicas: int,
) -> None:
    """Without the rank's own generators it is not what the agent serves."""
    a, b = two()
    a.alike = b.alike = Ranks.of([0, 1])
    play = Play(a, b, replicas=replicas)
    play.post()
    play.deliver(a.saved(40), b.saved(40))
    play.deliver(a.saved(41))
    play.leader.left(1)
    new = Sidecar(rank=1, pod="pod-1-new", node="node-2", started_at=T0 + 9, epochs=[])
    play.deliver(new, a)
    play.post(members=(member(a), member(new)), agents={"node-1": "10.1.0.1:26741"})
    assert bool(play.replies(new).agents) == (not replicas)


def test_no_member_waits_for_the_agent_of_a_deleted_node() -> None:
    play, _, _, new = moved()
    report = play.post(agents={"node-1": ""}, lost_nodes=("node-1",))
    assert play.replies(new).awaits == ""
    assert AdvisoryKind.LEFT_NOT_SERVED not in kinds(report)
    assert report.committed is None


def test_a_replaced_drive_is_reported() -> None:
    def drive(number: int) -> tuple[ReportedVolume, ...]:
        drive_id = f"{number:036x}@{0:016x}"
        plain = {"engine": "direct", "used_bytes": 0, "free_bytes": 9}
        return (ReportedVolume(**plain, name="nvme", drive_id=drive_id),)  # type: ignore[arg-type]

    a, b = two()
    a.more["volumes"], b.more["volumes"] = drive(1), drive(2)
    play = Play(a, b)
    play.post()
    play.deliver(a.saved(1), b.saved(1))
    play.post()
    a.started_at = b.started_at = T0 + 5
    b.more["volumes"], b.local, b.memory, a.memory = drive(3), [], [], []
    play.leader.left(0)
    play.leader.left(1)
    play.deliver(a, b)
    report = play.observe()
    assert report.recent[0].type == "OtherDrive"
    assert "volume nvme of pod worker-1 lies on another file system" in report.recent[0].message
    assert WAY_OUT in report.recent[0].message


@pytest.mark.parametrize(("domains", "buddy"), [(("x", "x", "y"), "2"), (("x", "y", "x"), "1")])
def test_a_peer_for_copies_is_chosen_from_another_failure_domain(
    domains: tuple[str, ...], buddy: str
) -> None:
    three = [Sidecar(rank=rank, world=3).saved(1) for rank in range(3)]
    play = Play(*three, replicas=1)
    named = (member(sidecar, domain=domain) for sidecar, domain in zip(three, domains, strict=True))
    report = play.post(members=tuple(named))
    assert report.nodes[0].buddies == buddy
    assert [peer.node_rank for peer in play.replies(three[0]).peers if peer.buddy] == [int(buddy)]


def test_copy_peers_are_assigned_once_all_pods_are_known_and_survive_a_pod_restart() -> None:
    a, b, c = (Sidecar(rank=rank, world=3).saved(1) for rank in range(3))
    play = Play(a, b, replicas=1)
    assert [node.buddies for node in play.observe().nodes] == ["", ""]
    play.deliver(c)
    ring = [node.buddies for node in play.observe().nodes]
    assert ring == ["1", "2", "0"]
    play.leader.left(1)
    assert [node.buddies for node in play.post(members=(member(a), member(c))).nodes] == ring


# --- what is asked -------------------------------------------------------------------------------


def test_a_run_rolls_back_once_to_the_requested_step() -> None:
    a, b = two()
    play = Play(a.saved(1, 2), b.saved(1, 2))
    report = play.post(restore_from="1")
    assert report.record.restore_from == RestoreFromState(asked="1", step=str(step(1)), since=1)
    assert not report.restore_known
    for sidecar in (a, b):
        reply = play.replies(sidecar)
        assert (reply.restore_from, reply.plan, step(1) in reply.pinned) == (step(1), step(1), True)
        assert reply.retire == ()
    play.deliver(a, b)
    assert play.post().restore_known
    epoch = later(2, 1)
    play.deliver(a.restored(epoch), b.restored(epoch))
    report = play.observe()
    message = f"epoch {epoch.id} went on from step 1, as spec.restoreFrom asked"
    assert [event.message for event in report.recent if event.type == "RolledBack"] == [message]
    assert play.replies(a).restore_from is None
    play.lead()
    play.deliver(a, b)
    play.post()
    assert play.replies(a).restore_from is None, "it is done, also for the next leader"


@pytest.mark.parametrize(
    ("asked", "run", "meant"),
    [
        ("2", "", str(step(2))),
        ("gpt/2", "", str(step(2))),
        (str(step(2)), "", str(step(2))),
        ("3", "", ""),
        ("other/2", "other", ""),
        ("yesterday", "", ""),
    ],
)
def test_a_rollback_can_be_requested_by_step_number_or_id(asked: str, run: str, meant: str) -> None:
    a, b = two()
    found = Play(a.saved(1, 2), b.saved(1, 2)).post(restore_from=asked).record.restore_from
    assert found is not None
    assert (found.asked, found.run, found.step) == (asked, run, meant)


def test_pinned_steps_are_kept_and_others_are_retired() -> None:
    a, b = two()
    play = Play(a.saved(1, 2, 3), b.saved(1, 2, 3))
    report = play.post(pins=(step(1),))
    assert [checkpoint.step for checkpoint in report.kept] == [str(step(1))]
    assert (play.replies(a).pinned, play.replies(a).retire) == ((step(1),), (step(2),))
    play.post(pins=())
    assert play.replies(a).retire == (step(1), step(2))


def test_a_paused_run_retires_nothing_and_plans_no_restore() -> None:
    a, b = two()
    play = Play(a.saved(1, 2), b.saved(1, 2))
    play.post(paused=True)
    assert (play.replies(a).retire, play.replies(a).plan) == ((), None)
    play.post(paused=False)
    assert play.replies(a).retire == (step(1),)


def test_a_terminating_pod_is_announced_to_all_members() -> None:
    a, b = two()
    play = Play(a, b)
    play.post(members=(member(a), member(b, leaving=True)))
    assert play.replies(a).leaving
    play.post(members=(member(a), member(b, leaving=True, over=True)))
    assert not play.replies(a).leaving


def test_a_terminating_member_is_announced_to_all_members_without_an_operator() -> None:
    a, b = two()
    play = Play(a, b)
    b.leaving = True
    play.deliver(b)
    assert play.replies(a).leaving
    play.leader.left(1)
    assert not play.replies(a).leaving


def begun_again(play: Play, a: Sidecar, b: Sidecar) -> None:
    """All begin at step 0, although step 5 is still at one of them."""
    again = later(2, None)
    a.local = [step(5)]
    play.deliver(a.restored(again, tier=None), b.restored(again, tier=None))


def test_a_start_at_step_0_is_no_longer_reported_once_it_is_acknowledged() -> None:
    a, b = two()
    play = Play(a.staged(5), b.staged(5))
    play.post()
    begun_again(play, a, b)
    fresh = play.observe()
    assert (fresh.fresh, fresh.acknowledged) == ("0002.bbbbbbbb", "")
    report = play.post(fresh_start="newest")
    assert (report.fresh, report.acknowledged) == ("", "0002.bbbbbbbb")


def test_a_user_can_allow_a_single_start_at_step_0() -> None:
    a, b = two()
    play = Play(a, b)
    play.post(fresh_start="allow")
    assert play.replies(a).begin_again
    begun_again(play, a, b)
    report = play.observe()
    assert (report.fresh, report.acknowledged) == ("", "0002.bbbbbbbb")
    assert play.replies(a).begin_again, "until it has a step that all hold"
    play.deliver(*(sidecar.saved(0, epoch=later(2, None)) for sidecar in (a, b)))
    play.observe()
    assert not play.replies(a).begin_again


@pytest.mark.parametrize(
    ("restarts", "outlives", "gone"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_shards_deleted_with_their_pod_count_as_lost_only_if_the_policy_restarts_at_step_0(
    restarts: bool, outlives: bool, gone: bool
) -> None:
    a, b = two()
    play = Play(a.saved(1), b.saved(1), restarts=restarts, outlives_pod=outlives)
    play.post()
    assert play.replies(a).gone_for_good is gone


def test_the_next_commit_is_archived_in_place_of_a_due_step_that_was_never_committed() -> None:
    a, b = two()
    play = Play(a.saved(9), b.saved(9), archive_every=10)
    play.post()
    play.deliver(a.saved(11), b.saved(11))
    assert play.replies(a).archive == step(11)
    a.archive = b.archive = [step(11)]
    play.deliver(a, b)
    assert play.replies(a).archive is None


def test_a_run_without_an_operator_counts_its_restarts() -> None:
    play = Play()
    play.leader = Leader(life="one", nodes=1, policy=play.policy)
    alone = Sidecar(rank=0, world=1).saved(1)
    for _ in range(2):
        play.leader.take(0, replace(alone.report(), nodes=1), at=play.now)
        alone.restored(later(2, 1))
    play.leader.advance_clock(at=play.now)
    assert build_run_report(play.leader, sequence=2, at=play.now).record.restarts == 1
