"""The history of the run on this machine: the one place that knows what happened, and when.

Recording appends to a list. Nothing here touches a file, so that a save does not pay for it. Steps,
and events as frequent as steps, are combined: those of about a second become one event. The list is
bounded. `volume.history_file` keeps it beyond this process.
"""

from __future__ import annotations

import bisect
import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from keepstep.core.history import (
    RELEASED,
    EventKind,
    Goodput,
    HistoryEvent,
    HistoryTotals,
    RestartCost,
)
from keepstep.steps import Epoch, StepId, Tier
from keepstep.wire.status import HistoryPage
from keepstep_sidecar import __version__
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.log import info

KEPT: Final = 4096
"""The most events that are kept. The oldest are dropped, a quarter of the list at a time."""

TEXT_CHARS: Final = 300
"""The longest text of a reason. A trainer may have chosen the text."""

_TOGETHER_S: Final = 1.0
_OPEN: Final = 64
"""How many kinds of events are counted at the same time. With more, the second ends early."""

_WARNINGS: Final = 64
_LONGEST_S: Final = 1e6


@dataclass(slots=True)
class _Counted:
    """Events of about a second that will become one event."""

    at: float
    until: float
    first: int
    last: int
    step: StepId | None
    count: int
    seconds: float


class MachineHistory:
    """Not thread-safe: use it on the event loop only."""

    def __init__(
        self,
        events: Iterable[HistoryEvent] = (),
        before: HistoryTotals | None = None,
        *,
        history_id: str = "",
        clock: Callable[[], float] = time.time,
    ):
        """`events`: those of earlier sidecars, oldest first. `before`: the sum of the events before
        those. `history_id`: of a history that is continued; without one a new history begins."""
        self.id = history_id or secrets.token_hex(8)
        self._clock = clock
        known = list(events)
        self._events: list[HistoryEvent] = known[-KEPT:]
        self.before = (before or HistoryTotals()).after(known[:-KEPT])
        """The sum of the events that are no longer in the list."""
        self._tally = self.before.after(self._events)
        self._last = self._events[-1].sequence if self._events else 0
        self._open: dict[tuple[EventKind, Any, str], _Counted] = {}
        self._newest = max(
            (event.step for event in self._events if event.kind is EventKind.STAGED and event.step),
            default=None,
        )
        self._warnings: tuple[str, ...] = ()
        self.changes = ChangeNotifier()
        """Rings when something happens."""
        self.note(EventKind.STARTED, text=__version__)

    # --- what happens ------------------------------------------------------------------------

    def note(self, kind: EventKind, *, text: str = "", **fields: Any) -> None:
        """Record one event; `fields` are those of `HistoryEvent`."""
        self._close()
        now = self._clock()
        self._append(
            HistoryEvent(sequence=0, kind=kind, at=now, until=now, text=_cut(text), **fields)
        )

    def staged(self, history_id: StepId, *, blocked_s: float) -> None:
        """A rank has this step in memory. Only the first of several ranks counts."""
        if self._newest is None or history_id > self._newest:
            self._newest = history_id
            # a trainer says this number, so bound it
            blocked_s = min(max(0.0, blocked_s), _LONGEST_S)
            self._count(
                EventKind.STAGED,
                history_id.epoch,
                "",
                step=history_id,
                number=history_id.step,
                seconds=blocked_s,
            )

    def committed(self, history_id: StepId) -> None:
        """This step is committed and visible to readers."""
        self._count(
            EventKind.COMMITTED, history_id.epoch, "", step=history_id, number=history_id.step
        )

    def evicted(self, history_id: StepId) -> None:
        """This step was deleted because the volumes were full."""
        self._count(
            EventKind.EVICTED, history_id.epoch, "", step=history_id, number=history_id.step
        )

    def record_lost_saves(
        self, kind: EventKind, *, rank: int, step: int, reason: str, count: int = 1
    ) -> None:
        """Saves that were SKIPPED or DISCARDED (`kind`)."""
        self._count(kind, rank, _cut(reason), step=None, number=step, count=count)

    def record_warning_changes(self, warnings: Collection[str]) -> None:
        """Record the warnings that appeared and disappeared. `warnings`: all that there are now."""
        now = tuple(dict.fromkeys(map(_cut, warnings)))[:_WARNINGS]
        if now == self._warnings:
            return
        for text in now:
            if text not in self._warnings:
                self.note(EventKind.WARNING, text=text)
        for text in self._warnings:
            if text not in now:
                self.note(EventKind.CLEARED, text=text)
        self._warnings = now

    def _count(
        self,
        kind: EventKind,
        of: Any,
        text: str,
        *,
        step: StepId | None,
        number: int,
        count: int = 1,
        seconds: float = 0.0,
    ) -> None:
        now, key = self._clock(), (kind, of, text)
        counted = self._open.get(key)
        if counted is not None and not 0 <= now - counted.at < _TOGETHER_S:
            self._close()
            counted = None
        if counted is None:
            if len(self._open) >= _OPEN:
                self._close()
            counted = self._open[key] = _Counted(now, now, number, number, step, 0, 0.0)
        counted.first, counted.last = min(counted.first, number), max(counted.last, number)
        counted.step = (
            step if counted.step is None or (step and step > counted.step) else counted.step
        )
        counted.until = now
        counted.count += count
        counted.seconds += seconds
        self.changes.ring()

    def _close(self, *, before: float | None = None) -> None:
        """Turn what is being counted into events. `before`: only what began by then."""
        due = [
            (key, entry)
            for key, entry in self._open.items()
            if before is None or entry.at <= before
        ]
        for key, _ in due:
            del self._open[key]
        for (kind, of, text), entry in sorted(due, key=lambda pair: pair[1].at):
            self._append(
                HistoryEvent(
                    sequence=0,
                    kind=kind,
                    at=entry.at,
                    until=entry.until,
                    rank=of if isinstance(of, int) else None,
                    step=entry.step,
                    number=entry.last if entry.step is None else None,
                    first=entry.first,
                    count=entry.count,
                    seconds=entry.seconds,
                    text=text,
                )
            )

    def _append(self, event: HistoryEvent) -> None:
        self._last += 1
        self._events.append(replace(event, sequence=self._last))
        self._tally = self._tally.after([event])
        self.changes.ring()
        if len(self._events) > KEPT:
            self.before = self.before.after(self._events[: KEPT // 4])
            del self._events[: KEPT // 4]

    # --- asking ------------------------------------------------------------------------------

    def list_events_after(self, sequence: int) -> list[HistoryEvent]:
        """The known events after the one with that number. Events that are still being counted
        follow a second later."""
        self._close(before=self._clock() - _TOGETHER_S)
        return self._after(sequence)

    def all(self) -> list[HistoryEvent]:
        """All events, including those of this second. For the end, and where order matters most."""
        self._close()
        return self._after(0)

    def has_events_after(self, sequence: int) -> bool:
        """Whether anything happened after the event with that number."""
        return self._last > sequence or bool(self._open)

    def goodput(self) -> Goodput | None:
        """The goodput until now; None before the first restore."""
        self._close(before=self._clock() - _TOGETHER_S)
        return self._tally.goodput(self._clock())

    def history_page(self, run: str, since: int) -> HistoryPage:
        """The answer to GET /v1/history."""
        events = tuple(self.list_events_after(since))
        oldest = self._events[0].sequence if self._events else 0
        return HistoryPage(run=run, oldest=oldest, last=self._last, events=events)

    def _after(self, sequence: int) -> list[HistoryEvent]:
        return self._events[
            bisect.bisect(self._events, sequence, key=lambda event: event.sequence) :
        ]


def _cut(text: str) -> str:
    """Shorten the text, and make it something that every encoder accepts."""
    return text[:TEXT_CHARS].encode("utf-8", "replace").decode()


# --- restarts --------------------------------------------------------------------------------


@dataclass
class _Life:
    """The life of one rank's trainer. Times are those of the clock."""

    attempt: str
    began: float
    ended: float | None = None
    restored: float | None = None
    restart: RestartCost | None = None


class RestartTimer:
    """`last`: for each rank, its newest restart that was followed by a staged step.

    A sidecar that died together with its trainer does not know when that was, so it records no
    restart.
    """

    def __init__(self, history: MachineHistory, clock: Callable[[], float] = time.time) -> None:
        self.last: dict[int, RestartCost] = {}
        self._history = history
        self._clock = clock
        self._lives: dict[int, _Life] = {}

    def connected(self, rank: int, attempt: str, *, age_s: float) -> None:
        """A trainer comes, or reconnects. Its process began `age_s` seconds ago."""
        self._history.note(EventKind.CONNECTED, rank=rank, attempt=attempt, seconds=age_s)
        before = self._lives.get(rank)
        if before is not None and before.attempt == attempt:
            before.ended = None
            return
        now = self._clock()
        life = self._lives[rank] = _Life(attempt, now - age_s)
        if before is not None and before.ended is not None:
            # A process that already stood by took no time to start.
            life.began = max(life.began, before.ended)
            life.restart = RestartCost(at=before.ended, detection_s=life.began - before.ended)

    def ended(self, rank: int, attempt: str, *, released: bool = False) -> None:
        """A trainer's connection or process is gone; `released`: it said goodbye before."""
        text = RELEASED if released else "gone"
        self._history.note(EventKind.ENDED, rank=rank, attempt=attempt, text=text)
        life = self._lives.get(rank)
        if life is not None and life.attempt == attempt:
            life.ended = self._clock()

    def restored(
        self, rank: int, *, seconds: float, epoch: Epoch | None = None, tier: Tier | None = None
    ) -> None:
        """All ranks have agreed on an epoch. The restore took `seconds` of the time until now."""
        self._history.note(EventKind.RESTORED, rank=rank, epoch=epoch, tier=tier, seconds=seconds)
        life = self._lives.get(rank)
        if life is not None and life.restart is not None and life.restored is None:
            life.restored = self._clock()
            start_s = max(0.0, life.restored - seconds - life.began)
            life.restart = dataclasses.replace(life.restart, start_s=start_s, restore_s=seconds)

    def staged(self, rank: int, history_id: StepId, *, blocked_s: float = 0.0) -> None:
        """A step is complete in a slot."""
        self._history.staged(history_id, blocked_s=blocked_s)
        life = self._lives.get(rank)
        if life is None or life.restart is None or life.restored is None:
            return
        first_s = self._clock() - life.restored
        self.last[rank] = restart = dataclasses.replace(life.restart, first_step_s=first_s)
        life.restart = None
        self._history.note(EventKind.RESTARTED, rank=rank, attempt=life.attempt, restart=restart)
        spans = {name: round(value, 3) for name, value in dataclasses.asdict(restart).items()}
        del spans["at"]
        info("trainer.resumed", rank=rank, **spans)
