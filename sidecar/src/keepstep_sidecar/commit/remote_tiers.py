"""Runs the remote tiers, asks what they hold, waits for their transfers, and closes them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from keepstep.core.restore_vote import NEVER, VoteFacts
from keepstep.core.shard import Shard
from keepstep.steps import StepId, Tier
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.concurrency import ChangeNotifier, Tasks
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.remote_tier import RemoteTier, TierStatus

_SCAN_EVERY_S = 60.0
_RETRY_S = 5.0
"""How often to ask again while a remote tier does not answer."""

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


@dataclass(eq=False)
class RemoteTiers:
    """The remote tiers of one sidecar. Does nothing when none are configured. `operated`, `leads`:
    see `RunFacts`."""

    node_host: NodeHost
    changes: ChangeNotifier
    operated: bool
    leads: bool
    _listed: tuple[tuple[Peer, ...], Mapping[str, str], str, bool] | None = None
    _scanned_at: float = NEVER
    _listed_at: float = -NEVER
    _meeting: int = 0
    awaits: str = ""

    def __post_init__(self) -> None:
        self._remotes = self.node_host.remotes
        self._local_shards = self.node_host.local_shards

    @property
    def remote_tiers(self) -> tuple[RemoteTier, ...]:
        return self._remotes.remote_tiers

    # --- running -----------------------------------------------------------------------------

    def start(self, tasks: Tasks, on_scan: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`on_scan`: called once all remote tiers were asked for the first time."""
        facts = replace(
            self.node_host.make_run_facts(lambda: tasks.spawn(self.scan(), "look at what is new")),
            operated=self.operated,
            leads=self.leads,
        )
        for remote_tier in self.remote_tiers:
            remote_tier.set_run_facts(facts)
            tasks.spawn_with_retries(remote_tier.run, f"remote tier {remote_tier.tier}")
        if self.remote_tiers:
            tasks.spawn_with_retries(
                functools.partial(self._watch, on_scan), "look at remote tiers"
            )

    async def _watch(self, on_scan: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.scan()
        await on_scan()
        while True:
            await asyncio.sleep(_RETRY_S if self._remotes.unknown_reason else _SCAN_EVERY_S)
            await self.scan()

    async def scan(self, *, refresh: bool = False) -> None:
        """Ask all remote tiers what they hold; `refresh` as in `RemoteInventory.scan`."""
        await self.node_host.refresh_remotes(refresh=refresh)
        self._scanned_at = time.monotonic()

    async def _scan_peers(self) -> None:
        try:
            await self.scan(refresh=True)
        finally:
            self._meeting -= 1
            self.changes.ring()

    def get_vote_facts(self, *, held: bool, replied_at: float) -> VoteFacts:
        """The facts that decide whether a rank may vote; `held`, `replied_at`: as in
        `VoteFacts`."""
        peers, others = self._remotes.peers, bool(self._listed and any(self._listed[:2]))
        return VoteFacts(
            scanned_at=self._local_shards.scanned_at,
            replied_at=replied_at,
            tiers=bool(self.remote_tiers),
            listed_at=self._scanned_at if self._remotes.scanned else NEVER,
            held=held,
            led=self.node_host.leader_answers,
            named_at=self._listed_at,
            introduced=peers is None or peers.knows_all_peers,
            awaits=self.awaits if peers is not None else "",
            pods_unasked=self._meeting > 0,
            known=bool(self._remotes.step_ids),
            unknown=self._remotes.unknown_reason,
            contested=self._remotes.name_conflict_message,
            uncertified=peers is not None and others and not self.address,
        )

    def set_peers(
        self,
        peers: tuple[Peer, ...],
        spawn: Spawn,
        *,
        agents: Mapping[str, str] = MappingProxyType({}),
        awaits: str = "",
        complete: bool = True,
    ) -> None:
        """The leader names the other machines of the run, and agents of nodes. `awaits`: what it is
        making reachable. `complete`: all machines have reported to it."""
        peer_list = peers, agents, awaits, complete
        if self._remotes.peers is None or self._listed == peer_list:
            return
        self._listed, self._listed_at, self.awaits = peer_list, time.monotonic(), awaits
        self.changes.ring()
        self._remotes.peers.peers_are(peers, agents=agents, awaits=awaits, complete=complete)
        self._meeting += 1
        spawn(self._scan_peers(), "look at peers")

    # --- waiting -----------------------------------------------------------------------------

    def archived(self, step_id: StepId) -> bool:
        """Whether the whole step is in the archive, or was until it expired."""
        return self._remotes.archive is not None and self._remotes.archive.was_archived(step_id)

    async def drain(
        self, *, timeout_s: float, tier: Tier | None = None, whole: bool = True
    ) -> bool:
        """Wait until everything that is due there has reached `tier`, or all tiers. Best effort.

        Returns False when it was not complete in time. `whole` as in `RemoteTier.drain`.
        """
        chosen = [
            remote_tier for remote_tier in self.remote_tiers if tier in (None, remote_tier.tier)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                waits = (tier.drain(timeout_s=timeout_s, whole=whole) for tier in chosen)
                done = await asyncio.gather(*waits)
        except TimeoutError:
            return False
        return all(done)

    async def close(self) -> None:
        """Close the sockets and end the threads of all remote tiers."""
        ends = await asyncio.gather(
            *(tier.close() for tier in self.remote_tiers), return_exceptions=True
        )
        for remote_tier, error in zip(self.remote_tiers, ends, strict=True):
            if error is not None:
                warn("tier.close_failed", tier=str(remote_tier.tier), error=str(error))

    # --- asking ------------------------------------------------------------------------------

    def statuses(self) -> dict[Tier, TierStatus]:
        """How far each tier is; with the trouble of another run's archive, if this run begins from
        there."""
        found: dict[Tier, TierStatus] = {}
        for tier in self.remote_tiers:
            status, own = tier.status(), found.get(tier.tier)
            if own is None:
                found[tier.tier] = status
            elif status.trouble and not own.trouble:
                found[tier.tier] = replace(own, trouble=f"{status.where}: {status.trouble}")
        return found

    def list_copies_for_others(self) -> tuple[Shard, ...]:
        """Copies that this pod keeps for other pods."""
        return () if self._remotes.peers is None else self._remotes.peers.list_copies_for_peers()

    @property
    def address(self) -> str:
        """The address at which other pods reach this one; '' when this pod serves nothing."""
        return "" if self._remotes.peers is None else self._remotes.peers.address
