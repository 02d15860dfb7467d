"""Which trainer owns which rank. A lease lives as long as its connection or its process.

The kernel closes a connection when the last process that has it open dies. That may be a data
loader's worker that outlives its trainer. So where the sidecar can see the trainer's process, it
also watches its death (pidfd). After that death, certainly nothing writes into the trainer's slots
any more. In a pod the sidecar cannot see it: containers have their own pid namespaces, and the
connection is all there is.

This module also checks what a trainer says first, and tells whom this sidecar serves
(`OwnerProcessWatcher`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.core.shard import MOST_RANKS
from keepstep.errors import ImageError
from keepstep.image import Layout
from keepstep.wire.trainer import PROTOCOL, LeaseRequest
from keepstep_sidecar import __version__
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.error_responses import refusal_error

_HANDOVER_S = 2.0


@dataclass(eq=False)
class Lease:
    """A trainer's hold on its rank. `died`: the trainer's process is certainly gone, or the trainer
    said goodbye. Only then may the slot that it was given be reused. `training`: the trainer has
    restored and needs no image any more. `saved`: it has staged a step. `warned`: the warning that
    was sent to it last. `warning`: what its trainer warns of."""

    token: str
    request: LeaseRequest
    ended: bool = False
    died: bool = False
    training: bool = False
    saved: bool = False
    warned: str = ""
    warning: str = ""
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
    """The live leases, at most one for each rank."""

    def __init__(self, changes: ChangeNotifier) -> None:
        self._changes = changes
        self._by_rank: dict[int, Lease] = {}
        self._by_token: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_rank)

    @property
    def ranks(self) -> Collection[int]:
        """The ranks with a live lease."""
        return self._by_rank.keys()

    @property
    def training_ranks(self) -> Collection[int]:
        """The ranks whose trainers live and have restored."""
        return [rank for rank, lease in self._by_rank.items() if lease.training]

    @property
    def trainer_warnings(self) -> list[str]:
        """What the trainers warn of, in rank order."""
        return [lease.warning for _, lease in sorted(self._by_rank.items()) if lease.warning]

    def of(self, rank: int) -> Lease | None:
        """The live lease of a rank; None if there is none."""
        return self._by_rank.get(rank)

    def is_rank_awaiting_restore(self, rank: int) -> bool:
        """Whether the rank is about to restore, or will restore when its trainer comes."""
        lease = self.of(rank)
        return lease is None or not lease.training

    def require_lease(self, token: str) -> Lease:
        """The live lease with this token. Raises SidecarError `no-lease`."""
        if lease := self._by_token.get(token):
            return lease
        raise refusal_error("no-lease", "this lease has ended; ask for another (POST /v1/lease)")

    async def take(self, request: LeaseRequest, *, peer_pid: int) -> Lease:
        """A lease for this trainer. Waits briefly for a predecessor that is dying.

        `peer_pid`: the process id from the kernel (SO_PEERCRED), 0 when it is in another pid
        namespace. Raises SidecarError: `rank-taken`, which names the other trainer's process;
        `rank-of-parent`, at once, if a live trainer of this rank started this process.
        """
        self._refuse_child(request)
        await self._changes.until(lambda: request.rank not in self._by_rank, timeout_s=_HANDOVER_S)
        if other := self._by_rank.get(request.rank):
            raise refusal_error(
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
            raise refusal_error(
                "rank-of-parent",
                f"rank {request.rank} belongs to pid {other.request.pid}, the trainer that started"
                f" this process (pid {request.pid}): unset KEEPSTEP_SOCKET for a process that is no"
                " trainer; for one that is, call close() in pid"
                f" {other.request.pid} before it starts this one (keepstep.dcp.close(), where"
                " dcp.load, dcp.save or keepstep.dcp.latest_step() took the rank)",
            )

    def end(self, lease: Lease) -> bool:
        """The lease's connection or process is gone. Returns False if that was already known."""
        if lease.ended:
            return False
        lease.ended = True
        del self._by_rank[lease.rank], self._by_token[lease.token]
        self._changes.ring()
        return True

    async def is_certainly_dead(self, lease: Lease) -> bool:
        """Whether the trainer's process is gone. Waits for that for a moment."""
        if lease.died or lease.pidfd is None:
            return lease.died
        return await self._changes.until(lambda: lease.died, timeout_s=_HANDOVER_S)

    def stop_watching(self, lease: Lease) -> None:
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
        self.stop_watching(lease)
        self._changes.ring()


# --- what a trainer says first ---------------------------------------------------------------


def check_protocol(request: LeaseRequest) -> None:
    """Raises SidecarError `protocol` for a library that speaks another protocol."""
    if request.protocol != PROTOCOL:
        raise refusal_error(
            "protocol",
            f"the library {request.library} speaks protocol {request.protocol}, this sidecar"
            f" ({__version__}) protocol {PROTOCOL}: install both of one version",
        )


def check_rank(request: LeaseRequest) -> None:
    """Raises SidecarError `bad-request` for a rank that no world can have. Directories and images
    are named by the rank."""
    if not 0 <= request.rank < request.world <= MOST_RANKS:
        raise refusal_error(
            "bad-request",
            f"rank {request.rank} of {request.world} is invalid: ranks begin at 0 and end below the"
            f" world size, which is at most {MOST_RANKS}",
        )


def parse_layout(header: str) -> Layout:
    """The layout with this header (base64). Raises SidecarError `bad-image`."""
    try:
        data = base64.b64decode(header, validate=True)
        return Layout.parse(memoryview(data))
    except (binascii.Error, ImageError) as error:
        raise refusal_error("bad-image", f"the layout's header is not valid: {error}") from error


# --- ranks of this machine -------------------------------------------------------------------
#
# A run may span several pods, each with its own sidecar that sees only its own ranks. Such a
# sidecar never concludes that the run lacks what it lacks itself.


def infer_served_rank_count(
    request: LeaseRequest, *, environment: Mapping[str, str], alone: bool
) -> int:
    """How many ranks of this run this sidecar serves; 0 when that is unknown.

    torchrun tells its workers. Without it, a sidecar that is `alone` serves all ranks. One of
    several sidecars looks at the training container's environment, of which it has a copy (design
    section 8). If the job controller set the trainer's own rank there, each pod has one rank.
    """
    if request.local_world:
        return request.local_world
    if alone or request.world == 1:
        return request.world
    of_container = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return 1 if of_container == (str(request.rank), str(request.world)) else 0


def serves_all_ranks(request: LeaseRequest) -> bool:
    """Whether all ranks of the run are served here. `request.local_world` must be set already."""
    return request.local_world == request.world


# --- the process that is served --------------------------------------------------------------
#
# The process for which a sidecar runs (`keepstep run`). While it lives, the run is not abandoned.
#
# A training command may take long until its first lease. A sidecar that counted that time as
# abandoned would end meanwhile.


class OwnerProcessWatcher:
    """Watches at most one process by its pidfd: the newest that was named."""

    def __init__(self, changes: ChangeNotifier) -> None:
        self._changes = changes
        self._pidfd: int | None = None

    @property
    def present(self) -> bool:
        """Whether a process was named and still lives."""
        return self._pidfd is not None

    def watch(self, pid: int) -> None:
        """Watch this process from now on. A process that is already gone counts as none."""
        self.stop_watching()
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):  # no process has such a number
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.stop_watching)
        self._changes.ring()

    def stop_watching(self) -> None:
        """Stop watching: there is no owner any more. Idempotent."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
            self._changes.ring()
