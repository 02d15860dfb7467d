"""Sends what lies on this machine to where it should also lie: to other pods, to an archive.

Each remote tier has one replicator. For each of its places (a buddy, a store) the replicator
compares what should be there (`DueShards`) with what the place lists, chooses a step, sends the
shards of this step, and compares again. It is not notified of shards. So a place that was away, was
restarted or was emptied catches up in the same way, and a lost wake-up costs only one period.
Whatever fails is tried again later, after the place has listed anew what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.steps import StepId, Tier
from keepstep.wire.status import TierStatus
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.tiers.source import ShardGone, ShardUnreadable
from keepstep_sidecar.volume.run_tree import LocalShard

SCAN_AGAIN_S = 60.0
"""How often a place lists again what it holds: it may have lost its drive."""
_COMPARE_EVERY_S = 15.0

Key = tuple[StepId, int]
"""A step and a rank."""


class CopyRejected(StorageError):
    """The place says that it holds other bytes. It gets no copy of this shard again, but the shard
    still counts as missing there."""


@dataclass(frozen=True, kw_only=True)
class DueShards:
    """What a tier should hold of what is here. `owed`: the steps that it should hold. `settled`:
    the steps that every member of the run can send, so that all choose the same ones of them.
    `commit`: the newest commit that is known here, for which a place may delete older steps."""

    shards: Mapping[StepId, Mapping[int, LocalShard]] = field(default_factory=dict)
    owed: frozenset[StepId] = frozenset()
    settled: frozenset[StepId] = frozenset()
    commit: StepId | None = None


class CopyTarget(Protocol):
    """Where shards are sent. All methods raise StorageError when the place cannot be reached."""

    fresh_s: float
    """For how many seconds a listing is good enough to send by."""

    async def list_held_shards(self, sent: Collection[Key]) -> set[Key]:
        """The shards that are there. `sent`: those that were sent since the place was first
        asked."""

    async def write_shard(self, shard: LocalShard) -> int | None:
        """Make the shard durable there. Returns the bytes sent, None when it was already there.

        Raises ShardGone, ShardUnreadable, ImageError or CopyRejected when sending the shard again
        would change nothing.
        """

    async def complete_and_prune_copies(self, sent: Collection[LocalShard]) -> bool:
        """Complete there what is whole, and delete what is no longer wanted. `sent`: all shards of
        a step that were just sent. Returns False to be called again soon."""

    def has_copied_all(self, *, whole: bool) -> bool:
        """Whether nothing is left to complete; `whole` as in `RemoteTier.drain`."""


@dataclass(kw_only=True)
class Traffic:
    """What was sent to a tier and fetched from it since the start, as in `TierStatus`."""

    sent: int = 0
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    received_bytes: int = 0
    received_seconds: float = 0.0
    failures: int = 0

    def count_sent(self, size_bytes: int, seconds: float) -> None:
        """Count one more shard that was sent there."""
        self.sent += 1
        self.sent_bytes += size_bytes
        self.sent_seconds += seconds

    def count_received(self, size_bytes: int, seconds: float) -> None:
        """Count bytes that came from there."""
        self.received_bytes += size_bytes
        self.received_seconds += seconds


class Replicator:
    """Everything that is sent to one tier. `due` and `places` are called again and again: a place
    is known by its name. `retry_s`: the shortest and the longest pause after failures."""

    def __init__(
        self,
        tier: Tier,
        due: Callable[[], DueShards],
        places: Callable[[], Mapping[str, CopyTarget]],
        *,
        retry_s: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        self.tier = tier
        self.traffic = Traffic()
        self.changes = ChangeNotifier()
        self.due = DueShards()
        self.retry_s = retry_s
        self._due, self._places = due, places
        self._lanes: dict[str, _Lane] = {}
        self._tasks: dict[_Lane, asyncio.Task[None]] = {}
        self._since: dict[Key, float] = {}

    def compare_soon(self) -> None:
        """Something has changed here, or in the list of places."""
        places = self._places()
        self._lanes = {name: self._lanes.get(name) or _Lane(name, self) for name in places}
        for name, place in places.items():
            self._lanes[name].place = place
        before, self.due = self.due, self._due()
        now = time.monotonic()
        self._since = {key: self._since.get(key, now) for key in _keys(self.due)}
        if self.due != before:
            for lane in self._lanes.values():
                lane.wake()
        self.changes.ring()

    async def run(self) -> None:
        """Send until cancelled. May be called again after a failure."""
        self._lanes.clear()
        self._tasks.clear()
        async with asyncio.TaskGroup() as group:
            while True:
                self.compare_soon()
                for lane in self._tasks.keys() - self._lanes.values():
                    self._tasks.pop(lane).cancel()
                for lane in self._lanes.values():
                    if lane not in self._tasks:
                        task = group.create_task(lane.run(), name=f"send to {self.tier}")
                        self._tasks[lane] = task
                await self.changes.until(
                    lambda: set(self._lanes.values()) != self._tasks.keys(),
                    timeout_s=_COMPARE_EVERY_S,
                )

    # --- asking ------------------------------------------------------------------------------

    def is_step_in_transfer(self, step_id: StepId) -> bool:
        """Whether the step is being sent somewhere or is among the next to be sent: it must not be
        retired then. A place that fails holds up no deletion."""
        return any(lane.is_needed(step_id) for lane in self._lanes.values())

    @property
    def trouble(self) -> str:
        return "; ".join(lane.trouble for lane in self._lanes.values() if lane.trouble)

    def _owed(self) -> list[Key]:
        """What is still to be sent, once for each place."""
        return [key for lane in self._lanes.values() for key in lane.owed()]

    def status(self, where: str, *, shared_bytes: int = 0) -> TierStatus:
        """How far it is. `where` and `shared_bytes` as in `TierStatus`."""
        owed, now = self._owed(), time.monotonic()
        return TierStatus(
            where=where,
            **vars(self.traffic),
            shared_bytes=shared_bytes,
            backlog=len(owed),
            behind_s=max((now - self._since[key] for key in owed), default=0.0),
            trouble=self.trouble,
        )

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """See `RemoteTier.drain`."""

        def finished() -> bool:
            return not self._owed() and all(
                lane.sending is None and lane.place.has_copied_all(whole=whole)
                for lane in self._lanes.values()
            )

        self.compare_soon()
        for lane in self._lanes.values():
            lane.woken.set()
        await self.changes.until(
            lambda: finished() or (not whole and bool(self.trouble)), timeout_s=timeout_s
        )
        return finished()

    def later_s(self, times: int) -> float:
        """A pause that doubles each time, with a random part so that sidecars retry separately."""
        soonest, latest = self.retry_s
        return random.uniform(0.5, 1.0) * min(latest, soonest * 2.0 ** min(times, 16))


def _keys(due: DueShards) -> Iterator[Key]:
    return ((step_id, rank) for step_id, held in due.shards.items() for rank in held)


class _Lane:
    """One place: what is known to be there, what it gets next, and how it fails."""

    place: CopyTarget

    def __init__(self, name: str, replicator: Replicator) -> None:
        self.name = name
        self.trouble = ""
        self.woken = asyncio.Event()
        self._replicator = replicator
        self._there: set[Key] = set()
        self._refused: set[Key] = set()
        self._rejected: set[Key] = set()
        self._listed_at = 0.0
        self.sending: StepId | None = None
        self._newest: StepId | None = None
        self._failures = 0
        self._polls = 0

    # --- asking ------------------------------------------------------------------------------

    def owed(self) -> list[Key]:
        """The shards that should be there and are not."""
        due, there = self._replicator.due, self._there | self._refused
        return [key for key in _keys(due) if key[0] in due.owed and key not in there]

    def _missing(self) -> list[Key]:
        """The shards to be sent."""
        there = self._there | self._refused | self._rejected
        return [key for key in _keys(self._replicator.due) if key not in there]

    def _next(self) -> StepId | None:
        due = self._replicator.due
        missing = {step_id for step_id, _ in self._missing()}
        return next_step_to_send(due, missing, after=self._newest, outage=self._failures > 0)

    def is_needed(self, step_id: StepId) -> bool:
        """Whether the step is being sent, comes next, or is the oldest that was not passed over: of
        two steps that become due together, the first may be retired by then."""
        due = self._replicator.due
        waiting = {step for step, _ in self._missing() if step in due.owed & due.settled}
        newer = [step_id for step_id in waiting if self._newest is None or step_id > self._newest]
        oldest = min(newer, default=None)
        return not self._failures and step_id in (self.sending, self._next(), oldest)

    # --- working -----------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something new. It does not shorten the pause after a failure."""
        if not self._failures:
            self.woken.set()

    async def run(self) -> None:
        while True:
            self.woken.clear()
            pause_s = await self._attempt()
            self._replicator.changes.ring()
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: it loses a cancellation that comes just as it ends (Python 3.11).
                async with asyncio.timeout(pause_s):
                    await self.woken.wait()

    async def _attempt(self) -> float:
        """Send one step. Returns after how many seconds to go on. One attempt never sends the whole
        backlog: if steps come as fast as they are sent, that would never end, and nothing would be
        completed or deleted there."""
        try:
            settled = await self._round()
        except KeepstepError as error:
            return self._failed(error)
        self._works()
        if self._next() is not None:
            return 0.0
        if settled:
            self._polls = 0
            return self._listed_at + SCAN_AGAIN_S - time.monotonic()
        self._polls += 1
        return self._replicator.later_s(self._polls)

    async def _round(self) -> bool:
        age_s = time.monotonic() - self._listed_at
        waits = self._next() is not None
        if not self._listed_at or age_s >= (self.place.fresh_s if waits else SCAN_AGAIN_S):
            await self._scan()
        self.sending = self._next()
        try:
            return await self.place.complete_and_prune_copies(await self._send(self.sending))
        finally:
            self.sending = None

    async def _scan(self) -> None:
        began = time.monotonic()
        self._there = await self.place.list_held_shards(self._there)
        self._listed_at = began
        self._replicator.compare_soon()
        here = set(_keys(self._replicator.due))
        self._refused &= here
        self._rejected &= here

    async def _send(self, step_id: StepId | None) -> list[LocalShard]:
        """Send the shards of this step that are missing there. Returns all of its shards, if they
        are there now."""
        if step_id is None:
            return []
        held = self._replicator.due.shards[step_id]
        for rank in sorted(rank for step, rank in self._missing() if step == step_id):
            await self._send_shard(held[rank])
        self._newest = step_id if self._newest is None else max(step_id, self._newest)
        self._polls = 0
        return list(held.values()) if all((step_id, rank) in self._there for rank in held) else []

    async def _send_shard(self, shard: LocalShard) -> None:
        key, began = (shard.step_id, shard.rank), time.monotonic()
        try:
            sent_bytes = await self.place.write_shard(shard)
        except (ShardGone, ShardUnreadable, ImageError) as error:
            # Retired or damaged here, or another image has its place: sending it again changes
            # nothing.
            self._refused.add(key)
            if not isinstance(error, ShardGone):
                raise
            return
        except CopyRejected:
            self._rejected.add(key)
            raise
        except KeepstepError:
            if key in _keys(self._replicator.due):
                raise
            return  # retired meanwhile: it is no longer needed
        self._there.add(key)
        self._works()  # not after the whole backlog: if steps come as fast, that never ends
        if sent_bytes is not None:
            self._replicator.traffic.count_sent(sent_bytes, time.monotonic() - began)
        self._replicator.changes.ring()

    # --- how it goes -------------------------------------------------------------------------

    def _works(self) -> None:
        if self.trouble:
            info("tier.recovered", tier=str(self._replicator.tier), target=self.name)
        self.trouble, self._failures = "", 0

    def _failed(self, error: KeepstepError) -> float:
        self._failures += 1
        self._replicator.traffic.failures += 1
        self._listed_at = 0.0  # list anew, also if nothing waits: only an answer ends the trouble
        pause_s = self._replicator.later_s(self._failures)
        if self.trouble != str(error):
            tier, wait_s = str(self._replicator.tier), round(pause_s, 1)
            warn(
                "tier.send_failed", tier=tier, target=self.name, error=str(error), retry_in_s=wait_s
            )
        self.trouble = str(error)
        return pause_s


# --- which step is sent ----------------------------------------------------------------------


def next_step_to_send(
    due: DueShards, missing: Collection[StepId], *, after: StepId | None, outage: bool = False
) -> StepId | None:
    """The step to send next; None when no step is missing. `after`: the newest step that was sent.
    `outage`: the place was away until now, so the newest step comes first.

    A step survives a node, or counts in an archive, only if all its shards were sent, and every
    member of the run chooses by itself. Of members that cannot send all steps before they are
    retired, all must skip the same ones. So of the newer steps they send the one on the coarsest
    grid: of the later epoch, then with the most trailing zeros in binary, then the newer one. Only
    when there is no newer step are older ones sent, oldest first.
    """
    newer = [
        step_id
        for step_id in missing
        if step_id in due.settled and (after is None or step_id > after)
    ]
    if newer:
        return max(newer) if outage else max(newer, key=_merit)
    return min((step_id for step_id in missing if step_id in due.owed), default=None)


def _merit(step_id: StepId) -> tuple[int, int, StepId]:
    zeros = (step_id.step & -step_id.step).bit_length() if step_id.step else 64
    return step_id.epoch.number, zeros, step_id
