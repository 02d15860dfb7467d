"""Which ranks of this machine wait for the same chunk, so that it is read once for all of them.

A rank says beforehand which chunks it will ask for, and asks in the order of (saved rank, chunk).
Whoever comes first sits down and waits; when the last of those that want the chunk has come, one of
them leads: it reads into its own frame and copies into the others'. So ranks keep pace with each
other, at no cost, as the collective at a restore's end makes them wait for the slowest anyway.

It cannot lock up: the lowest chunk that anybody still wants is asked for, or will be asked for
next, by all that want it. And nobody waits for long for a rank that does not come: one whose lease
has ended or that went past a chunk is not counted, and one that stands still is left out
(`give_up`) until it asks again. It then reads alone what the others have, and meets them further
on.

No I/O and no clock here: `chunks` reads, copies and keeps the time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import ChunkRun

Key = tuple[int, int]
"""Saved rank and chunk."""

_BEFORE_ALL = (-1, -1)


@dataclass(eq=False)
class Seat:
    """One rank that wants a chunk in `frame`. `outcome`: the tier once somebody has filled the
    frame; None: this rank leads. `others`: whom a leader reads for."""

    rank: int
    key: Key
    frame: memoryview
    outcome: asyncio.Future[Tier | None]
    others: list[Seat] = field(default_factory=list)

    def lead(self, others: Iterable[Seat] = ()) -> None:
        """Make it read for itself and `others`."""
        self.others = list(others)
        if not self.outcome.done():
            self.outcome.set_result(None)

    def filled(self, tier: Tier) -> None:
        """Somebody has read for it."""
        if not self.outcome.done():
            self.outcome.set_result(tier)


class _Listener:
    """What a rank still has to come for."""

    def __init__(self, id: StepId, runs: Iterable[ChunkRun]) -> None:
        self.id = id
        self.late = False
        self.until = _BEFORE_ALL
        self._runs: dict[int, list[tuple[int, int]]] = {}
        for one in runs:
            self._runs.setdefault(one.rank, []).append((one.first, one.end))
        for each in self._runs.values():
            each.sort()

    def will_ask(self, key: Key) -> bool:
        """Whether it said so, and has neither come for it nor gone past it."""
        saved, chunk = key
        runs = self._runs.get(saved, [])
        at = bisect_right(runs, (chunk, 1 << 62)) - 1
        return key > self.until and at >= 0 and runs[at][0] <= chunk < runs[at][1]


class Broadcast:
    """Of one sidecar. All calls on the event loop."""

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}
        self._waiting: dict[tuple[StepId, Key], list[Seat]] = {}

    def announce(self, rank: int, id: StepId, runs: Iterable[ChunkRun]) -> None:
        """All that the rank will ask for of this step, instead of what it said before."""
        self._listeners[rank] = _Listener(id, runs)
        self._settle()

    def leave(self, rank: int) -> None:
        """The rank will not ask any more."""
        if self._listeners.pop(rank, None) is not None:
            self._settle()

    def sit(self, rank: int, id: StepId, wanted: Sequence[tuple[Key, memoryview]]) -> list[Seat]:
        """A seat for each chunk that the rank asks for now. What nobody else wants, or what it has
        not announced, it leads at once."""
        loop = asyncio.get_running_loop()
        seats = [Seat(rank, key, frame, loop.create_future()) for key, frame in wanted]
        listener = self._listeners.get(rank)
        if listener is None or listener.id != id:
            for seat in seats:
                seat.lead()
            return seats
        listener.late = False
        announced = {seat.key for seat in seats if listener.will_ask(seat.key)}
        listener.until = max([listener.until, *announced])
        for seat in seats:
            if seat.key in announced:
                self._waiting.setdefault((id, seat.key), []).append(seat)
            else:
                seat.lead()
        self._settle()
        return seats

    def give_up(self, id: StepId, key: Key) -> None:
        """Nobody waits any more for the ranks that have not come for this chunk."""
        for rank in self._missing(id, key):
            self._listeners[rank].late = True
        self._settle()

    def rise(self, id: StepId, seats: Sequence[Seat]) -> None:
        """These are taken no more, whether filled or not."""
        for seat in seats:
            waiting = self._waiting.get((id, seat.key), [])
            if seat in waiting:
                waiting.remove(seat)
            seat.outcome.cancel()
            for other in seat.others:  # one that was to lead, and rose before it could
                other.lead()
        self._settle()

    def _missing(self, id: StepId, key: Key) -> list[int]:
        return [
            rank
            for rank, one in self._listeners.items()
            if one.id == id and not one.late and one.will_ask(key)
        ]

    def _settle(self) -> None:
        """Let one lead wherever all have come."""
        for (id, key), seats in list(self._waiting.items()):
            if not seats or not self._missing(id, key):
                del self._waiting[id, key]
                if seats:
                    seats[0].lead(seats[1:])
