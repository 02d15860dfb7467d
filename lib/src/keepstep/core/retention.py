"""What may be deleted: all rules of all tiers, as a table (`RULES`). Pure: times and sizes are
passed in.

No rule of `local` or the archive ever names a pinned step or the newest commit that its caller
knows, whatever a policy or a capacity limit says; no rule of `peer` a rank's newest committed copy.
So the only committed copy never goes. The newest proven step
(`_anchors`) ends a crash loop. It is retired only where the volume is full and nothing else is
left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.core.suspicion import WITHIN
from keepstep.steps import StepId


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keep the `last` N steps, multiples of `every_steps`, the first step of every `every_s`
    seconds, and pinned steps."""

    last: int = 2
    every_steps: int | None = None
    every_s: float | None = None
    pinned: frozenset[StepId] = frozenset()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"retention must keep at least the last step, not {self.last}")
        if any(
            interval is not None and interval <= 0 for interval in (self.every_steps, self.every_s)
        ):
            raise ValueError("every_steps and every_s must be positive")

    @property
    def kept_interval_text(self) -> str | None:
        """Which steps stay beside the last ones, as options write it: `1000` (steps) or `21600s`.
        None: no others."""
        if self.every_steps is not None:
            return str(self.every_steps)
        return None if self.every_s is None else f"{self.every_s}s"

    def __str__(self) -> str:
        """Text for people, without pins: `the newest 2 and one every 1000 steps`."""
        beside = "" if self.every_steps is None else f" and one every {self.every_steps} steps"
        if self.every_s is not None:
            beside += f" and one every {self.every_s:.0f} s"
        return f"the newest {self.last}{beside}"


class DeletionRule(NamedTuple):
    """`by`: the function of this module that names what goes."""

    by: str
    where: str
    when: str
    goes: str


RULES = (
    DeletionRule(
        "steps_to_retire", "local, archive", "always", "live commits that the policy does not keep",
    ),
    DeletionRule(
        "unneeded_steps", "local, archive", "a newer live commit is there",
        "dead steps; incomplete steps that are older than those the policy keeps as the last ones,"
        " in the archive an hour after their last file came",
    ),
    DeletionRule(
        "hopeless_steps", "local", "a machine that is alone",
        "steps that no rank can complete; the newest 4 stay",
    ),
    DeletionRule(
        "filter_allowed_deletions", "local", "the leader says so",
        "steps older than the last known commit",
    ),
    DeletionRule(
        "droppable_steps", "local", "the leader is silent",
        "steps between the last known commit and the newest 2; on a full volume also older ones",
    ),
    DeletionRule(
        "steps_to_evict", "local", "a volume is full",
        "the fewest: incomplete, dead, not kept by the policy, kept beside the last ones, the last"
        " ones, the newest proven step; each time the oldest first",
    ),
    DeletionRule(
        "superseded_copies", "peer", "the sender names what it still needs",
        "copies that it does not need and that are older than a needed, committed copy of the rank",
    ),
    DeletionRule(
        "copies_to_drop", "peer", "a volume is full", "copies but each rank's newest committed one",
    ),
)  # fmt: skip
"""Every rule by which anything of a step is deleted. docs/protocol.md shows this table."""

NEVER_WHOLE_KEPT = 4
"""Of the steps that no rank can complete any more, so many of the newest stay, to be looked at."""


def steps_to_retire(
    committed: Collection[StepId],
    policy: Retention,
    *,
    written_at: Mapping[StepId, float] | None = None,
) -> tuple[StepId, ...]:
    """The steps of `committed` that the policy does not keep, oldest first.

    `written_at`: unix seconds; a step without a time is not kept by `every_s`.
    """
    ordered = sorted(set(committed))
    kept = {*ordered[-policy.last :], *policy.pinned, *_anchors(ordered)}
    if policy.every_steps is not None:
        kept.update(step_id for step_id in ordered if step_id.step % policy.every_steps == 0)
    if policy.every_s is not None:
        kept.update(_first_of_each_span(ordered, written_at or {}, policy.every_s))
    return tuple(step_id for step_id in ordered if step_id not in kept)


def steps_to_evict(
    sizes: Mapping[StepId, int],
    policy: Retention,
    *,
    limit_bytes: int,
    unfinished: Collection[StepId] = (),
    written_at: Mapping[StepId, float] | None = None,
) -> tuple[StepId, ...]:
    """The steps that go, in this order, so that the rest fits into `limit_bytes`.

    First go the `unfinished` steps, which nobody can restore. Then go the steps that the policy
    does not keep, then those that it keeps beside the last ones, then the last ones: each time the
    oldest first. The newest proven step goes at the end. The newest finished step and pinned steps
    never go. If these alone are too large, the rest does not fit, and the caller must report that.
    """
    whole = sorted(sizes.keys() - set(unfinished))
    useless = sorted(sizes.keys() - set(whole))
    first = steps_to_retire(whole, policy, written_at=written_at)
    last = whole[-policy.last :]
    beside = [step_id for step_id in whole if step_id not in first and step_id not in last]
    excess = sum(sizes.values()) - limit_bytes
    gone: list[StepId] = []
    proven = {step_id for step_id in _anchors(whole)[:1] if _is_proven(step_id, whole)}
    older = [step_id for step_id in (*beside, *last[:-1]) if step_id not in proven]
    for step_id in (*useless, *first, *older, *sorted(proven - {*last[-1:]})):
        if excess <= 0:
            break
        if step_id not in policy.pinned:
            gone.append(step_id)
            excess -= sizes[step_id]
    return tuple(gone)


