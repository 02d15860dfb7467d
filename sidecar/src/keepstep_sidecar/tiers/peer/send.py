"""One shard on its way to a buddy: what is missing there, over some connections, sealed last."""

from __future__ import annotations

from keepstep.errors import DigestError, StorageError
from keepstep_sidecar.tiers import transfer
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.tiers.peer.client import Links
from keepstep_sidecar.tiers.peer.serve import Shards
from keepstep_sidecar.volume.direct_io import WRITER_NICENESS, Pace
from keepstep_sidecar.volume.scan import LocalShard


class Lied(DigestError):
    """The buddy says that it holds other bytes than it was sent."""


def send(shard: LocalShard, shards: Shards, links: Links, pace: Pace) -> int:
    """Make a shard of this machine durable at the buddy; the bytes that were sent, 0 when it was
    there already.

    Raises StorageError, DigestError when the shard here is damaged, Lied.
    """
    with (
        transfer.opened(shards.source(shard, where=str(shard.path))) as source,
        links.taken() as link,
    ):
        manifest = source.manifest
        begun = link.begin(shard, manifest.to_bytes(), size=shard.size_bytes)
        if begun.sealed:
            return 0
        if not set(begun.missing) <= set(manifest.chunks):
            raise StorageError(f"{link.name} misses chunks that step {shard.step_id} does not have")

        def put(chunk: int, data: memoryview) -> None:
            # verified: a shard that has rotted here must not travel, the buddy would be blamed
            pace.wait(len(data))
            with links.taken() as one:
                one.put(shard, chunk, data)

        threads = protocol.streams(begun.streams)
        transfer.each(source, begun.missing, put, threads=threads, niceness=WRITER_NICENESS)
        sealed = link.seal(shard, size=shard.size_bytes)
        if sealed.root != shard.root:
            raise Lied(
                f"step {shard.step_id}, rank {shard.rank}: {link.name} says that its copy has the"
                f" root {sealed.root}, not {shard.root}; it gets no copy of this shard again"
            )
        sizes = (manifest.bounds(chunk) for chunk in begun.missing)
        return sum(end - begin for begin, end in sizes)
