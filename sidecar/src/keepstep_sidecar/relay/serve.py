"""`keepstep-sidecar relay DIR...`: serves the run's other pods with shards of pods that left.

Nothing is written: directories are mounted read-only. All that is found there, own shards and
copies alike, is offered as copies that are kept for other pods. As everywhere among peers, the
certificates of one run decide who may ask. The pods themselves verify what they get, chunk by
chunk.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.errors import UsageError
from keepstep.steps import StepId
from keepstep.wire.reports import Report, ReportReply
from keepstep.wire.status import VolumeStatus
from keepstep_sidecar import __version__, connections, log
from keepstep_sidecar.commit.operator_link import OperatorLink
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import PeerSettings, Reporting, Verify, check_run
from keepstep_sidecar.log import say
from keepstep_sidecar.report import report as reporting
from keepstep_sidecar.report.reporter import Look, Reporter
from keepstep_sidecar.tiers.peer.copies import Copies
from keepstep_sidecar.tiers.peer.handlers import ServerContext
from keepstep_sidecar.tiers.peer.protocol import Listing, Wanted
from keepstep_sidecar.tiers.peer.serve import Shards
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tls import IssuedCredentials
from keepstep_sidecar.volume.volume import Volume, VolumeSet

_LAST_WORD_S = 2.0
_WHY = "served for a pod that left; nothing is written here"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`directories`: those of node ranks that left. Each contains a directory of `run`."""

    run: str
    directories: tuple[Path, ...]
    peers: PeerSettings
    reporting: Reporting

    def __post_init__(self) -> None:
        """Raises UsageError when there is nothing to serve, or no address to serve it on."""
        check_run(self.run)
        if not self.directories:
            raise UsageError("relay needs at least one DIR")
        if not self.peers.listen:
            raise UsageError("relay needs an address to listen on: --peer-listen HOST:PORT")


class _Kept(Copies):
    """Copies that no pod can ask to delete, because their owner has left."""

    def want(self, wanted: Wanted, *, sender: int) -> int:
        return 0


class Shelf:
    """Everything that lies in the directories. `look` reads it anew, because a pod may still have
    been writing its last shards when this one started."""

    def __init__(self, directories: Sequence[Path], *, run: str) -> None:
        roots = [directory / run for directory in directories]
        volumes = [Volume(root, run=run, verify=Verify.FULL, read_only=_WHY) for root in roots]
        self._copies = _Kept(volumes, run=run)
        shards = Shards(VolumeSet(volumes), self._copies, run=run)
        self.context = ServerContext(shards, self._copies)
        self.listing = Listing(run=run, ready=False, reason="not looked at yet")

    def look(self) -> Listing:
        """Read the directories. Blocks. If one cannot be read, the listing is not `ready`; it is
        never just empty."""
        self._copies.scan()
        self.listing = self.context.shards.listing()
        return self.listing


def report(listing: Listing, *, address: str, started_at: float, sequence: int) -> Report:
    """The report for the operator: each shard is a copy that is kept here for its rank."""
    by_rank: dict[int, dict[StepId, Shard]] = {}
    for one in listing.shards:
        by_rank.setdefault(one.rank, {})[one.step_id] = one
    return Report(
        sidecar=__version__,
        started_at=started_at,
        sequence=sequence,
        ready=listing.ready,
        epochs=listing.epochs,
        ranks=tuple(
            reporting.other(rank, list(kept.values())) for rank, kept in sorted(by_rank.items())
        ),
        warnings=(listing.reason,) if listing.reason else (),
        peer_address=address,
    )


def serve(serving: Serving) -> None:
    """Serve until SIGTERM. Raises KeepstepError when it cannot begin."""
    log.configure(serving.run)
    connections.raise_descriptor_limit()
    asyncio.run(_serve(serving))


async def _serve(serving: Serving) -> None:
    shelf, credentials = (
        Shelf(serving.directories, run=serving.run),
        IssuedCredentials(serving.reporting),
    )
    server = Server(serving.peers.listen, credentials, shelf.context)
    changes = Changes()
    operator = OperatorLink(changes, present=True)
    reporter = _reporter(serving, shelf, operator, changes)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    listing = await asyncio.to_thread(shelf.look)
    say("serving what was left here", shards=len(listing.shards), reason=listing.reason)
    server.start()
    async with asyncio.TaskGroup() as group:
        fresh = group.create_task(credentials.keep_fresh(), name="peer certificate")
        group.create_task(reporter.run(), name="report")
        await ended.wait()
        await operator.finish(timeout_s=_LAST_WORD_S)
        fresh.cancel()
    await asyncio.to_thread(server.stop)
    say("ended")


def _reporter(serving: Serving, shelf: Shelf, operator: OperatorLink, changes: Changes) -> Reporter:
    started_at = time.time()

    async def measure() -> tuple[VolumeStatus, ...]:
        await asyncio.to_thread(shelf.look)
        return ()

    async def obey(_: ReportReply) -> None:
        """Does nothing: the operator gives a helper orders only by starting it."""

    return Reporter(
        serving.reporting,
        Look(
            measure=measure,
            report=lambda _, sequence: report(
                shelf.listing,
                address=serving.peers.advertise or serving.peers.listen,
                started_at=started_at,
                sequence=sequence,
            ),
            urgent=lambda: False,
        ),
        trust=serving.reporting.trust(),
        operator=operator,
        obey=obey,
        changes=changes,
    )
