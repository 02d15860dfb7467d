"""Which committed steps are kept, and which are retired. Pure: times and sizes are passed in.

What is never retired: the newest committed step, whatever the policy or a capacity limit says. So
the only committed copy never goes. Nor does the newest proven one (`_anchors`), which ends a crash
loop, but where the volume is full and nothing else is left. Whether a newer step makes an older
copy expendable at all is the ledger's question (`keepstep.core.ledger`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from keepstep.core.suspicion import WITHIN
from keepstep.steps import StepId


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keep the `last` N, every `every_steps` steps, the first of every `every_s` seconds, pins."""

    last: int = 2
    every_steps: int | None = None
    every_s: float | None = None
    pinned: frozenset[StepId] = frozenset()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"retention must keep at least the last step, not {self.last}")
        if any(one is not None and one <= 0 for one in (self.every_steps, self.every_s)):
            raise ValueError("every_steps and every_s must be positive")

    @property
    def every(self) -> str | None:
        """What stays beside the last ones, as options name it: `1000` steps, or `21600s`."""
        if self.every_steps is not None:
            return str(self.every_steps)
        return None if self.every_s is None else f"{self.every_s}s"

    def __str__(self) -> str:
        """For people: `the newest 2 and one every 1000 steps`. Without pins."""
        beside = "" if self.every_steps is None else f" and one every {self.every_steps} steps"
        if self.every_s is not None:
            beside += f" and one every {self.every_s:.0f} s"
        return f"the newest {self.last}{beside}"


def retired(
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
        kept.update(id for id in ordered if id.step % policy.every_steps == 0)
    if policy.every_s is not None:
        kept.update(_first_of_each_span(ordered, written_at or {}, policy.every_s))
    return tuple(id for id in ordered if id not in kept)


def evicted(
    sizes: Mapping[StepId, int],
    policy: Retention,
    *,
    limit_bytes: int,
    unfinished: Collection[StepId] = (),
    written_at: Mapping[StepId, float] | None = None,
) -> tuple[StepId, ...]:
    """Which of these steps go, in this order, so that the rest fits into `limit_bytes`.

    First the `unfinished` ones, which nobody can restore; then what the policy does not keep, then
    what it keeps beside the last ones, then of the last ones: each time the oldest first; and at
    last the newest proven one. Never the newest finished one, never a pin: when these alone are too
    large, the rest does not fit, and it is for the caller to say so.
    """
    whole = sorted(sizes.keys() - set(unfinished))
    useless = sorted(sizes.keys() - set(whole))
    first = retired(whole, policy, written_at=written_at)
    last = whole[-policy.last :]
    beside = [id for id in whole if id not in first and id not in last]
    excess = sum(sizes.values()) - limit_bytes
    gone: list[StepId] = []
    proven = {id for id in _anchors(whole)[:1] if _is_proven(id, whole)}
    older = [id for id in (*beside, *last[:-1]) if id not in proven]
    for id in (*useless, *first, *older, *sorted(proven - {*last[-1:]})):
        if excess <= 0:
            break
        if id not in policy.pinned:
            gone.append(id)
            excess -= sizes[id]
    return tuple(gone)


def unwatched(
    held: Iterable[StepId], *, last_commit: StepId | None, newest: int = 2
) -> tuple[StepId, ...]:
    """What a sidecar with nobody to tell it of commits may drop, oldest first.

    It keeps the last commit it heard of, everything older (not its decision), and its newest
    two; it drops what lies between. Without any known commit only the newest two are kept.
    """
    later = sorted({id for id in held if last_commit is None or id > last_commit})
    return tuple(later[:-newest]) if newest else tuple(later)


def crowded_out(
    held: Iterable[StepId],
    *,
    last_commit: StepId | None,
    pinned: Collection[StepId] = (),
    newest: int = 2,
) -> tuple[StepId, ...]:
    """What a sidecar that sees a part of the run only may drop when its volume is full.

    As `unwatched`, and what is older than the last commit, too: that is complete on every volume
    of the run, so none of them needs an older copy. Pins stay.
    """
    ids = set(held)
    older = {id for id in ids if last_commit is not None and id < last_commit}
    between = unwatched(ids, last_commit=last_commit, newest=newest)
    return tuple(sorted({*older, *between} - set(pinned)))


_SPAN = 2 * WITHIN
"""A step that is as far behind is proven even if the newest `WITHIN` steps come to be in doubt."""


def _anchors(ordered: list[StepId]) -> list[StepId]:
    """The newest step that is surely proven, and what will be it: of each `_SPAN` steps the first.

    On a grid, as `every_steps`, since machines that hear of a commit one after the other must not
    each keep another step. Of the first span there is none: whatever is there is that young.
    """
    first: dict[int, StepId] = {}
    for id in ordered:
        first.setdefault(id.step // _SPAN, id)
    anchors = [id for span, id in first.items() if span]
    proven = [at for at, id in enumerate(anchors) if _is_proven(id, ordered)]
    return anchors[max(proven, default=0) :]


def _is_proven(id: StepId, ordered: list[StepId]) -> bool:
    return id.step + _SPAN <= ordered[-1].step


def _first_of_each_span(
    ordered: list[StepId], written_at: Mapping[StepId, float], span_s: float
) -> set[StepId]:
    first: dict[int, StepId] = {}
    for id in ordered:
        if id in written_at:
            first.setdefault(int(written_at[id] // span_s), id)
    return set(first.values())
