"""Records trainers' lives in the history, and what each restart cost in parts, from the end of a
life to the first step of the next."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.core.history import RELEASED, Kind, Restart
from keepstep.steps import Epoch, StepId, Tier
from keepstep_sidecar.history import History
from keepstep_sidecar.log import say


@dataclass
class _Life:
    """The life of one rank's trainer. Times are those of the clock."""

    attempt: str
    began: float
    ended: float | None = None
    restored: float | None = None
    restart: Restart | None = None


class Restarts:
    """`last`: for each rank, its newest restart that was followed by a staged step.

    A sidecar that died together with its trainer does not know when that was, so it records no
    restart.
    """

    def __init__(self, history: History, clock: Callable[[], float] = time.time) -> None:
        self.last: dict[int, Restart] = {}
        self._history = history
        self._clock = clock
        self._lives: dict[int, _Life] = {}

    def came(self, rank: int, attempt: str, *, age_s: float) -> None:
        """A trainer comes, or reconnects. Its process began `age_s` seconds ago."""
        self._history.note(Kind.CAME, rank=rank, attempt=attempt, seconds=age_s)
        before = self._lives.get(rank)
        if before is not None and before.attempt == attempt:
            before.ended = None
            return
        now = self._clock()
        life = self._lives[rank] = _Life(attempt, now - age_s)
        if before is not None and before.ended is not None:
            # A process that already stood by took no time to start.
            life.began = max(life.began, before.ended)
            life.restart = Restart(at=before.ended, detection_s=life.began - before.ended)

    def ended(self, rank: int, attempt: str, *, released: bool = False) -> None:
        """A trainer's connection or process is gone; `released`: it said goodbye before."""
        text = RELEASED if released else "gone"
        self._history.note(Kind.ENDED, rank=rank, attempt=attempt, text=text)
        life = self._lives.get(rank)
        if life is not None and life.attempt == attempt:
            life.ended = self._clock()

    def restored(
        self, rank: int, *, seconds: float, epoch: Epoch | None = None, tier: Tier | None = None
    ) -> None:
        """All ranks have agreed on an epoch. The restore took `seconds` of the time until now."""
        self._history.note(Kind.RESTORED, rank=rank, epoch=epoch, tier=tier, seconds=seconds)
        life = self._lives.get(rank)
        if life is not None and life.restart is not None and life.restored is None:
            life.restored = self._clock()
            start_s = max(0.0, life.restored - seconds - life.began)
            life.restart = dataclasses.replace(life.restart, start_s=start_s, restore_s=seconds)

    def staged(self, rank: int, id: StepId, *, blocked_s: float = 0.0) -> None:
        """A step is complete in a slot."""
        self._history.staged(id, blocked_s=blocked_s)
        life = self._lives.get(rank)
        if life is None or life.restart is None or life.restored is None:
            return
        first_s = self._clock() - life.restored
        self.last[rank] = restart = dataclasses.replace(life.restart, first_step_s=first_s)
        life.restart = None
        self._history.note(Kind.RESTARTED, rank=rank, attempt=life.attempt, restart=restart)
        say("restarted", rank=rank, **dataclasses.asdict(restart))
