"""What the leader alone can see and a person should know, as sentences. Pure.

A sentence has no number that changes with each report, since each change is written to an API
server.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from keepstep.core.ledger import RestartAction
from keepstep.errors import few
from keepstep.leader.leader import Leader
from keepstep.leader.left_shards import SERVED, describe_left_shards
from keepstep.leader.node_rank_states import NodeRankState
from keepstep.steps import Tier
from keepstep.wire.run_reports import Advisory, AdvisoryKind, format_utc
from keepstep.wire.status import RemoteTierProgress

FIRST_COMMIT_S: Final = 600.0
SLOWEST_COMMIT_S: Final = 120.0
INTERVALS: Final = 5.0
"""Commits are stalled after this many times the interval between the last two."""
ABSENT_S: Final = 60.0
"""How long all trainers must be there before a rank that no sidecar has is taken for absent."""
BEHIND_S: Final = {Tier.PEER: 300.0, Tier.ARCHIVE: 1800.0}
"""How long a shard may wait to be sent before it is said."""
_TEXT: Final = 200
_NAMED: Final = 3
_ONWARD: Final = "Training goes on; a restart goes back to the last commit"


def current_advisories(leader: Leader, *, behind: int | None, at: float) -> tuple[Advisory, ...]:
    """All that holds now. `behind`: see `RunReport`."""
    return tuple(
        Advisory(kind=kind, text=text)
        for kind, text in (
            *_commits(leader, behind, at),
            *_refused(leader),
            *_kept(leader),
            *_tier(leader, Tier.PEER, AdvisoryKind.PEERS_TROUBLED, AdvisoryKind.PEERS_BEHIND),
            *_not_serving(leader),
            *_tier(
                leader, Tier.ARCHIVE, AdvisoryKind.ARCHIVE_TROUBLED, AdvisoryKind.ARCHIVE_BEHIND
            ),
            *_left(leader),
            *_absent(leader, at),
        )
    )


DoubtTexts = Iterator[tuple[AdvisoryKind, str]]


def _there(leader: Leader) -> Iterator[tuple[str, NodeRankState]]:
    """The places that are not gone, by node rank, and what people call them."""
    for rank, place in sorted(leader.ledger.places.items()):
        if not place.gone:
            yield leader.requests.pod_name_of(rank), place


def _warned(leader: Leader) -> str:
    """The first warning of the sidecar with the lowest node rank that has one; '' if none has."""
    for name, place in _there(leader):
        if place.sidecar.warnings:
            return f"the sidecar of {name} says: {place.sidecar.warnings[0]}"
    return ""


# --- commits -------------------------------------------------------------------------------------


def _commits(leader: Leader, behind: int | None, at: float) -> DoubtTexts:
    history = leader.history
    if stalled := _failed_volume(leader) or _stalled(leader, behind, at):
        yield AdvisoryKind.COMMIT_STALLED, stalled
    if history.commit is None and history.commit_lost is not None:
        lost = f"step {history.commit_lost.step} was committed, and a part of it is gone"
        if leader.requests.restart_outlook().restart is not RestartAction.GOES_ON:
            yield AdvisoryKind.COMMIT_LOST, lost
    elif history.commit is None and (warned := _warned(leader)):
        text = f"no step was committed yet; {warned}. Training goes on"
        yield AdvisoryKind.SIDECAR_TROUBLED, text


def _failed_volume(leader: Leader) -> str:
    for name, place in _there(leader):
        for volume in filter(attrgetter("failed"), place.sidecar.volumes):
            return (
                f"volume {volume.name[:64]} of {name} on node {place.node} takes no writes"
                f" ({volume.failed[:_TEXT]}): free space on it or replace the drive, then delete"
                f" the pod. {_ONWARD}"
            )
    return ""


def _stalled(leader: Leader, behind: int | None, at: float) -> str:
    since, patience_s = _patience(leader)
    every = leader.requests.policy.persist_every
    overdue = every is None or (behind or 0) > 2 * every  # time alone says nothing then
    if since is None or not behind or at - since < patience_s or not overdue:
        return ""
    return f"no step became committed since {format_utc(since)} although steps are staged. " + (
        _what_hinders(leader)
    )


def _patience(leader: Leader) -> tuple[float | None, float]:
    """Since when a commit is due, and how long to wait for it. Time without trainers does not
    count."""
    commit, alive_since = leader.history.commit, leader.history.alive_since
    if commit is None or alive_since is None:
        return alive_since, FIRST_COMMIT_S
    since = max(commit.at, alive_since)
    if commit.interval_s is None:
        return since, FIRST_COMMIT_S
    return since, max(SLOWEST_COMMIT_S, INTERVALS * commit.interval_s)


def _what_hinders(leader: Leader) -> str:
    """The likeliest reason why no step becomes committed."""
    if missing := leader.list_unconnected_node_ranks():
        names = [*map(leader.requests.pod_name_of, missing)]
        return f"No connection from {few(names, _NAMED)}. {_ONWARD}"
    if warned := _warned(leader):
        return f"{warned[0].upper()}{warned[1:]}. {_ONWARD}"
    newest = {
        rank: leader.ledger.newest_of_slowest_rank(rank)
        for rank, place in leader.ledger.places.items()
        if place.ranks.all and not place.gone
    }
    if not newest:
        return _ONWARD
    slowest = min(newest, key=lambda rank: (newest[rank], rank))
    name = leader.requests.pod_name_of(slowest)
    return f"The volumes of {name} hold the oldest step. {_ONWARD}"


def _refused(leader: Leader) -> DoubtTexts:
    times, why = max(
        ((place.sidecar.refusals, place.sidecar.refused) for _, place in _there(leader)),
        default=(0, ""),
    )
    if times:
        starts = "1 start was" if times == 1 else f"{times} starts were"
        yield AdvisoryKind.RESTORE_REFUSED, f"{starts} refused: {why}"


def _absent(leader: Leader, at: float) -> DoubtTexts:
    """Ranks that the trainers speak of and no sidecar has: their pods do not ask for keepstep."""
    ledger, since = leader.ledger, leader.history.alive_since
    serving = sum(place.own_ranks.bit_count() for _, place in _there(leader))
    world = ledger.world or 0
    if (
        since is None
        or at - since < ABSENT_S
        or serving >= world
        or leader.list_unconnected_node_ranks()
    ):
        return
    if any(not place.alive or place.gone for place in ledger.places.values()):
        return
    yield (
        AdvisoryKind.RANKS_ABSENT,
        f"the run has {world} ranks, but its pods serve {serving}: the other ranks"
        " have no sidecar, so no step can become committed. Give the annotation keepstep.dev/policy"
        " to every pod template of the job, and make its pods again",
    )


# --- what is kept --------------------------------------------------------------------------------


def _kept(leader: Leader) -> DoubtTexts:
    """Nothing if a restart goes on from a step. Otherwise, what it does by the ranks' own rule."""
    asked = leader.requests
    outlook = asked.restart_outlook()
    if outlook.restart is RestartAction.GOES_ON:
        return
    gone = [place for place in leader.ledger.places.values() if place.gone]
    if outlook.restart is RestartAction.BEGINS or not (gone or leader.ledger.settled):
        yield (
            AdvisoryKind.NOTHING_KEPT,
            "no step is held by all ranks yet: a crash now begins at step 0. This is usual until"
            " the first save; if it stays so, "
            + (_warned(leader) or "does the script call checkpointer.save(step) on every rank?"),
        )
        return
    newest = outlook.step.step if outlook.step else 0
    lost = f"of step {newest}, and of every other step, a part is gone"
    drives = asked.replaced_drives_text
    if asked.is_missing_data_lost:
        what = f": {drives}. The" if drives else " with its pod: the"
        text = f"{lost} for good{what} next start begins again at step 0"
    else:
        other = f" ({drives})" if drives else ""
        text = (
            f"{lost}{other}: starts wait until it is back. To begin again at step 0:"
            f" {asked.way_out}"
        )
    if gone:
        text += f". {len(gone)} pods have not come back: look at the job"
    yield AdvisoryKind.PART_GONE, text


