"""Which committed steps are kept, and which are retired. Pure: times and sizes are passed in.

The newest committed step is never retired, whatever the policy or a capacity limit says. So the
only committed copy never goes. The newest proven step (`_anchors`) ends a crash loop. It is retired
only where the volume is full and nothing else is left. The ledger (`keepstep.core.ledger`) decides
whether a newer step makes an older copy expendable at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

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
        if any(one is not None and one <= 0 for one in (self.every_steps, self.every_s)):
            raise ValueError("every_steps and every_s must be positive")

    @property
    def every(self) -> str | None:
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
    """The steps that go, in this order, so that the rest fits into `limit_bytes`.

    First go the `unfinished` steps, which nobody can restore. Then go the steps that the policy
    does not keep, then those that it keeps beside the last ones, then the last ones: each time the
    oldest first. The newest proven step goes at the end. The newest finished step and pinned steps
    never go. If these alone are too large, the rest does not fit, and the caller must report that.
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
    """The steps that a sidecar may drop while nobody tells it of commits, oldest first.

    The sidecar keeps the last commit it heard of, all older steps (the operator decides on them),
    and its `newest` ones. It drops the steps between. Without any known commit it keeps only the
    `newest` ones.
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
    """The steps that a sidecar that sees only a part of the run may drop when its volume is full.

    These are the steps of `unwatched`, and also the steps older than the last commit: that commit
    is complete on the volumes of the run, so no volume needs an older copy. Pinned steps stay.
    """
    ids = set(held)
    older = {id for id in ids if last_commit is not None and id < last_commit}
    between = unwatched(ids, last_commit=last_commit, newest=newest)
    return tuple(sorted({*older, *between} - set(pinned)))


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
