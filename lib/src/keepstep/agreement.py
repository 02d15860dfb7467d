"""The vote that every restart begins with: which step do all ranks restore?

Every rank says what it can restore (`protocol.Candidates`); every rank evaluates the same votes
with this pure function, so all come to the same decision without a coordinator. A step that fails
its verification on any rank joins `excluded`, and all vote again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.errors import NothingCommonError, RestoreError, WorldChangedError
from keepstep.protocol import Candidate, Candidates
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier

LAST_EARLY_STEP = 2
"""The highest second step of a run: loops begin at 0 or at 1."""

_RANKS_NAMED = 8
_STEPS_NAMED = 3


@dataclass(frozen=True)
class Decision:
    """Restore `id`, each rank from its tier in `tiers`; `id` None: there is nothing, anywhere.

    `epoch_number`: of the epoch that begins now, higher than any that any rank has seen.
    `incomplete`: first steps that only some ranks hold; the run begins anew without them.
    """

    id: StepId | None
    tiers: tuple[Tier, ...]
    epoch_number: int
    incomplete: tuple[StepId, ...] = ()

    def epoch(self, nonce: str) -> Epoch:
        """The epoch that begins now; `nonce`: 8 hex digits of chance, from one rank for all."""
        return Epoch(EpochId(self.epoch_number, nonce), self.id)


def choose(votes: Sequence[Candidates], excluded: Collection[StepId] = ()) -> Decision:
    """Decide from the votes of all ranks, in rank order.

    Raises:
        WorldChangedError: the newest step that could be restored has another world size.
        NothingCommonError: ranks hold steps, but none is held by all.
        RestoreError: nothing in common, and a rank does not know what it has; or everything
            in common failed its verification.
    """
    number = max((vote.highest_epoch for vote in votes), default=0) + 1
    offers = [_newest_first(vote, excluded) for vote in votes]
    common = set.intersection(*(set(offer) for offer in offers)) if offers else set()
    if common:
        id = max(common)
        tiers = _check_world(id, [offer[id] for offer in offers])
        return Decision(id, tiers, number)
    if _all_none(votes) and not excluded:
        return Decision(None, (), number)
    if not excluded and _died_in_its_first_steps(votes):
        held = {one.id for vote in votes for one in vote.candidates}
        return Decision(None, (), number, tuple(sorted(held)))
    raise _refusal(votes, offers, excluded)


def _newest_first(vote: Candidates, excluded: Collection[StepId]) -> dict[StepId, Candidate]:
    ordered = sorted(vote.candidates, key=lambda one: one.id, reverse=True)
    return {one.id: one for one in ordered if one.id not in excluded}


def _check_world(id: StepId, held: Sequence[Candidate]) -> tuple[Tier, ...]:
    if worlds := sorted({one.world for one in held} - {len(held)}):
        raise _world_changed(id, saved=worlds[-1], now=len(held))
    return tuple(one.tier for one in held)


def _world_changed(id: StepId, *, saved: int, now: int) -> WorldChangedError:
    return WorldChangedError(
        f"step {id} was saved by {saved} ranks, but {now} are running: start {saved} ranks, "
        "or give this run another name to begin anew"
    )


def _all_none(votes: Sequence[Candidates]) -> bool:
    return all(vote.answer is Answer.NONE and not vote.candidates for vote in votes)


def _died_in_its_first_steps(votes: Sequence[Candidates]) -> bool:
    """No rank holds more than the first two steps of an epoch, and none is held by all ranks.

    The one exception to "step 0 needs NONE from every rank": a run that was killed before the
    slowest rank sealed its first image could never start again. Ranks move in lock step: when a
    rank has sealed its second step, every other one has at least begun to copy its first.
    """
    return all(
        (vote.answer is Answer.NONE or (vote.answer is Answer.STEPS and vote.candidates))
        and all(one.world == len(votes) for one in vote.candidates)
        and all(_early(steps) for steps in _steps_by_epoch(vote).values())
        for vote in votes
    )


def _early(steps: set[int]) -> bool:
    return len(steps) <= 2 and max(steps) <= LAST_EARLY_STEP


def _steps_by_epoch(vote: Candidates) -> dict[EpochId, set[int]]:
    steps: dict[EpochId, set[int]] = {}
    for one in vote.candidates:
        steps.setdefault(one.id.epoch, set()).add(one.id.step)
    return steps


def _refusal(
    votes: Sequence[Candidates],
    offers: Sequence[dict[StepId, Candidate]],
    excluded: Collection[StepId],
) -> RestoreError:
    unknown = [
        f"rank {rank}: {vote.reason or 'no reason given'}"
        for rank, vote in enumerate(votes)
        if vote.answer is Answer.UNKNOWN
    ]
    if unknown:
        return RestoreError(
            "not every rank knows what it holds, and no step is known to be held by all; "
            f"nothing was started anew. {_few(unknown)}. Bring that storage back and restart. "
            f"Held: {_held(offers)}"
        )
    foreign = [one for offer in offers for one in offer.values() if one.world != len(votes)]
    if foreign:
        newest = max(foreign, key=lambda one: one.id)
        return _world_changed(newest.id, saved=newest.world, now=len(votes))
    failed = ", ".join(str(id) for id in sorted(excluded, reverse=True)[:_STEPS_NAMED])
    if not any(offers):
        return RestoreError(
            f"every step that was found failed its verification on some rank: {failed or 'none'}. "
            "Look at the quarantined files with `keepstep verify`; to begin anew, remove the run "
            "with `keepstep rm`"
        )
    return NothingCommonError(
        f"no step is held by all {len(votes)} ranks. {_held(offers)}"
        + (f". Failed verification: {failed}" if failed else "")
        + ". Bring back the storage that is missing, or remove the run with `keepstep rm` to "
        "begin anew"
    )


def _held(offers: Sequence[dict[StepId, Candidate]]) -> str:
    return _few([f"rank {rank}: {_steps(offer)}" for rank, offer in enumerate(offers)])


def _steps(offer: dict[StepId, Candidate]) -> str:
    named = [f"{one.id} ({one.tier})" for one in list(offer.values())[:_STEPS_NAMED]]
    return ", ".join(named) + (", ..." if len(offer) > _STEPS_NAMED else "") if named else "nothing"


def _few(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _RANKS_NAMED} more" if len(lines) > _RANKS_NAMED else ""
    return "; ".join(lines[:_RANKS_NAMED]) + more
