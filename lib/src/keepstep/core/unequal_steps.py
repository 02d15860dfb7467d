"""Ranks that save different steps: no step becomes whole, and only the script can end that.

Ranks in lock step (each step has a collective) are never far apart: when a rank has staged a step,
every other rank has returned from the `save` before it, so at most two steps of one rank are not
yet staged by another. A rank that lacks more is one of three:

- it is past these steps (it staged a newer one, and the other rank is past one of its steps, so it
  is not just a rank that saves fewer of the same steps), or has called `close()`: it never saves
  them. This is certain at once;
- it has never saved a step of this epoch, although it has its lease: the others wait for it, so
  they would not have gone on for long;
- it stopped saving. Without collectives, a rank may also be in a long evaluation.

The last two are only found after a while. The message states what was seen, so it is right in any
case. Discarded and skipped steps were saved, too: a rank that lost steps is not named for them.
Pure: times are passed in.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.steps import EpochId, StepId

LEAST = 3
"""So many steps must be missing: one more than in lock step."""

NEVER_SAVED_S = 5.0
"""How long a rank that never saved a step of its epoch may lag behind."""

STOPPED_S = 60.0
"""How long a rank that did save steps may lag behind."""

_REMEMBERED = 32


class Reason(enum.Enum):
    """Why a rank lacks the steps of another one."""

    PASSED = "it saves other steps"
    CLOSED = "it has called close()"
    NEVER_SAVED = "it has saved no step yet"
    STOPPED = "it saves no steps any more"


@dataclass(frozen=True)
class Difference:
    """Rank `lacking` has staged none of the steps that rank `saving` staged since `common`, the
    newest step of both. None: they have no step in common."""

    saving: int
    lacking: int
    reason: Reason
    common: StepId | None

    def __str__(self) -> str:
        since = "" if self.common is None else f" since step {self.common.step}"
        return (
            f"rank {self.lacking} saves none of the steps that rank {self.saving} saves{since}"
            f" ({self.reason.value}), so no step is committed, and none can be restored: call"
            " save(step) on every rank, with the same steps"
        )


@dataclass
class _Rank:
    """`staged`: the newest steps of the epoch. `lost`: how many steps were saved and not staged, by
    the number of the last of them. `at`: when the rank came, or last saved a step."""

    at: float
    staged: deque[StepId] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    lost: dict[int, int] = field(default_factory=dict)
    present: bool = True
    closed: bool = False

    @property
    def newest(self) -> StepId | None:
        return self.staged[-1] if self.staged else None


class UnequalSteps:
    """What the ranks of one machine saved in the newest epoch. `difference`: what to tell them."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._epoch: EpochId | None = None
        self._common: StepId | None = None
        self._found: Difference | None = None

    # --- events --------------------------------------------------------------------------

    def came(self, rank: int, now: float) -> None:
        """A trainer has the rank's lease now."""
        known = self._ranks.setdefault(rank, _Rank(now))
        known.present, known.closed, known.at = True, False, now

    def left(self, rank: int, *, closed: bool) -> None:
        """The rank's trainer is gone; `closed`: it gave the lease back."""
        if (known := self._ranks.get(rank)) is not None:
            known.present, known.closed = False, closed

    def began(self, epoch: EpochId, now: float) -> None:
        """A trainer works in this epoch."""
        if self._epoch is None or epoch > self._epoch:
            self._epoch, self._common, self._found = epoch, None, None
            self._ranks = {rank: known for rank, known in self._ranks.items() if known.present}
            for known in self._ranks.values():
                known.staged.clear()
                known.lost.clear()
                known.at = now

    def staged(self, rank: int, step_id: StepId, now: float) -> None:
        """The rank has staged this step."""
        self.came(rank, now)
        self.began(step_id.epoch, now)
        if step_id.epoch != self._epoch:
            return
        self._ranks[rank].staged.append(step_id)
        if all(step_id in known.staged for known in self._involved()):
            self._common = step_id
            for known in self._ranks.values():
                known.lost = {at: count for at, count in known.lost.items() if at > step_id.step}

    def lost(self, rank: int, step: int, now: float, *, count: int = 1) -> None:
        """The rank has saved `count` steps that were not staged, the last of them `step`."""
        self.came(rank, now)
        lost = self._ranks[rank].lost
        lost[step] = lost.get(step, 0) + count

    # --- asking --------------------------------------------------------------------------

    @property
    def closed(self) -> frozenset[int]:
        """The ranks that gave their lease back in this epoch: they save no more of its steps."""
        return frozenset(rank for rank, known in self._ranks.items() if known.closed)

    def difference(self, now: float) -> Difference | None:
        """Which rank lacks the steps of which other rank; None: no rank does. It stays the same
        while any rank does, because it is a message."""
        found = next(self._differences(now), None)
        if found is None or self._found is None:
            self._found = found
        return self._found

    def _involved(self) -> list[_Rank]:
        """Without ranks whose trainer died: a restart decides about them."""
        return [known for known in self._ranks.values() if known.present or known.closed]

    def _differences(self, now: float) -> Iterator[Difference]:
        saving = {rank: known for rank, known in self._ranks.items() if known.staged}
        for lacking, other in sorted(self._ranks.items()):
            for rank, known in sorted(saving.items()):
                reason = None if rank == lacking else self._reason(known, other, now)
                if reason is not None:
                    yield Difference(rank, lacking, reason, self._common)

    def _reason(self, saving: _Rank, lacking: _Rank, now: float) -> Reason | None:
        newest = lacking.newest
        missing = self._missing(saving, lacking)
        least = LEAST + sum(lacking.lost.values())
        if lacking.closed:
            return Reason.CLOSED if len(missing) >= least else None
        if not lacking.present:
            return None
        if len(_before(newest, missing)) >= least and _before(
            saving.newest, self._missing(lacking, saving)
        ):
            return Reason.PASSED
        silent_s, never = now - lacking.at, newest is None
        if len(missing) < least or silent_s < (NEVER_SAVED_S if never else STOPPED_S):
            return None
        return Reason.NEVER_SAVED if never else Reason.STOPPED

    def _missing(self, saving: _Rank, lacking: _Rank) -> list[StepId]:
        steps = (step for step in saving.staged if self._common is None or step > self._common)
        return [step for step in steps if step not in lacking.staged]


def _before(newest: StepId | None, steps: list[StepId]) -> list[StepId]:
    return [step for step in steps if newest is not None and step < newest]
