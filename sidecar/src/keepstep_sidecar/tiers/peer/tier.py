"""The peer tier: sends what is durable here, keeps copies for others, fetches what was lost."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from keepstep.core.shard import Shard
from keepstep.errors import KeepstepError, StorageError, UsageError
from keepstep.steps import StepId, Tier
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.log import warn
from keepstep_sidecar.tiers.peer.buddy import Buddy, compute_copies_to_keep, due_shards
from keepstep_sidecar.tiers.peer.client import PeerCalls, PeerConnection, PeerSource
from keepstep_sidecar.tiers.peer.handlers import ServerContext
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.peer_list import OWN, KnownPeer, PeerList
from keepstep_sidecar.tiers.peer.protocol import PodShardListing
from keepstep_sidecar.tiers.peer.served_shards import ServedShards
from keepstep_sidecar.tiers.peer.server import Join, Server
from keepstep_sidecar.tiers.peer.tls import PodIdentity, TlsContextSource
from keepstep_sidecar.tiers.remote_tier import Inventory, RemoteShard, RemoteTier, TierStatus
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.files import RateLimit
from keepstep_sidecar.volume.volume import VolumeSet

_LIST_TIMEOUT_S = 10.0
_LIST_EVERY_S = 15.0
_LISTEN_AGAIN_S = 5.0


class PeerTier(RemoteTier):
    """Sends, keeps and fetches copies."""

    tier = Tier.PEER

    def __init__(
        self,
        settings: PeerSettings,
        volumes: VolumeSet,
        *,
        run: str,
        credentials: TlsContextSource,
        keep_fresh: Callable[[], Coroutine[Any, Any, None]] | None = None,
        join: Join | None = None,
    ) -> None:
        """Binds the address, if it can be had. `keep_fresh`: renews the credentials while `run`
        runs. `join`: takes members over, where this sidecar leads the run."""
        self._settings = settings
        self._run = run
        self._keep_fresh = keep_fresh
        self._join = join
        self._copies = KeptCopies(
            volumes.volumes, run=run, commit=lambda: self.facts.commit(), pace=volumes.pace
        )
        self._served = ServerContext(ServedShards(volumes, self._copies, run=run), self._copies)
        self._calls = PeerCalls(credentials)
        self._pace = RateLimit(settings.bytes_per_second)
        self._places: dict[str, Buddy] = {}
        super().__init__(due=lambda: due_shards(self.facts.local()), places=self._buddies)
        self._changes = self.replicator.changes
        self._directory = PeerList(complete=False)
        self._scanned = False
        self._scanning = asyncio.Lock()
        self._server: Server | None = None
        self._listen()

    def _listen(self) -> None:
        """Bind the address to listen on. If its port is taken, maybe by the
        training script, any free one will do where the operator tells the others. Never raises: a
        sidecar that did not start would keep training from starting."""
        listen = self._settings.listen
        by_hand, before = self._settings.fixed, self.warning
        any_port = f"{listen.rpartition(':')[0]}:0"
        for address in (listen, *(() if by_hand else (any_port,))):
            try:
                self._server = Server(
                    address, self._calls.credentials, self._context, join=self._join
                )
                break
            except StorageError as error:
                self.warning = _taken(str(error), by_hand=by_hand)
        if self._server is not None and address == any_port:
            self.warning += f". Port {self._server.port} is used, which NetworkPolicies must allow"
        elif self._server is not None:
            self.warning = ""
        if self.warning not in ("", before):
            warn("peer.server_degraded", reason=self.warning)

    def _context(self, sender: PodIdentity) -> ServerContext:
        """What is served to this client. Raises UsageError for a pod of another run."""
        own = self._calls.credentials.current().identity
        if not sender.shares_run(own):
            raise UsageError(f"this is {sender}; here is {own}, and other runs are not served")
        return self._served

    async def _keep_serving(self) -> None:
        """Start to serve, once there is a port: what took it may have been there only briefly."""
        while self._server is None:
            await asyncio.sleep(_LISTEN_AGAIN_S)
            self._listen()
        self._server.start()

    # --- who is who --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address to be told to the leader; '' when this machine serves nothing."""
        if self._server is None:
            return ""
        advertised = self._settings.advertise or self._settings.listen
        if self._settings.listen.endswith(f":{self._server.port}"):
            return advertised
        return f"{advertised.rpartition(':')[0]}:{self._server.port}"

    def refused(self) -> list[str]:
        """Which clients were refused last, and why."""
        refusals = self._server.list_refused_hosts() if self._server is not None else {}
        return [f"a machine at {host} was refused: {why}" for host, why in refusals.items()]

    @property
    def knows_all_peers(self) -> bool:
        """Whether all other pods are known."""
        return self._directory.complete

    def peers_are(
        self,
        peers: tuple[Peer, ...],
        *,
        agents: Mapping[str, str] = MappingProxyType({}),
        awaits: str = "",
        complete: bool = True,
    ) -> None:
        """Take over the leader's lists. `peers`, `agents`, `awaits`: see
        `ReportReply`. `complete`: no other pod can hold anything."""
        self._directory.replace_peers(
            peers, own=self.address, agents=agents, awaits=awaits, complete=complete
        )
        self.replicator.compare_soon()

    # --- what is where -----------------------------------------------------------------------

    async def scan(self) -> Inventory:
        await self._scan()
        known = list(self._directory.known.values())
        await asyncio.gather(*map(self._ask, known))
        self.replicator.compare_soon()
        return self._directory.combine_inventories(self._copies.all())

    async def _scan(self) -> None:
        """Find the copies of an earlier life; again while some of them cannot be read. Afterwards
        only check which copies were removed."""
        async with self._scanning:
            again = not self._scanned or self._copies.unreadable
            await self._calls.run_blocking_file_work(
                self._copies.scan if again else self._copies.forget_missing_copies
            )
            self._scanned = True

    async def _ask(self, member: KnownPeer) -> None:
        def ask(link: PeerConnection) -> tuple[PodShardListing, int | None]:
            return link.listing(), link.identity.node_rank if link.identity else None

        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                listing, node_rank = await self._calls.run_on_thread(
                    lambda links: links.ask(ask), member.address, expected=member.expected_identity
                )
        except (KeepstepError, TimeoutError) as error:
            self._directory.record_pod_answer(
                member.address, None, str(error) or "no answer in time"
            )
            return
        member.node_rank = None if member.node else node_rank
        self._directory.record_pod_answer(member.address, listing)

    def sources(self, shard: RemoteShard) -> Sequence[ShardSource]:
        """One source for each pod that holds the shard."""
        found: list[ShardSource] = []
        for address in shard.key or ():
            if (address, shard.step_id, shard.rank) in self._directory.liars:
                continue
            if address == OWN:
                where = f"step {shard.step_id}, rank {shard.rank} from the copy kept here"
                found.append(self._served.shards.source(shard, where=where))
                continue
            known = self._directory.known.get(address)
            found.append(
                PeerSource.from_address(
                    address,
                    shard,
                    expected=known.expected_identity if known is not None else None,
                    run=self._run,
                    credentials=self._calls.credentials,
                    received=self.replicator.traffic.count_received,
                )
            )
        return found

    def may_hold(self, shard: RemoteShard) -> bool:
        """See `RemoteTier`."""
        return any(map(self._directory.is_last_listing_valid, shard.key or ()))

    def exclude_source(self, source: ShardSource, step_id: StepId) -> None:
        """See `RemoteTier.exclude_source`. The step is not named there again."""
        address = source.address if isinstance(source, PeerSource) else OWN
        self._directory.liars.add((address, step_id, source.shard.rank))

    # --- what happens here -------------------------------------------------------------------

    def list_copies_for_peers(self) -> tuple[Shard, ...]:
        """The complete copies that lie here for other pods."""
        return self._copies.all()

    async def free_volume_space(self, size_bytes: int) -> bool:
        """A volume is full: delete copies, oldest first, but never the newest committed copy of a
        rank. Returns False when there was nothing to delete."""
        return await self._calls.run_blocking_file_work(
            functools.partial(self._copies.make_room, size_bytes)
        )

    def _buddies(self) -> dict[str, Buddy]:
        """The buddies, by address."""
        chosen = [member for member in self._directory.known.values() if member.buddy]
        self._places = {
            member.address: self._places.get(member.address) or self._buddy(member)
            for member in chosen
        }
        return self._places

    def _buddy(self, member: KnownPeer) -> Buddy:
        return Buddy(
            member.address,
            expected=member.node_rank,
            calls=self._calls,
            shards=self._served.shards,
            pace=self._pace,
            request=lambda: compute_copies_to_keep(self.facts.local()),
        )

    # --- working -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve, look and send, until cancelled. May be called again after a failure."""
        await self._scan()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_serving(), name="serve peers")
            if self._keep_fresh is not None:
                group.create_task(self._keep_fresh(), name="peer certificate")
            group.create_task(self._scan_forever(), name="look at peers")
            group.create_task(super().run(), name="send to buddies")

    async def _scan_forever(self) -> None:
        """Find out which copies were removed."""
        while True:
            await self._scan()
            await asyncio.sleep(_LIST_EVERY_S)

    async def drain(self, *, timeout_s: float, whole: bool = True) -> bool:
        """See `RemoteTier`. A buddy that cannot be reached may have ended, too."""
        return await super().drain(timeout_s=timeout_s, whole=False)

    def status(self) -> TierStatus:
        where = ", ".join(self._places) or "no buddy"
        return self.replicator.status(where, shared_bytes=self._copies.shared_bytes)

    async def close(self) -> None:
        """Call this when `run` has ended."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._calls.close()
        self._copies.close()


# --- wording ------------------------------------------------------------------


def _taken(reason: str, *, by_hand: bool) -> str:
    """Peers are not served at the address that was asked for; `reason`: why."""
    if by_hand:
        return f"peers are not served: {reason}; it tries again. Or name another --peer-listen"
    return (
        f"peers are not served where the policy says: {reason}. If the training script uses that"
        " port, give the policy another sidecar.ports.peer"
    )