# --- tiers beyond the pods -----------------------------------------------------------------------


def _tier(leader: Leader, tier: Tier, troubled: AdvisoryKind, late: AdvisoryKind) -> DoubtTexts:
    """Trouble with a tier while shards wait to be sent there. Trouble with a shared one counts even
    if none wait: those that waited may have been retired."""
    again = "The sidecar tries again until it works; training goes on"
    waiting: list[tuple[str, RemoteTierProgress]] = [
        (name, place.sidecar.tiers[tier])
        for name, place in _there(leader)
        if tier in place.sidecar.tiers
    ]
    for name, progress in waiting:
        if progress.trouble and (progress.backlog or tier.shared):
            yield troubled, f"the sidecar of {name} says: {progress.trouble[:_TEXT]}. {again}"
            return
    for name, progress in waiting:
        if progress.backlog and progress.behind_s >= BEHIND_S[tier]:
            where = progress.where[:_TEXT]
            yield late, f"shards of {name} wait to be sent to {where} for long. {again}"
            return


def _not_serving(leader: Leader) -> DoubtTexts:
    mute = [name for name, place in _there(leader) if not place.sidecar.peer_address]
    if leader.requests.policy.replicas and mute:
        text = f"{few(mute, _NAMED)} do not serve their peers yet, so no copy can be sent to them"
        yield AdvisoryKind.PEERS_NOT_SERVING, text


def _left(leader: Leader) -> DoubtTexts:
    left = leader.requests.left_shards
    if unserved := describe_left_shards(
        left.unserved_shards, "not served, as no agent is ready, on node"
    ):
        yield AdvisoryKind.LEFT_NOT_SERVED, unserved
    if served := describe_left_shards(left.served_shards, SERVED):
        yield AdvisoryKind.LEFT_SERVED, served
