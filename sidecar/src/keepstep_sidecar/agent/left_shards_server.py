"""`keepstep-sidecar agent serve DIR...`: serves runs what their pods left on this node.

Nothing is written: directories are mounted read-only. As everywhere among peers, certificates
decide who may ask: each client gets what lies here of its own run, own shards and copies alike. The
pods verify what they get, chunk by chunk. All is read anew for each connection, because a pod may
still be writing its last shards.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError
from keepstep_sidecar import log, unauthenticated_connections
from keepstep_sidecar.agent import run_directories
from keepstep_sidecar.config.sidecar import OperatorAccess
from keepstep_sidecar.log import info
from keepstep_sidecar.tiers.peer import kept_copies
from keepstep_sidecar.tiers.peer.handlers import RequestBuffers, ServerContext
from keepstep_sidecar.tiers.peer.served_shards import ServedShards
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tls import IssuedCredentials, PodIdentity
from keepstep_sidecar.volume.volume import Volume, VolumeSet

_WHY = "served for a pod that left; nothing is written here"


class LeftShardsServer:
    """What lies below `tops`, by the run of the client that asks."""

    def __init__(self, tops: Sequence[Path]) -> None:
        self._tops = tops
        self._buffers, self._large = RequestBuffers(), threading.BoundedSemaphore(1)

    def find_context_for_client(self, sender: PodIdentity) -> ServerContext:
        """What is served to this client. Raises StorageError if there is nothing: then a drive may
        be missing, and an empty listing would say that there is none."""
        run = sender.run
        found = list(self._volumes(sender.namespace, run))
        if not found:
            raise StorageError(
                f"nothing of run {sender.namespace}/{run} lies on this node; is its drive mounted?"
            )
        none = kept_copies.KeptCopies([], run=run)  # takes none, and deletes none
        shards = ServedShards(VolumeSet(found), none, run=run)
        return ServerContext(shards, none, buffers=self._buffers, large=self._large)

    def _volumes(self, namespace: str, run: str) -> Iterator[Volume]:
        for place, runs in run_directories.find_namespaces(self._tops):
            if place.path.name == namespace and run in runs:
                for left in run_directories.list_sidecar_directories(place.open_subdirectory(run)):
                    yield _read_only(left, run)
                    if kept_copies.DIRECTORY in left.names():
                        yield _read_only(left.open_subdirectory(kept_copies.DIRECTORY), run)


def _read_only(directory: OpenDirectory, run: str) -> Volume:
    return Volume(directory, run=run, read_only=_WHY)


def serve(listen: str, reporting: OperatorAccess, tops: Sequence[Path]) -> None:
    """Serve until SIGTERM. Raises KeepstepError when it cannot begin."""
    log.configure("agent")
    unauthenticated_connections.raise_descriptor_limit()
    asyncio.run(_serve(listen, IssuedCredentials(reporting), LeftShardsServer(tops)))


async def _serve(listen: str, credentials: IssuedCredentials, left: LeftShardsServer) -> None:
    server, ended = Server(listen, credentials, left.find_context_for_client), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server.start()
    fresh = asyncio.create_task(credentials.keep_fresh(), name="peer certificate")
    await ended.wait()
    fresh.cancel()
    await asyncio.to_thread(server.stop)
    info("agent.stopped")
