"""Looks after the depots: runs them, asks what they hold, waits for what they send, closes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from keepstep.reports import Peer
from keepstep.steps import StepId, Tier
from keepstep_sidecar.catalog import Catalog
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.depots import (
    Acquainted,
    Depot,
    DepotStatus,
    Keeper,
    Noticing,
    Remote,
    Retaining,
)
from keepstep_sidecar.journal import warn

_LOOK_EVERY_S = 60.0
_RETRY_S = 5.0
"""While some depot does not answer."""

_STALE_S = 5.0
"""A vote that begins now is worth another look at what was seen before that."""

_PATIENCE_S = 5.0
"""A rank that holds something here waits so long to hear whether there is something newer."""

_LONGEST_LOOK_S = 20.0

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class Beyond:
    """Of one sidecar. Does nothing at all where there are no depots."""

    def __init__(self, catalog: Catalog, changes: Changes) -> None:
        self._catalog = catalog
        self._remotes = catalog.remotes
        self._changes = changes
        self._looked_at = -_STALE_S
        self._peers: tuple[Peer, ...] = ()

    @property
    def depots(self) -> tuple[Depot, ...]:
        return self._remotes.depots

    # --- running -----------------------------------------------------------------------------

    def start(self, spawn: Spawn, looked: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`looked`: what to do once everything was seen for the first time."""
        for depot in self.depots:
            if isinstance(depot, Retaining):
                depot.pinned = self._catalog.pinned
            if isinstance(depot, Noticing):
                depot.changed = lambda: spawn(self.look(), "look at what is new")
            spawn(depot.run(), f"depot {depot.tier}")
        if self.depots:
            spawn(self._watch(looked), "look at depots")

    async def _watch(self, looked: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.look()
        await looked()
        while True:
            await asyncio.sleep(_RETRY_S if self._remotes.unknown else _LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Ask all depots anew."""
        await self._catalog.look_beyond()
        self._looked_at = time.monotonic()

    async def fresh(self, *, held: bool, timeout_s: float) -> None:
        """Before a vote: know what depots hold. `held`: the rank has something here, and does not
        wait for long."""
        if not self.depots:
            return
        wait_s = min(timeout_s, _PATIENCE_S) if held else timeout_s
        await self._changes.until(lambda: self._remotes.looked, timeout_s=wait_s)
        if not held and time.monotonic() - self._looked_at > _STALE_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, _LONGEST_LOOK_S)):
                    await self.look()

    def meet(self, peers: tuple[Peer, ...], spawn: Spawn) -> None:
        """The operator names the run's other pods."""
        if peers == self._peers:
            return
        self._peers = peers
        for depot in self.depots:
            if isinstance(depot, Acquainted):
                depot.peers_are(peers)
                spawn(self.look(), "look at peers")

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