def unneeded_steps(
    alive: Collection[StepId],
    policy: Retention,
    *,
    dead: Iterable[StepId] = (),
    unfinished: Iterable[StepId] = (),
) -> set[StepId]:
    """Steps that are no commits and of which no copy is needed. `alive`: the live commits of the
    tier. `unfinished`: live steps that are not complete there. Such a step may still be on its way
    while it is among the last few."""
    if not alive:
        return set()
    last = sorted(alive)[-policy.last :]
    gone = {step_id for step_id in unfinished if step_id < last[0]} | {
        step_id for step_id in dead if step_id < last[-1]
    }
    return gone - policy.pinned


def hopeless_steps(never_whole: Iterable[StepId]) -> list[StepId]:
    """Of the live steps that certainly will never be whole, all but the newest few. Otherwise ranks
    that save different steps would fill the volumes."""
    ordered = sorted(never_whole)
    return ordered[: max(0, len(ordered) - NEVER_WHOLE_KEPT)]


def filter_allowed_deletions(
    named: Iterable[StepId], *, last_commit: StepId | None, pinned: Collection[StepId]
) -> list[StepId]:
    """Of the steps that the leader names for deletion, those that may go, oldest first. A correct
    leader names no others."""
    older = (step_id for step_id in named if last_commit is not None and step_id < last_commit)
    return sorted(step_id for step_id in older if step_id not in pinned)


def droppable_steps(
    held: Iterable[StepId],
    *,
    last_commit: StepId | None,
    pinned: Collection[StepId] = (),
    full: bool = False,
) -> list[StepId]:
    """The steps that a sidecar may drop while nobody tells it of commits, oldest first.

    The sidecar keeps the last commit it heard of, all older steps (the leader decides on them),
    and its newest two. It drops the steps between. Without any known commit it keeps only the
    newest two. `full`: also the steps older than the last commit, which is complete on the volumes
    of the run, so that no volume needs an older copy.
    """
    ids = sorted(held)
    later = [step_id for step_id in ids if last_commit is None or step_id > last_commit]
    older = [
        step_id for step_id in ids if full and last_commit is not None and step_id < last_commit
    ]
    return [step_id for step_id in (*older, *later[:-2]) if step_id not in pinned]


def superseded_copies(
    held: Mapping[int, Collection[StepId]],
    needed: Mapping[int, Collection[StepId]],
    *,
    committed: StepId | None,
) -> list[tuple[StepId, int]]:
    """Copies (step, rank) that their sender no longer needs: they are older than a copy of the same
    rank that is needed, committed and whole here. `needed`: of each rank that the sender has.

    None if the sender knows of no commit. It may have just come to a new node, and the copies that
    it does not know of may be all that the run has.
    """
    doomed = []
    for rank, ids in needed.items() if committed is not None else ():
        here = set(held.get(rank, ()))
        anchor = _newest_committed(here & set(ids), committed)
        doomed += [
            (step_id, rank)
            for step_id in here - set(ids)
            if anchor is not None and step_id < anchor
        ]
    return sorted(doomed)


def copies_to_drop(
    held: Mapping[int, Collection[StepId]], committed: Mapping[int, StepId]
) -> list[tuple[StepId, int]]:
    """Copies (step, rank) to delete when the volume is full, oldest first: all but the newest
    committed copy of each rank. `committed`: for each rank the newest commit that its sender knows.
    Of a rank without one, nothing is deleted."""
    doomed = []
    for rank, ids in held.items():
        kept = _newest_committed(ids, committed.get(rank))
        doomed += [(step_id, rank) for step_id in ids if kept is not None and step_id != kept]
    return sorted(doomed)


def _newest_committed(ids: Iterable[StepId], committed: StepId | None) -> StepId | None:
    return max(
        (step_id for step_id in ids if committed is not None and step_id <= committed), default=None
    )


_SPAN = 2 * WITHIN
"""A step that lies this far behind the newest one is proven, even if the newest `WITHIN` steps come
to be in doubt."""


def _anchors(ordered: list[StepId]) -> list[StepId]:
    """The newest step that is surely proven, and the steps that will be it later: the first step of
    each `_SPAN` steps.

    The steps are chosen on a grid, as for `every_steps`, because machines hear of a commit one
    after the other and must not each keep a different step. The first span has no anchor, because
    each of its steps lies within `_SPAN` steps of the run's beginning.
    """
    first: dict[int, StepId] = {}
    for step_id in ordered:
        first.setdefault(step_id.step // _SPAN, step_id)
    anchors = [step_id for span, step_id in first.items() if span]
    proven = [at for at, step_id in enumerate(anchors) if _is_proven(step_id, ordered)]
    return anchors[max(proven, default=0) :]


def _is_proven(step_id: StepId, ordered: list[StepId]) -> bool:
    return step_id.step + _SPAN <= ordered[-1].step


def _first_of_each_span(
    ordered: list[StepId], written_at: Mapping[StepId, float], span_s: float
) -> set[StepId]:
    first: dict[int, StepId] = {}
    for step_id in ordered:
        if step_id in written_at:
            first.setdefault(int(written_at[step_id] // span_s), step_id)
    return set(first.values())
