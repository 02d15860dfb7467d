"""What each restart of a trainer cost, in parts: from a life's end to the next one's first step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.wire.status import Restart
from keepstep_sidecar.log import say


@dataclass
class _Life:
    """Of one rank's trainer; times as the clock gives them."""

    attempt: str
    began: float
    ended: float | None = None
    restored: float | None = None
    restart: Restart | None = None


class Restarts:
    """`last`: the newest restart of each rank that has finished a step since.

    A sidecar that died with its trainer does not know when that was, and says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.last: dict[int, Restart] = {}
        self._clock = clock
        self._lives: dict[int, _Life] = {}

    def came(self, rank: int, attempt: str, *, age_s: float) -> None:
        """A trainer, or one that had lost its connection; its process began `age_s` ago."""
        before = self._lives.get(rank)
        if before is not None and before.attempt == attempt:
            before.ended = None
            return
        now = self._clock()
        life = self._lives[rank] = _Life(attempt, now - age_s)
        if before is not None and before.ended is not None:
            # one that stood by already took no time to start
            life.began = max(life.began, before.ended)
            life.restart = Restart(at=before.ended, detection_s=life.began - before.ended)

    def ended(self, rank: int, attempt: str) -> None:
        """Its connection or process is gone."""
        life = self._lives.get(rank)
        if life is not None and life.attempt == attempt:
            life.ended = self._clock()

    def restored(self, rank: int, *, seconds: float) -> None:
        """All ranks have agreed on an epoch; to restore took `seconds` of it."""
        life = self._lives.get(rank)
        if life is not None and life.restart is not None and life.restored is None:
            life.restored = self._clock()
            start_s = max(0.0, life.restored - seconds - life.began)
            life.restart = dataclasses.replace(life.restart, start_s=start_s, restore_s=seconds)

    def staged(self, rank: int) -> None:
        """A step is complete."""
        life = self._lives.get(rank)
        if life is None or life.restart is None or life.restored is None:
            return
        first_s = self._clock() - life.restored
        self.last[rank] = restart = dataclasses.replace(life.restart, first_step_s=first_s)
        life.restart = None
        say("restarted", rank=rank, **dataclasses.asdict(restart))
