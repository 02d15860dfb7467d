"""Copies for buddies: what each has, what it gets next, and when to retry after a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from keepstep.errors import KeepstepError
from keepstep.steps import StepId
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.tiers.peer.client import Calls, Links
from keepstep_sidecar.tiers.peer.placement import better
from keepstep_sidecar.tiers.peer.protocol import Listing, Wanted
from keepstep_sidecar.tiers.peer.send import Lied, send
from keepstep_sidecar.tiers.peer.serve import Shards
from keepstep_sidecar.tiers.tier import LocalInventory, Traffic
from keepstep_sidecar.volume.direct_io import RateLimit
from keepstep_sidecar.volume.scan import LocalShard

T = TypeVar("T")

_LONGEST_BACKOFF_S = 30.0
_LOOK_AGAIN_S = 60.0
"""How often to list a buddy's shards again: a buddy may have lost its drive."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What all feeders use. `changes` rings when the outbox changes, and when a shard has arrived
    or was found at a buddy. `traffic`: of all buddies together."""

    outbox: Outbox
    shards: Shards
    calls: Calls
    changes: Changes
    pace: RateLimit
    traffic: Traffic


class Feeder:
    """Sends what is due to the buddy at `address`, for as long as `run` runs."""

    def __init__(self, address: str, tools: Tools, *, expected: int | None) -> None:
        self.address = address
        self.trouble = ""
        self._there: set[Key] = set()
        self._known = False
        self._refused: set[Key] = set()
        self._sending: StepId | None = None
        self._newest: StepId | None = None
        self._said: Wanted | None = None
        self._looked_at = 0.0
        self._failures = 0
        self._tools = tools
        self._expected = expected

    # --- asking ------------------------------------------------------------------------------

    def backlog(self) -> list[LocalShard]:
        """The shards that the buddy should hold but does not."""
        return self._tools.outbox.due(self._there)

    def waiting_s(self) -> float:
        """For how many seconds the oldest of them has been waiting."""
        return self._tools.outbox.waiting_s(self._there)

    def needs(self, id: StepId) -> bool:
        """Whether this step is being sent or is the next one. Never for a buddy that fails at the
        moment, so that it holds up no deletion."""
        if self._failures:
            return False
        return id in (self._sending, self._tools.outbox.best(self._newest))

    # --- working -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._guarded()

    async def _guarded(self) -> None:
        try:
            await self._round()
            self._failures, self.trouble = 0, ""
            await self._idle()
        except KeepstepError as error:
            await self._failed(error)

    async def _idle(self) -> None:
        """Wait until there is something to do, or it is time to look again."""
        changes = self._tools.changes
        left_s = self._looked_at + _LOOK_AGAIN_S - time.monotonic()
        await changes.until(
            lambda: self._choose() is not None or self._said != self._tools.outbox.wanted(),
            timeout_s=max(left_s, 0.0),
        )

    async def _failed(self, error: KeepstepError) -> None:
        self._failures += 1
        self._tools.traffic.failures += 1
        self._known, self._said = False, None
        if str(error) != self.trouble:
            warn("copy not sent", to=self.address, reason=str(error))
        self.trouble = str(error)
        self._tools.changes.ring()
        await asyncio.sleep(min(2.0 ** min(self._failures - 2, 10), _LONGEST_BACKOFF_S))

    async def _round(self) -> None:
        """List what the buddy has, send one shard, and say what is wanted. A round never sends the
        whole backlog: if steps come faster than they are sent, that would never end, and the buddy
        would delete nothing."""
        if not self._known or time.monotonic() - self._looked_at >= _LOOK_AGAIN_S:
            await self._look()
        if (found := self._choose()) is not None:
            await self._send(found)
        await self._want()

    async def _look(self) -> None:
        def ask(links: Links) -> Listing:
            with links.taken() as link:
                return link.listing()

        listing = await self._call(ask)
        self._there = {(one.id, one.rank) for one in listing.shards}
        self._known, self._looked_at, self._said = True, time.monotonic(), None
        self._tools.changes.ring()

    async def _want(self) -> None:
        wanted = self._tools.outbox.wanted()
        if wanted == self._said:
            return

        def tell(links: Links) -> None:
            with links.taken() as link:
                link.want(wanted)

        if wanted.ranks:
            await self._call(tell)
        self._said = wanted

    def _choose(self) -> LocalShard | None:
        """The next shard to send. A step that was begun comes first, so that it becomes whole
        there."""
        outbox, there = self._tools.outbox, self._there | self._refused
        for id in (self._sending, outbox.best(self._newest)):
            if id is not None and (left := outbox.of(id, there)):
                return left[0]
        return next(iter(outbox.due(there)), None)

    async def _send(self, found: LocalShard) -> None:
        tools, key = self._tools, (found.step_id, found.rank)
        self._sending = found.step_id
        self._newest = found.step_id if self._newest is None else max(self._newest, found.step_id)
        began = time.monotonic()

        def work(links: Links) -> int:
            return send(found, tools.shards, links, tools.pace)

        try:
            sent = await self._call(work)
        except Lied:
            self._refused.add(key)
            raise
        except KeepstepError:
            if key not in tools.outbox.found:  # retired meanwhile: it is no longer needed
                return
            raise
        finally:
            self._sending = None
        self._there.add(key)
        self._count(found, sent, time.monotonic() - began)

    def _count(self, found: LocalShard, sent: int, seconds: float) -> None:
        self._tools.traffic.count_sent(sent, seconds)
        say(
            "copy sent",
            step=str(found.step_id),
            rank=found.rank,
            to=self.address,
            bytes=sent,
            seconds=round(seconds, 4),
        )
        self._tools.changes.ring()

    async def _call(self, work: Callable[[Links], T]) -> T:
        return await self._tools.calls.run(work, self.address, expected=self._expected)


# --- order -----------------------------------------------------------------------------------
#
# Which of this machine's shards a buddy should hold, and in which order they are sent. No I/O.


Key = tuple[StepId, int]


@dataclass(kw_only=True)
class Outbox:
    """Durable shards of this machine. `committed`: the newest commit among them."""

    clock: Callable[[], float] = time.monotonic
    found: dict[Key, LocalShard] = field(default_factory=dict)
    committed: StepId | None = None
    _since: dict[Key, float] = field(default_factory=dict)

    def compare(self, local: LocalInventory) -> None:
        """Take over all that this machine holds now."""
        now = self.clock()
        self.found = {
            (id, rank): one for id, held in local.shards.items() for rank, one in held.items()
        }
        self._since = {key: self._since.get(key, now) for key in self.found}
        self.committed = max(local.commits, default=None)

    def wanted(self) -> Wanted:
        """What buddies should keep: all shards of this machine, back to the newest commit."""
        ranks: dict[int, tuple[StepId, ...]] = {}
        for id, rank in sorted(self.found):
            if self.committed is None or id >= self.committed:
                ranks[rank] = (*ranks.get(rank, ()), id)
        return Wanted(committed=self.committed, ranks=ranks)

    def due(self, there: Collection[Key]) -> list[LocalShard]:
        """The shards that a buddy lacks, most urgent first: those of the newest commit, then of
        later steps, oldest first."""
        keys = sorted(key for key in self.found if key not in there)
        return [self.found[k] for k in keys if self.committed is None or k[0] >= self.committed]

    def of(self, id: StepId, there: Collection[Key]) -> list[LocalShard]:
        """The shards of this step that a buddy lacks."""
        return [self.found[key] for key in sorted(self.found) if key[0] == id and key not in there]

    def best(self, after: StepId | None) -> StepId | None:
        """The step to send next when not all can be sent: see `placement.better`. If commits are
        known, only committed steps are considered."""
        best: StepId | None = None
        for id in {id for id, _ in self.found}:
            known = self.committed is None or id <= self.committed
            if known and (after is None or id > after):
                best = better(id, best)
        return best

    def waiting_s(self, there: Collection[Key]) -> float:
        """For how many seconds the oldest shard that is due has been waiting."""
        since = (self._since[one.step_id, one.rank] for one in self.due(there))
        return self.clock() - min(since, default=self.clock())
