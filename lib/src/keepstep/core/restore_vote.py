"""The vote that every restart begins with: which step do all ranks restore?

Every rank says what it can restore (`Candidates`), as soon as its sidecar knows enough
(`vote_readiness`). Every rank evaluates all votes with the same pure function (`choose_step`), so
all reach the same decision without a coordinator. A step that fails its verification on any rank is
added to `excluded`, and all ranks vote again.

A rank can go on from an image of its own, if as many ranks saved the step as run now. Or it can go
on from an *offer*: a step of any world size of which its sidecar can bring every byte. The newest
step that every rank can go on from wins, in whichever way each rank does it. There is one
exception: where twins would stand in for some ranks, an exact step that is nearby comes first
(`_preferred`). Suspect steps are passed over (`keepstep.core.suspicion`).

A rank that can go on from nothing may still be *lent* a step: if what all sidecars can bring
together covers every box, the other ranks send it what it needs. So a run goes on from the pods
that are left, as long as these hold the whole state. A rank whose own image another sidecar has is
lent it, too, rather than going on from a twin's: machines may come back in another order.

If no step is left, the run begins at step 0 only where nothing was kept, or where what was kept
cannot come back (`_is_gone`), or where a person asked for it. Otherwise the vote refuses: storage
that is missing may come back.

If a rank votes too early, the run begins at step 0 or goes on from an old step, although another
pod or the archive has a newer one. If it waits for ever, the training stops. So every wait has a
deadline, except the wait for the scan of the volumes. All deadlines are defined here. The caller
asks again when something has changed, or at `Wait.until`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.core.commit_rule import EpochLineage, StepLiveness, is_full, trace_lineage
from keepstep.core.shard import NO_RANKS, Ranks
from keepstep.core.suspicion import Failure, SuspectSteps
from keepstep.errors import NothingCommonError, RestoreError, WorldChangedError, few
from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, StepId, Tier, TierAnswer

MOST_EPOCHS = 64
"""The most epochs that a vote carries, the newest: as far back as a step is lent."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A sealed image of this rank, on the nearest tier that holds it."""

    id: StepId
    tier: Tier
    world: int


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A step of whose boxes the sidecar can bring those of all saved ranks, or a part: those of
    `ranks`.

    `tier`: the farthest tier that is needed. `images`: the saved ranks whose own images are among
    them; of the other ranks, a twin has the boxes.
    """

    id: StepId
    tier: Tier
    world: int
    images: Ranks = NO_RANKS
    ranks: Ranks | None = None

    def restorable_rank_mask(self) -> int:
        """Bitmap of the saved ranks whose boxes it can bring."""
        return (1 << self.world) - 1 if self.ranks is None else self.ranks.bits


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What one rank can restore: its vote.

    `candidates`: images of this rank. Dead and retired steps are not listed. `highest_epoch`: the
    highest epoch number ever seen here, 0 for none. `plan`: the step that the ledger would restore;
    a hint, already being fetched and hashed. `reason` explains `Answer.UNKNOWN`. `offers`: steps of
    which this sidecar can bring every byte of every rank, for ranks that cannot use an image of
    their own.

    `wanted`: the step that a person wants to go back to, as text; '' for the newest. `limit`: that
    step, None if it is not known here. Nothing newer is used and, where `exact`, nothing older.

    `failures`: recorded failures of the script itself, with the steps that they cast doubt on and
    that are not dead. `trusted`: pinned steps. `never_whole`: with `Answer.NONE`, as text, steps of
    which only some ranks have images.

    `parts`: what this sidecar can add to a step that it cannot bring alone. `epochs`: the newest
    epochs on record, from which the ranks together see which steps are dead.

    `fleeting`: what the pods of this run kept and no rank can reach is gone for good, with its pod
    or its drive, and the policy says to begin again then. `begin_again`: a person asked to begin at
    step 0 if no step can be restored. `way_out`: the command by which a person begins again, where
    a vote is refused.
    """

    answer: TierAnswer
    candidates: tuple[Candidate, ...] = ()
    highest_epoch: int = 0
    plan: StepId | None = None
    reason: str = ""
    offers: tuple[Offer, ...] = ()
    wanted: str = ""
    limit: StepId | None = None
    exact: bool = False
    failures: tuple[Failure, ...] = ()
    trusted: tuple[StepId, ...] = ()
    never_whole: str = ""
    parts: tuple[Offer, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    fleeting: bool = False
    begin_again: bool = False
    way_out: str = ""


NEVER = math.inf
"""The time of an event that has not happened yet."""

FIRST_ANSWER_S = 3.0
"""How long to wait for the leader's first answer. Without one, the newest step wins."""

HELD_S = 5.0
"""How long a rank that has an image in its pod waits to hear whether there is a newer one."""

START_S = 300.0
"""Trainers of one run begin up to this far apart, because some load data or compile first."""

NEWER_S = 60.0
"""How long a rank waits that has no image in its pod, but knows of images elsewhere: for the
leader to name the machines that may hold something newer. It waits as long if none answers."""

REACHABLE_S = 60.0
"""How long to wait for shards that the leader is making reachable. After that the vote says
UNKNOWN, the trainer fails with that reason, and its next start waits again."""

STALE_S = 5.0
"""A listing that is older than this when a vote begins is made again."""

WATCHED_S = 40.0
"""How long to wait until it is clear whether another run of the same name trains. The archive needs
25 s for that, and is listed every 5 s."""

LISTING_S = 20.0
"""How long to wait for the new listing. After that the old listing counts."""

ANSWERS_S = 6.0
"""How long to wait for tiers that do not answer, also counted from the leader's last word. When
all machines of a run begin at once, one may be asked before it serves."""


@dataclass(frozen=True, kw_only=True)
class VoteFacts:
    """What a sidecar knows when one of its ranks wants to vote.

    Times are of the caller's clock, `NEVER` for an event that has not happened.

    `scanned_at`: when the scan of the volumes ended. `held`: the rank has an image in this pod.
    `replied_at`: when the leader answered, or when it became clear that it does not. `led`: it does
    answer. `named_at`: when the leader last named the other machines. `introduced`: it has
    named all of them. `awaits`: the shards that it is making reachable, as text. `pods_unasked`:
    some machines were not asked since they were named.

    `tiers`: there are tiers beyond this machine. `listed_at`: when they were last listed. `known`:
    such a tier holds something. `unknown`: why some of them could not say what they hold.
    `uncertified`: this machine does not serve the others yet. `contested`: another run of this name
    may train, as the archive tells.
    """

    scanned_at: float
    replied_at: float
    tiers: bool = False
    listed_at: float = NEVER
    held: bool = False
    led: bool = False
    named_at: float = -NEVER
    introduced: bool = True
    awaits: str = ""
    pods_unasked: bool = False
    known: bool = False
    unknown: str = ""
    uncertified: bool = False
    contested: str = ""


@dataclass(frozen=True)
class Ready:
    """The rank may vote."""


@dataclass(frozen=True)
class Wait:
    """The rank may not vote before `until`, unless something changes.

    `why`: the reason, for people. `ask`: meanwhile, the caller must ask the tiers beyond this
    machine again.
    """

    until: float
    why: str
    ask: bool = False


def vote_readiness(now: float, view: VoteFacts, began: float) -> Ready | Wait:
    """Whether a vote that began at `began` may be cast now."""
    if view.scanned_at == NEVER:
        return Wait(NEVER, "the volumes are still being scanned")
    scanned = max(began, view.scanned_at)
    answered = max(scanned, min(view.replied_at, scanned + FIRST_ANSWER_S))
    if view.replied_at == NEVER and now < answered:
        return Wait(answered, "the leader of the run has not answered yet")
    if not view.tiers:
        return Ready()
    return next((wait for wait in _waits(view, answered) if now < wait.until), Ready())


def _waits(view: VoteFacts, answered: float) -> list[Wait]:
    """Everything that this vote waits for, each with its own deadline. `answered`: when it was
    known what this machine has and what the leader says."""
    named, latest = max(answered, view.named_at), answered + START_S
    searching = not view.held and not view.known
    waits: list[Wait] = []
    if view.listed_at == NEVER or view.pods_unasked:
        whom = "machines that were just named" if view.pods_unasked else "peers and archive"
        until = answered + HELD_S if view.held else latest
        waits.append(Wait(until, f"{whom} have not reported yet what they hold"))
    if view.contested:
        waits.append(Wait(min(answered + WATCHED_S, latest), view.contested))
    if view.awaits:
        waits.append(Wait(min(named + REACHABLE_S, latest), view.awaits))
    if not view.held and view.listed_at < answered - STALE_S:
        waits.append(Wait(answered + LISTING_S, "peers and archive are asked again", ask=True))
    if not view.held and not view.introduced:
        until = latest if searching and view.led else answered + NEWER_S
        why = "not all machines of the run have reported to the leader yet"
        waits.append(Wait(until, why, ask=searching and bool(view.unknown)))
    if view.unknown and (searching or view.uncertified):
        waits.append(Wait(min(named + ANSWERS_S, latest), view.unknown, ask=True))
    return waits


LAST_EARLY_STEP = 2
"""The highest number that the second step of a run can have: loops begin at 0 or at 1."""

_RANKS_NAMED = 8
_STEPS_NAMED = 3


class Decision(NamedTuple):
    """Restore `id`, each rank from its tier in `tiers`. `id` None: begin at step 0.

    `epoch_number`: the number of the epoch that begins now, higher than any that any rank has seen.
    `incomplete`: first steps that only some ranks hold; the run begins at step 0 without them.
    `lost`: the newest step of which something was left when the run had to begin again.
    `unsure`: the record of a later epoch is lost, so the run may have left `id` behind. Such a step
    is taken only where no other is left.
    `direct`: for each rank, whether it restores the image of its own rank. If not, it assembles its
    state from the images of all `world` ranks that saved the step.
    `lent`: for each rank, whether it gets the images from other ranks, because its own sidecar
    cannot bring them all. `lenders`: the ranks that show what their sidecars have, as few as cover
    the step; empty if no rank is lent anything.
    `suspects`: suspect steps newer than `id` that were passed over, oldest first.
    """

    id: StepId | None
    tiers: tuple[Tier, ...]
    epoch_number: int
    incomplete: tuple[StepId, ...] = ()
    direct: tuple[bool, ...] = ()
    world: int = 0
    suspects: tuple[StepId, ...] = ()
    lent: tuple[bool, ...] = ()
    lenders: tuple[int, ...] = ()
    lost: StepId | None = None
    unsure: bool = False

    def make_epoch(self, nonce: str) -> Epoch:
        """The epoch that begins now. `nonce`: 8 random hex digits, drawn by one rank for all."""
        return Epoch(EpochId(self.epoch_number, nonce), self.id)


class _Way(NamedTuple):
    """How one rank would restore a step: from an image of its own (`direct`), from an offer, or
    from what other ranks lend it (`lent`). `exact`: from its own image, here or lent."""

    tier: Tier
    world: int
    direct: bool
    lent: bool = False
    exact: bool = False


_Ways = dict[StepId, _Way]


def choose_step(
    votes: Sequence[Candidates],
    excluded: Collection[StepId] = (),
    *,
    limit: StepId | None = None,
    exact: bool = False,
    lending: bool = True,
) -> Decision:
    """Decide from the votes of all ranks, in rank order.

    `lending`: ranks can send each other images.
    `limit`: use no step that is newer, because a person or the script asked to go back to it.
    `exact`: use no older step either. With a limit, a run never begins at step 0, and no step
    counts as suspect, because the limit was asked for.

    Raises:
        WorldChangedError: the newest step has another world size, and not every rank's sidecar
            can bring all of it.
        NothingCommonError: ranks hold steps, but none can be restored by all.
        RestoreError: no step is common, and a rank does not know what it has; or all steps that
            were found failed their verification; or no common step is within the limit.
    """
    number = max((vote.highest_epoch for vote in votes), default=0) + 1
    allowed = _allowed(excluded, limit, exact=exact)
    distinct = {id(vote): vote for vote in votes}  # most ranks of a large world share one object
    made = {at: _ways(vote, len(votes), allowed) for at, vote in distinct.items()}
    different = list(distinct.values())
    lineage = _lineage(different)
    if lending:
        _lend(list(made.values()), different, allowed, lineage)
    ways = [made[id(vote)] for vote in votes]
    if lending:
        ways = _lend_own(ways, different)
    common = _common(list(made.values()))
    _check_world(votes, max(common, default=None), allowed)
    if common:
        left = common if limit is not None else _doubt(different).restorable(common)
        chosen = _preferred(ways, left)
        taken = [each[chosen] for each in ways]
        lent = tuple(way.lent for way in taken)
        return Decision(
            chosen,
            tuple(way.tier for way in taken),
            number,
            direct=tuple(way.direct for way in taken),
            world=taken[0].world,
            suspects=tuple(sorted(step_id for step_id in common - left if step_id > chosen)),
            lent=lent,
            lenders=_lenders(votes, chosen, taken) if any(lent) else (),
            unsure=limit is None and lineage.step_liveness(chosen) is StepLiveness.LOST,
        )
    if limit is not None:
        raise _rollback_error(votes, excluded, limit, exact=exact)
    if _all_none(votes) and not excluded:
        return Decision(None, (), number)
    if not excluded and _died_in_its_first_steps(votes):
        held = {candidate.id for vote in votes for candidate in vote.candidates}
        held |= {part.id for vote in votes for part in vote.parts}
        return Decision(None, (), number, tuple(sorted(held)))
    if any(vote.begin_again for vote in votes) or (not excluded and _is_gone(votes)):
        found = (candidate.id for vote in votes for candidate in (*_found(vote), *vote.parts))
        return Decision(None, (), number, lost=max(found, default=None))
    raise _refusal(votes, excluded)


def find_step_limit(
    votes: Sequence[Candidates], step: int | None = None
) -> tuple[StepId | None, bool]:
    """`limit` and `exact` for `choose_step`, taken from any vote that names them.

    A sidecar that was not told of a limit (or not yet) follows the others. `step`: the step that
    the script itself asks for; it counts only if no vote asks for one. Raises RestoreError if the
    request cannot be followed.
    """
    limits = {vote.limit for vote in votes if vote.limit is not None}
    if len(limits) > 1:
        raise RestoreError(
            f"ranks were asked to go back to different steps: {_named(limits)}; name one step,"
            " by its id"
        )
    if limits:
        return limits.pop(), any(vote.exact for vote in votes)
    requested = next((vote.wanted for vote in votes if vote.wanted), "")
    if not requested and step is not None:
        if (step_id := _of_number(votes, step)) is not None:
            return step_id, True
        requested = str(step)
    if requested:
        raise RestoreError(
            f"going back to step {requested} was asked for, but no rank knows of one that can be "
            f"restored. {_held(votes, ())}. Choose one that `keepstep steps` shows"
        )
    return None, False


def _of_number(votes: Sequence[Candidates], step: int) -> StepId | None:
    """The newest step with this number that all ranks see, else the newest that any of them sees;
    None if there is none."""
    seen = [
        {candidate.id for candidate in _found(vote) if candidate.id.step == step} for vote in votes
    ]
    common, some = set.intersection(*seen), set.union(*seen)
    return max(common or some, default=None)


def nothing_is_kept(votes: Sequence[Candidates]) -> bool:
    """Whether each of these ranks could look and found nothing, and none was asked to go back."""
    asked = any(vote.wanted or vote.limit for vote in votes)
    return _all_none(votes) and not asked


# --- what each rank can go on from ---------------------------------------------------------------


def _allowed(
    excluded: Collection[StepId], limit: StepId | None, *, exact: bool
) -> Callable[[StepId], bool]:
    if limit is None:
        return lambda step_id: step_id not in excluded
    if exact:
        return lambda step_id: step_id == limit and step_id not in excluded
    return lambda step_id: step_id <= limit and step_id not in excluded


def _ways(vote: Candidates, running: int, allowed: Callable[[StepId], bool]) -> _Ways:
    """By step, how this rank would restore it. An image of its own is preferred to an offer,
    because it needs no image of another rank."""
    ways = {
        offer.id: _Way(offer.tier, offer.world, False) for offer in vote.offers if allowed(offer.id)
    }
    own = (
        candidate
        for candidate in vote.candidates
        if candidate.world == running and allowed(candidate.id)
    )
    ways.update(
        {candidate.id: _Way(candidate.tier, candidate.world, True, exact=True) for candidate in own}
    )
    return ways


def _common(ways: Sequence[_Ways]) -> set[StepId]:
    """Steps that every rank can go on from. A step with two world sizes was saved by two writers
    and is left out."""
    if not ways:
        return set()
    ids = set(ways[0]).intersection(*ways[1:])
    return {step_id for step_id in ids if len({each[step_id].world for each in ways}) == 1}


def _shows(vote: Candidates) -> tuple[Offer, ...]:
    return (*vote.offers, *vote.parts)


def _lend(
    ways: Sequence[_Ways],
    votes: Sequence[Candidates],
    allowed: Callable[[StepId], bool],
    lineage: EpochLineage,
) -> None:
    """Add a way for each rank that has none to the steps that all sidecars together cover.

    A step that any record of epochs left behind is none: a sidecar that is new has no record, so it
    may list nothing wrong, but the others' records count for it.
    """
    shown: dict[StepId, list[Offer]] = {}
    for vote in votes:
        for offer in _shows(vote):
            if allowed(offer.id):
                shown.setdefault(offer.id, []).append(offer)
    missing = [step_id for step_id in shown if any(step_id not in each for each in ways)]
    for step_id in missing:
        dead = lineage.step_liveness(step_id) is StepLiveness.DEAD
        if dead or (world := _covered(shown[step_id])) is None:
            continue
        tier = max((offer.tier for offer in shown[step_id]), key=NEAREST_FIRST.index)
        for each in ways:
            each.setdefault(step_id, _Way(tier, world, direct=False, lent=True))


def _lineage(votes: Sequence[Candidates]) -> EpochLineage:
    """The line of the epochs that any of these ranks has on record."""
    known = {epoch.id: epoch for vote in votes for epoch in vote.epochs}
    seen = (candidate.id.epoch for vote in votes for candidate in (*_found(vote), *vote.parts))
    return trace_lineage(known, seen=seen)


def _lend_own(ways: Sequence[_Ways], votes: Sequence[Candidates]) -> list[_Ways]:
    """The ways of each rank, where a rank for which a twin would stand in is lent its own image if
    another sidecar shows that."""
    tiers: dict[StepId, dict[int, Tier]] = {}
    for vote in votes:
        for offer in _shows(vote):
            if offer.world == len(ways):
                found = tiers.setdefault(offer.id, {})
                found.update((rank, offer.tier) for rank in offer.images)
    return [
        {
            step_id: way._replace(tier=tiers[step_id][rank], lent=True, exact=True)
            if not way.exact and rank in tiers.get(step_id, ())
            else way
            for step_id, way in each.items()
        }
        for rank, each in enumerate(ways)
    ]


def _covered(shown: Sequence[Offer]) -> int | None:
    """The world of a step of which `shown` covers all boxes; None if it does not."""
    worlds, found = {offer.world for offer in shown}, 0
    if len(worlds) != 1:
        return None
    for offer in shown:
        if offer.ranks is None:
            return offer.world
        found |= offer.restorable_rank_mask()
    return worlds.pop() if is_full(found, shown[0].world) else None


def _lenders(votes: Sequence[Candidates], step_id: StepId, ways: Sequence[_Way]) -> tuple[int, ...]:
    """As few ranks as have the images that ranks are lent as their own, and cover the step; the
    nearest tiers first."""
    own = sum(1 << rank for rank, way in enumerate(ways) if way.lent and way.exact)
    shown = [
        (NEAREST_FIRST.index(offer.tier), rank, offer)
        for rank, vote in enumerate(votes)
        for offer in _shows(vote)
        if offer.id == step_id
    ]
    found, lenders = 0, []
    for _, rank, offer in sorted(shown, key=lambda each: each[:2]):
        bits = offer.restorable_rank_mask()
        if bits & ~found or own & offer.images.bits:
            found |= bits
            own &= ~offer.images.bits
            lenders.append(rank)
    return tuple(sorted(lenders))


def _preferred(ways: Sequence[_Ways], common: set[StepId]) -> StepId:
    """The newest common step, or an older exact one.

    If no sidecar has a rank's own image of the newest step, and the step's world size is the one
    that runs, a twin would stand in for that rank. A twin has the rank's boxes, but not its
    buffers, RNG and extras. So the newest step of which all ranks get their own images is taken
    instead, if those ranks have their images of it nearer than the archive.
    `Ledger.list_reachable_steps` is the same rule; each sidecar follows it in its offers. Here it
    is applied to what all sidecars see together.
    """
    newest = max(common)
    by_twins = [each for each in ways if not each[newest].exact]
    exact = max(
        (step_id for step_id in common if all(each[step_id].exact for each in ways)), default=None
    )
    if exact is None or ways[0][newest].world != len(ways):
        return newest
    if any(step_id > exact and ways[0][step_id].world != len(ways) for step_id in common):
        return newest  # the run was of another world since: the exact step is far back
    return exact if all(not each[exact].tier.shared for each in by_twins) else newest


def _check_world(
    votes: Sequence[Candidates], newest: StepId | None, allowed: Callable[[StepId], bool]
) -> None:
    """Raises WorldChangedError if no sidecar offers anything, or a part of anything, and a newer
    common step is of another world. The older step is not taken instead, because no sidecar has
    checked whether the newer one is whole."""
    if not votes or any(vote.offers or vote.parts for vote in votes):
        return
    held = (
        {candidate.id: candidate.world for candidate in vote.candidates if allowed(candidate.id)}
        for vote in votes
    )
    worlds = list(held)
    common = set(worlds[0]).intersection(*worlds[1:])
    step_id = max(common, default=None)
    if step_id is not None and step_id != newest:
        saved = max({each[step_id] for each in worlds} - {len(votes)})
        raise _world_changed(votes, step_id, saved=saved)


def _doubt(votes: Sequence[Candidates]) -> SuspectSteps:
    """The doubt over all ranks together. Each machine has a record only of its own failures."""
    return SuspectSteps.from_failures(
        [failure for vote in votes for failure in vote.failures],
        {candidate.id for vote in votes for candidate in _found(vote)},
        {step_id for vote in votes for step_id in vote.trusted},
    )


def _all_none(votes: Sequence[Candidates]) -> bool:
    return all(
        vote.answer is TierAnswer.NONE and not _found(vote) and not vote.parts for vote in votes
    )


def _found(vote: Candidates) -> tuple[Candidate | Offer, ...]:
    return (*vote.candidates, *vote.offers)


def _died_in_its_first_steps(votes: Sequence[Candidates]) -> bool:
    """Whether no rank holds more than the first two steps of an epoch, and nothing is offered. The
    caller has already found that no step is held by all ranks.

    This is the one exception to "step 0 needs NONE from every rank". Without it, a run that was
    killed before its slowest rank sealed its first image could never start again. Ranks move in
    lock step: when one rank has sealed its second step, every other rank has at least begun to copy
    its first.
    """
    return all(
        (
            vote.answer is TierAnswer.NONE
            or (vote.answer is TierAnswer.STEPS and (vote.candidates or vote.parts))
        )
        and not vote.offers  # a whole step is worth restoring, even if only one rank can reach it
        and all(candidate.world == len(votes) for candidate in vote.candidates)
        and all(part.world == len(votes) for part in vote.parts)
        and all(are_first_epoch_steps(steps) for steps in _steps_of_each(vote).values())
        for vote in votes
    )


def _is_gone(votes: Sequence[Candidates]) -> bool:
    """Whether what no rank can reach cannot come back. The caller has already found that no step
    can be restored.

    Every rank must have looked, and say that what is out of reach went with its pod or its drive.
    """
    return all(vote.fleeting and vote.answer is not TierAnswer.UNKNOWN for vote in votes)


def are_first_epoch_steps(steps: set[int]) -> bool:
    """Whether these are at most the first two steps of an epoch."""
    return len(steps) <= 2 and max(steps) <= LAST_EARLY_STEP


def _steps_of_each(vote: Candidates) -> dict[tuple[EpochId, int], set[int]]:
    """By epoch and rank, the steps that this rank's sidecar has of it; -1 is the voting rank."""
    steps: dict[tuple[EpochId, int], set[int]] = {}
    for candidate in vote.candidates:
        steps.setdefault((candidate.id.epoch, -1), set()).add(candidate.id.step)
    for part in vote.parts:
        for rank in part.ranks or ():
            steps.setdefault((part.id.epoch, rank), set()).add(part.id.step)
    return steps


# --- why not -------------------------------------------------------------------------------------


def _refusal(votes: Sequence[Candidates], excluded: Collection[StepId]) -> RestoreError:
    if unknown := _unknown(votes):
        return RestoreError(
            "not every rank knows what it holds, and no step is known to be held by all, "
            f"so the run does not begin again. {unknown}. Bring that storage back and restart"
            f"{_way_out(votes)}. Held: {_held(votes, excluded)}"
        )
    every: list[Candidate | Offer] = []
    for vote in votes:
        every += (*vote.candidates, *vote.offers, *vote.parts)
    left = [candidate for candidate in every if candidate.id not in excluded]
    newest = max(left, key=lambda candidate: candidate.id, default=None)
    if newest is not None and newest.world != len(votes):
        return _world_changed(votes, newest.id, saved=newest.world)
    failed = _named(excluded)
    if not left:
        return RestoreError(
            f"every step that was found failed its verification on some rank: {failed or 'none'}. "
            f"Look at the quarantined files with `keepstep verify`{_way_out(votes)}"
        )
    # what to do comes first: the list may be long, and is cut where it is shown
    return NothingCommonError(
        f"no step is held by all {len(votes)} ranks, and together they do not hold a whole one. "
        f"Bring back the storage that is missing{_way_out(votes)}. {_held(votes, excluded)}"
        + (f". Failed verification: {failed}" if failed else "")
    )


def _way_out(votes: Sequence[Candidates]) -> str:
    """How to begin at step 0 nonetheless, as the sidecars say it."""
    commands = [vote.way_out for vote in votes if vote.way_out]
    return f", or begin again at step 0: {commands[0]}" if commands else ""


def _world_changed(
    votes: Sequence[Candidates], step_id: StepId, *, saved: int
) -> WorldChangedError:
    lacking = [
        f"rank {rank} offers {_listed(vote.offers, len(votes))}"
        for rank, vote in enumerate(votes)
        if all(offer.id != step_id for offer in vote.offers)
    ]
    return WorldChangedError(
        f"step {step_id} was saved by {saved} ranks, but {len(votes)} are running, and not every"
        " rank's "
        f"sidecar can bring all of it: {_few(lacking)}. Start {saved} ranks, bring back the "
        f"storage that is missing{_way_out(votes)}"
    )


def _rollback_error(
    votes: Sequence[Candidates], excluded: Collection[StepId], limit: StepId, *, exact: bool
) -> RestoreError:
    failed, unknown = _named(excluded), _unknown(votes)
    return RestoreError(
        f"going back to step {limit} was asked for, but "
        + ("not every rank can restore it" if exact else "no step up to it is held by all ranks")
        + f". {_held(votes, excluded)}"
        + (f". Failed verification: {failed}" if failed else "")
        + (f". Unknown: {unknown}" if unknown else "")
        + ". Name a step that all ranks have, or bring back the storage that is missing"
    )


def _unknown(votes: Sequence[Candidates]) -> str:
    return _few(
        [
            f"rank {rank}: {vote.reason or 'no reason given'}"
            for rank, vote in enumerate(votes)
            if vote.answer is TierAnswer.UNKNOWN
        ]
    )


def _named(ids: Collection[StepId]) -> str:
    return ", ".join(str(step_id) for step_id in sorted(ids, reverse=True)[:_STEPS_NAMED])


def _held(votes: Sequence[Candidates], excluded: Collection[StepId]) -> str:
    return _few(
        [f"rank {rank}: {_held_by(vote, len(votes), excluded)}" for rank, vote in enumerate(votes)]
    )


def _held_by(vote: Candidates, running: int, excluded: Collection[StepId]) -> str:
    own = [candidate for candidate in vote.candidates if candidate.id not in excluded]
    offers = [offer for offer in vote.offers if offer.id not in excluded]
    whole = {offer.id for offer in offers}
    parts = [part for part in vote.parts if part.id not in excluded and part.id not in whole]
    return (
        f"parts of {_listed(parts, running)}" if parts and not own else _listed(own, running)
    ) + (f" and offers {_listed(offers, running)}" if offers else "")


def _listed(found: Sequence[Candidate | Offer], running: int) -> str:
    if not found:
        return "nothing"
    newest_first = sorted(found, key=lambda candidate: candidate.id, reverse=True)
    named = ", ".join(
        f"{candidate.id} ({candidate.tier}"
        f"{'' if candidate.world == running else f', of {candidate.world} ranks'})"
        for candidate in newest_first[:_STEPS_NAMED]
    )
    return named + (", ..." if len(found) > _STEPS_NAMED else "")


def _few(lines: Sequence[str]) -> str:
    return few(lines, _RANKS_NAMED, by="; ", rest="; and ")
