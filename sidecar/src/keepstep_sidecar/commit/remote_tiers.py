"""Looks after the depots: runs them, asks what they hold, waits for what they send, closes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from keepstep.steps import StepId, Tier
from keepstep.wire.reports import Peer
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.concurrency import Changes, Tasks
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.tier import (
    Acquainted,
    Depot,
    DepotStatus,
    Keeper,
    Noticing,
    Remote,
    Retaining,
)

_LOOK_EVERY_S = 60.0
_RETRY_S = 5.0
"""While some depot does not answer."""

_STALE_S = 5.0
"""A vote that begins now is worth another look at what was seen before that."""

_PATIENCE_S = 5.0
"""A rank that holds something here waits so long to hear whether there is something newer."""

_LONGEST_LOOK_S = 20.0
_LONGEST_START_S = 300.0
"""Trainers of one run begin that far apart: some load data first, or compile."""

_ASK_FOR_S, _ASK_AGAIN_S = 6.0, 0.5
"""A rank that holds nothing is told that this is unknown only after so long."""

_NEWER_S = 60.0
"""A rank that holds nothing here, but finds something in an archive, waits so long for the operator
to introduce the pods that may hold something newer."""

_SOON_S = 0.3


Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class RemoteTiers:
    """Of one sidecar. Does nothing at all where there are no depots."""

    def __init__(self, committer: Committer, changes: Changes) -> None:
        self._committer = committer
        self._remotes = committer.remotes
        self._changes = changes
        self._looked_at = -_STALE_S
        self._told: tuple[tuple[Peer, ...], str, bool] | None = None
        self._asking = 0
        self._meeting = 0
        self.awaits = ""

    @property
    def depots(self) -> tuple[Depot, ...]:
        return self._remotes.depots

    # --- running -----------------------------------------------------------------------------

    def start(self, tasks: Tasks, looked: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`looked`: what to do once everything was seen for the first time."""
        for depot in self.depots:
            if isinstance(depot, Retaining):
                depot.pinned = self._committer.pinned
            if isinstance(depot, Keeper):
                depot.commit = lambda: self._committer.run_view.commit
            if isinstance(depot, Noticing):
                depot.changed = lambda: tasks.spawn(self.look(), "look at what is new")
            tasks.keep(depot.run, f"depot {depot.tier}")
        if self.depots:
            tasks.keep(functools.partial(self._watch, looked), "look at depots")

    async def _watch(self, looked: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.look()
        await looked()
        while True:
            await asyncio.sleep(_RETRY_S if self._remotes.unknown else _LOOK_EVERY_S)
            await self.look()

    async def look(self, *, anew: bool = False) -> None:
        """Ask all depots; `anew` as in `Remotes.look`."""
        await self._committer.look_beyond(anew=anew)
        self._looked_at = time.monotonic()

    async def _look_at_peers(self) -> None:
        try:
            await self.look(anew=True)
        finally:
            self._meeting -= 1
            self._changes.ring()

    async def fresh(self, *, held: bool, timeout_s: float) -> None:
        """Before a vote: know what depots hold. `held`: the rank has something in this pod, and
        does not wait for long."""
        if not self.depots:
            return
        wait_s = min(timeout_s, _PATIENCE_S) if held else timeout_s
        await self._changes.until(lambda: self._remotes.looked and self._met, timeout_s=wait_s)
        if held:
            return
        self._asking += 1
        self._changes.ring()
        try:
            await self._introduced(timeout_s)
        finally:
            self._asking -= 1

    async def _introduced(self, timeout_s: float) -> None:
        """Look until every pod that may hold something was asked, or it takes too long: that is
        sooner where something is known to go on from, and where no operator is there."""
        began = time.monotonic()
        longest, newer = (began + min(timeout_s, one) for one in (_LONGEST_START_S, _NEWER_S))
        while (now := time.monotonic()) < longest:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(longest - now, _LONGEST_LOOK_S)):
                    await self._seen()
            if not self._awaits_others:
                await self._changes.until(lambda: self._met, timeout_s=_LONGEST_LOOK_S)
                return
            worth_it = self._answered and not self._remotes.ids
            if time.monotonic() >= (longest if worth_it else newer):
                return
            await self._changes.until(lambda: not self._awaits_others, timeout_s=_ASK_AGAIN_S)

    async def _seen(self) -> None:
        """Look, and look again while nothing is known: where all pods of a run begin at once, one
        is asked before it serves, and before the operator has told it of the others."""
        if time.monotonic() - self._looked_at > _STALE_S:
            await self.look()
        deadline = time.monotonic() + _ASK_FOR_S
        while self._remotes.unknown and not self._remotes.ids:
            if not self._awaits_others and time.monotonic() > deadline:
                return
            await asyncio.sleep(_ASK_AGAIN_S)
            await self.look()

    @property
    def _met(self) -> bool:
        """The pods that the operator named last were asked."""
        return not self._meeting

    @property
    def _awaits_others(self) -> bool:
        """The operator has not heard of all pods yet: some began a moment later."""
        return any(isinstance(one, Acquainted) and not one.introduced for one in self.depots)

    @property
    def _answered(self) -> bool:
        """The operator is there, so that it will say when it has heard of them all."""
        return self._committer.run_view.heard and not self._committer.run_view.silent

    @property
    def asking(self) -> bool:
        """A vote waits for what the operator answers next."""
        return self._asking > 0 and bool(self._remotes.unknown)

    def meet(
        self, peers: tuple[Peer, ...], spawn: Spawn, *, awaits: str = "", complete: bool = True
    ) -> None:
        """The operator names the run's other pods, and what it is making reachable. `complete`: all
        pods have reported to it."""
        if self._told == (told := (peers, awaits, complete)):
            return
        self._told, self.awaits = told, awaits
        self._changes.ring()
        for depot in self.depots:
            if isinstance(depot, Acquainted):
                depot.peers_are(peers, awaits=awaits, complete=complete)
                self._meeting += 1
                spawn(self._look_at_peers(), "look at peers")

    async def arrival(self, *, timeout_s: float) -> None:
        """Before a vote: wait for what the operator is making reachable, and look at it.

        A pod that serves nobody asks for its first certificate only then, so its first look may
        come too early.
        """
        if not any(isinstance(one, Acquainted) for one in self.depots):
            return
        if self.awaits:
            await self._changes.until(lambda: not self.awaits, timeout_s=timeout_s)
            await self.look(anew=True)
        deadline = time.monotonic() + min(timeout_s, _PATIENCE_S)
        while not self.address and self._told and self._told[0] and self._remotes.unknown:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_SOON_S)
            await self.look()

    # --- waiting -----------------------------------------------------------------------------

    def want(self, id: StepId) -> None:
        """Somebody waits until this step is archived, be it due or not."""
        for depot in self.depots:
            if isinstance(depot, Retaining):
                depot.want(id)

    async def drain(
        self, *, timeout_s: float, tier: Tier | None = None, whole: bool = True
    ) -> bool:
        """Wait until everything that should be there is, on this tier or on all. Best effort.

        `whole` as in `Depot.drain`.
        """
        chosen = [one for one in self.depots if tier in (None, one.tier)]
        try:
            async with asyncio.timeout(timeout_s):
                waits = (one.drain(timeout_s=timeout_s, whole=whole) for one in chosen)
                done = await asyncio.gather(*waits)
        except TimeoutError:
            return False
        return all(done)

    async def close(self) -> None:
        """Let go of sockets and threads."""
        ends = await asyncio.gather(*(one.close() for one in self.depots), return_exceptions=True)
        for depot, error in zip(self.depots, ends, strict=True):
            if error is not None:
                warn("depot not closed", tier=str(depot.tier), reason=str(error))

    # --- asking ------------------------------------------------------------------------------

    def has(self, tier: Tier) -> bool:
        return self._remotes.has(tier)

    def statuses(self) -> tuple[DepotStatus, ...]:
        return tuple(one.status() for one in self.depots)

    def kept(self) -> tuple[Remote, ...]:
        """Copies that this pod keeps for others."""
        keepers = (one for one in self.depots if isinstance(one, Keeper))
        return tuple(copy for one in keepers for copy in one.kept())

    @property
    def address(self) -> str:
        """Where other pods find this one, '' when nothing is served."""
        found = (one.address for one in self.depots if isinstance(one, Acquainted))
        return next(found, "")
