"""Which trainer owns which rank. A lease lives as long as its connection, or its process.

The kernel closes a connection when the last process that has it open dies, which may be a data
loader's worker that outlives its trainer. So the trainer's own death is watched too (pidfd), where
the sidecar can see its process: then nobody writes into its slots any more, for certain. In a pod
it cannot: containers have pid namespaces of their own, and the connection is all there is.

Also what a trainer says first, and what follows from whom this sidecar serves (`Owner`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.errors import ImageError
from keepstep.image import Layout
from keepstep.wire.trainer import PROTOCOL_MAX, PROTOCOL_MIN, LeaseRequest
from keepstep_sidecar import __version__
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.errors import refuse

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

    @property
    def ranks(self) -> Collection[int]:
        """Those with a live lease."""
        return self._by_rank.keys()

    def of(self, rank: int) -> Lease | None:
        """The live lease of a rank."""
        return self._by_rank.get(rank)

    def restores(self, rank: int) -> bool:
        """Whether the rank is about to restore, or will be when its trainer comes."""
        lease = self.of(rank)
        return lease is None or not lease.training

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
                " trainer; for one that is, call close() in pid"
                f" {other.request.pid} before it starts this one (keepstep.dcp.close(), where"
                " dcp.load, dcp.save or keepstep.dcp.latest_step() took the rank)",
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


# --- what a trainer says first ---------------------------------------------------------------


LARGEST_WORLD = 65536
"""As the operator takes it in a report."""


def common_version(request: LeaseRequest) -> int:
    """The newest protocol that both sides speak. Raises SidecarError `protocol`."""
    version = min(PROTOCOL_MAX, request.protocol_max)
    if version < max(PROTOCOL_MIN, request.protocol_min):
        raise refuse(
            "protocol",
            f"the library {request.library} speaks protocol {request.protocol_min} to"
            f" {request.protocol_max}, this sidecar ({__version__}) {PROTOCOL_MIN} to"
            f" {PROTOCOL_MAX}: bring both within two minor versions of each other",
        )
    return version


def check_rank(request: LeaseRequest) -> None:
    """Raises SidecarError `bad-request` for a rank that no world has: directories and images are
    named by it."""
    if not 0 <= request.rank < request.world <= LARGEST_WORLD:
        raise refuse(
            "bad-request",
            f"rank {request.rank} of {request.world} cannot be: ranks begin at 0 and end below the"
            f" world size, which is at most {LARGEST_WORLD}",
        )


def parse_layout(header: str) -> Layout:
    """A layout from its header in base64. Raises SidecarError `bad-image`."""
    try:
        data = base64.b64decode(header, validate=True)
        return Layout.parse(memoryview(data))
    except (binascii.Error, ImageError) as error:
        raise refuse("bad-image", f"the layout's header is not valid: {error}") from error


# --- ranks of this machine -------------------------------------------------------------------
#
# A run may span several pods, each with a sidecar of its own that sees its own ranks only. Such a
# sidecar never concludes from what it lacks that the run lacks it.


def local_world(request: LeaseRequest, *, environment: Mapping[str, str], alone: bool) -> int:
    """The ranks of this run that this sidecar serves; 0 when nobody can tell.

    torchrun tells its workers. Without it, a sidecar that is `alone` serves all ranks. One of many
    looks at the training container's environment, of which it has a copy (design section 8): when
    the job controller set the very rank there that the trainer has, each pod has one.
    """
    if request.local_world:
        return request.local_world
    if alone or request.world == 1:
        return request.world
    of_container = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return 1 if of_container == (str(request.rank), str(request.world)) else 0


def sees_all(request: LeaseRequest) -> bool:
    """Whether all ranks of the run are served here; `request.local_world` is settled."""
    return request.local_world == request.world


# --- the process that is served --------------------------------------------------------------
#
# The process for which a sidecar runs (`keepstep run`): while it lives, nobody has left.
#
# A training command may need long before its first lease; a sidecar that counted that time as
# being abandoned would end under it.


class Owner:
    """Watches at most one process, the newest that was named, by its pidfd."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pidfd: int | None = None

    @property
    def present(self) -> bool:
        """Whether there is such a process, and it lives."""
        return self._pidfd is not None

    def watch(self, pid: int) -> None:
        """From now on this process. One that is gone already counts as none."""
        self.leave()
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):  # no process has such a number
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.leave)
        self._changes.ring()

    def leave(self) -> None:
        """There is no owner any more. Idempotent."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
            self._changes.ring()
