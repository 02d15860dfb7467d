"""Which trainer owns which rank. A lease lives as long as its connection, or its process.

The kernel closes a connection when the last process that has it open dies, which may be a data
loader's worker that outlives its trainer. So the trainer's own death is watched too (pidfd), where
the sidecar can see its process: then nobody writes into its slots any more, for certain. In a pod
it cannot: containers have pid namespaces of their own, and the connection is all there is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, field

from keepstep.protocol import LeaseRequest
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.problems import refuse

_HANDOVER_S = 2.0


@dataclass(eq=False)
class Lease:
    """`died`: the trainer's process is gone for certain, or it said goodbye; only then may the
    slot that it was given be reused. `training`: it has restored, and needs no image any more."""

    token: str
    request: LeaseRequest
    ended: bool = False
    died: bool = False
    training: bool = False
    pidfd: int | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def world(self) -> int:
        return self.request.world

    @property
    def attempt(self) -> str:
        return self.request.attempt


class Leases:
    """At most one live lease a rank."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._by_rank: dict[int, Lease] = {}
        self._by_token: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_rank)

    def of(self, rank: int) -> Lease | None:
        """The live lease of a rank."""
        return self._by_rank.get(rank)

    def require(self, token: str) -> Lease:
        """The live lease with this token. Raises SidecarError `no-lease`."""
        if lease := self._by_token.get(token):
            return lease
        raise refuse("no-lease", "this lease has ended; ask for another (POST /v1/lease)")

    async def take(self, request: LeaseRequest, *, peer_pid: int) -> Lease:
        """A lease for this trainer. Waits a moment for a predecessor that is just dying.

        `peer_pid`: as the kernel tells it (SO_PEERCRED), 0 when it is in another pid namespace.
        Raises SidecarError `rank-taken` naming the other trainer's process, `rank-of-parent` at
        once for a process that a live trainer of this rank started.
        """
        self._refuse_child(request)
        await self._changes.until(lambda: request.rank not in self._by_rank, timeout_s=_HANDOVER_S)
        if other := self._by_rank.get(request.rank):
            raise refuse(
                "rank-taken",
                f"rank {request.rank} belongs to a trainer that is alive (pid"
                f" {other.request.pid}, attempt {other.attempt}): end that process first",
            )
        lease = Lease(secrets.token_hex(8), request)
        self._by_rank[request.rank] = self._by_token[lease.token] = lease
        self._watch(lease, peer_pid)
        return lease

    def _refuse_child(self, request: LeaseRequest) -> None:
        other = self._by_rank.get(request.rank)
        if other is not None and other.request.pid in request.ancestors:
            raise refuse(
                "rank-of-parent",
                f"rank {request.rank} belongs to pid {other.request.pid}, the trainer that started"
                f" this process (pid {request.pid}): unset KEEPSTEP_SOCKET for a process that is no"
                " trainer, or call close() in the trainer first",
            )

    def end(self, lease: Lease) -> bool:
        """The lease's connection or process is gone. False when that was known."""
        if lease.ended:
            return False
        lease.ended = True
        del self._by_rank[lease.rank], self._by_token[lease.token]
        self._changes.ring()
        return True

    async def certain_death(self, lease: Lease, *, timeout_s: float = _HANDOVER_S) -> bool:
        """Whether the trainer's process is gone; waits for that a moment."""
        if lease.died or lease.pidfd is None:
            return lease.died
        return await self._changes.until(lambda: lease.died, timeout_s=timeout_s)

    def unwatch(self, lease: Lease) -> None:
        """Stop watching the trainer's process."""
        if lease.pidfd is not None:
            asyncio.get_running_loop().remove_reader(lease.pidfd)
            os.close(lease.pidfd)
            lease.pidfd = None

    def _watch(self, lease: Lease, pid: int) -> None:
        if not pid:
            return
        try:
            lease.pidfd = os.pidfd_open(pid)
        except OSError:
            return
        asyncio.get_running_loop().add_reader(lease.pidfd, self._died, lease)

    def _died(self, lease: Lease) -> None:
        lease.died = True
        self.unwatch(lease)
        self._changes.ring()
