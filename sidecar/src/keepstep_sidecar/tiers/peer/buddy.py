"""A buddy as a place for copies: the chunks that it lacks are sent over some connections, then the
seal."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from keepstep.errors import StorageError
from keepstep.image.control_page import Manifest
from keepstep.steps import StepId
from keepstep_sidecar.log import info
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.tiers.peer.client import PeerCalls, PeerConnections
from keepstep_sidecar.tiers.peer.protocol import CopiesToKeep
from keepstep_sidecar.tiers.peer.served_shards import ServedShards
from keepstep_sidecar.tiers.remote_tier import LocalInventory
from keepstep_sidecar.tiers.replicator import SCAN_AGAIN_S, CopyRejected, DueShards, Key
from keepstep_sidecar.tiers.source import ShardSource
from keepstep_sidecar.volume.files import WRITER_NICENESS, RateLimit
from keepstep_sidecar.volume.run_tree import LocalShard, ShardName

T = TypeVar("T")

_ASK_AGAIN_S = 1.0


class ManifestMismatch(CopyRejected):
    """The buddy says that it holds other bytes than it was sent."""


class Buddy:
    """See `Place`. `expected`: the node rank that must answer; None for any pod of the run.
    `request`: returns which copies it should keep."""

    fresh_s = SCAN_AGAIN_S

    def __init__(
        self,
        address: str,
        *,
        expected: int | None,
        calls: PeerCalls,
        shards: ServedShards,
        pace: RateLimit,
        request: Callable[[], protocol.CopiesToKeep],
    ) -> None:
        self.address = address
        self.announced: protocol.CopiesToKeep | None = None
        self._expected = expected
        self._calls, self._shards, self._pace = calls, shards, pace
        self._needed = request

    async def list_held_shards(self, sent: Collection[Key]) -> set[Key]:
        self.announced = None
        listing = await self._call(lambda links: links.ask(lambda link: link.listing()))
        return {(shard.step_id, shard.rank) for shard in listing.shards}

    async def write_shard(self, shard: LocalShard) -> int | None:
        began = time.monotonic()
        self.announced = None  # what may go there depends on what is there
        sent = await self._call(lambda links: send_shard(shard, self._shards, links, self._pace))
        info(
            "peer.copy_sent",
            step=str(shard.step_id),
            rank=shard.rank,
            target=self.address,
            size_bytes=sent,
            duration_s=round(time.monotonic() - began, 4),
        )
        return sent

    async def complete_and_prune_copies(self, sent: Collection[LocalShard]) -> bool:
        request = self._needed()
        if request.ranks and request != self.announced:
            await self._call(
                lambda links: links.ask(lambda link: link.send_copies_to_keep(request))
            )
            self.announced = request
        return True

    def has_copied_all(self, *, whole: bool) -> bool:
        return True

    async def _call(self, work: Callable[[PeerConnections], T]) -> T:
        return await self._calls.run_on_thread(work, self.address, expected=self._expected)


def send_shard(
    shard: LocalShard, shards: ServedShards, links: PeerConnections, pace: RateLimit
) -> int | None:
    """Make a shard of this machine durable at the buddy, its base first. Returns the bytes sent,
    None when the shard was already there.

    Raises StorageError, DigestError when the shard here is damaged, Lied.
    """
    source, name = shards.source(shard, where=str(shard.path)), ShardName.of(shard)
    if source.beside is None:
        return _send(source, name, links, pace)
    base_bytes = _send(source.beside, name.base_shard_name, links, pace)
    sent_bytes = _send(source, name, links, pace)
    return None if sent_bytes is None else sent_bytes + (base_bytes or 0)


def _send(at: ShardSource, name: ShardName, links: PeerConnections, pace: RateLimit) -> int | None:
    shard = at.shard
    with verified_chunks.open_verified(at) as source, links.borrow_connection() as link:
        missing = _Missing(name, source.manifest, links)
        begun = missing.ask()
        if begun.sealed:
            return None
        sent = 0

        def put(chunk: int, data: memoryview) -> None:
            # `data` is verified: a damaged shard must not be sent, because the buddy would be
            # blamed.
            nonlocal sent
            pace.wait(len(data))
            with links.borrow_connection() as link:
                link.send_chunk(name, chunk, data)
            with missing.lock:
                sent += len(data)

        verified_chunks.for_each_verified(
            source,
            begun.missing,
            put,
            threads=protocol.STREAMS,
            niceness=WRITER_NICENESS,
            still=missing,
        )
        sealed = link.seal(name, size=shard.size_bytes)
        if sealed.root != shard.root:
            raise ManifestMismatch(
                f"step {name.id}, rank {name.rank}: {link.name} says that its copy has the"
                f" root {sealed.root}, not {shard.root}; it gets no copy of this shard again"
            )
        return sent


class _Missing:
    """The chunks that the buddy lacks. The buddy is asked again with growing pauses: an image of
    its own that is much like this one may have become durable there meanwhile."""

    def __init__(self, name: ShardName, manifest: Manifest, links: PeerConnections) -> None:
        self.lock = threading.Lock()
        self._name, self._manifest, self._links = name, manifest, links
        self._left: frozenset[int] = frozenset()
        self._asking = threading.Lock()
        self._pause_s = _ASK_AGAIN_S
        self._ask_at = time.monotonic() + self._pause_s

    def ask(self) -> protocol.MissingChunks:
        """Ask the buddy which chunks it lacks. Raises StorageError."""
        with self._links.borrow_connection() as link:
            size = self._manifest.layout.size_bytes
            begun = link.begin(self._name, self._manifest.to_bytes(), size=size)
            if not set(begun.missing) <= set(self._manifest.chunk_indices):
                raise StorageError(
                    f"{link.name} misses chunks that step {self._name.id} does not have"
                )
        self._left = frozenset(begun.missing)
        return begun

    def __call__(self, chunk: int) -> bool:
        """Whether this chunk is still to be sent."""
        if time.monotonic() > self._ask_at and self._asking.acquire(blocking=False):
            try:
                with contextlib.suppress(StorageError):  # it is busy: its last answer still counts
                    self.ask()
                self._pause_s *= 2
                self._ask_at = time.monotonic() + self._pause_s
            finally:
                self._asking.release()
        return chunk in self._left


# --- what buddies should hold ---------------------------------------------------------------------


def due_shards(local: LocalInventory) -> DueShards:
    """What buddies should hold: the newest commit and all later steps. Before these, of the commits
    that are still here, those that other pods send as well (`replicator.next_step_to_send`)."""
    commit = max(local.commits, default=None)
    return DueShards(
        shards=local.shards,
        owed=frozenset(step_id for step_id in local.shards if commit is None or step_id >= commit),
        settled=frozenset(
            step_id for step_id in local.shards if commit is None or step_id <= commit
        ),
        commit=commit,
    )


def compute_copies_to_keep(local: LocalInventory) -> CopiesToKeep:
    """What buddies should keep: what they should hold."""
    ranks: dict[int, tuple[StepId, ...]] = {}
    for step_id in sorted(due_shards(local).owed):
        for rank in local.shards[step_id]:
            ranks[rank] = (*ranks.get(rank, ()), step_id)
    return CopiesToKeep(committed=max(local.commits, default=None), ranks=ranks)
