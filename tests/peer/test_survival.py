"""What copies outlive: their sender's node, a rollback, a drive's error, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.errors import StorageError
from keepstep_sidecar.tiers.peer.buddy import compute_copies_to_keep, due_shards
from keepstep_sidecar.tiers.peer.client import PeerConnection
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.tiers.peer.served_shards import ServedShards
from keepstep_sidecar.tiers.remote_tier import LocalInventory
from keepstep_sidecar.volume.run_tree import ShardName
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import until
from tests.peer.authority import Authority, FileCredentials
from tests.peer.nodes import Node, running
from tests.tiers.local import committed, durable
from tests.volume.drives import die, small_drive
from tests.volume.images import RUN, make_layout, staged, step_id

Make = Callable[..., Node]


async def test_a_rescheduled_sender_without_a_known_commit_deletes_no_peer_copy(
    node: Make, tmp_path: Path, authority: Authority
) -> None:
    """Its own step is durable for one rank only: the buddy's copy is all that the run has."""
    old, buddy = node(0), node(1)
    old.knows(buddy, buddies=(buddy,))
    async with running(buddy):
        async with running(old):
            _, first = old.write(100, rank=0)
            durable(old.remote_tier, first)
            committed(old.remote_tier, first.step_id, [first])
            await until(lambda: buddy.copies() == [(100, 0)])
        new = Node(tmp_path / "drives-new", 0, authority.files(0))
        new.knows(buddy, buddies=(buddy,))
        async with running(new):
            _, later = new.write(110, rank=0)
            durable(new.remote_tier, later)
            await until(
                lambda: new.remote_tier.status().sent == 1 and not new.remote_tier.status().backlog
            )
            (place,) = new.remote_tier._places.values()
            await until(
                lambda: place.announced == compute_copies_to_keep(new.remote_tier.facts.local())
            )
            assert buddy.copies() == [(100, 0), (110, 0)]
            committed(new.remote_tier, later.step_id, [later])
            await until(lambda: buddy.copies() == [(110, 0)])


def test_steps_of_the_new_epoch_are_sent_after_a_rollback_from_a_newer_commit(
    node: Make,
) -> None:
    here = node(0)
    _, live = here.write(10, rank=0)
    _, dead = here.write(100, rank=0)
    both = {shard.step_id: {0: shard} for shard in (live, dead)}
    before = LocalInventory(shards=both, commits=frozenset({dead.step_id}))
    assert due_shards(before).owed == {dead.step_id}
    after = LocalInventory(shards={live.step_id: {0: live}})
    assert due_shards(after).owed == {live.step_id}
    assert compute_copies_to_keep(after).ranks == {0: (live.step_id,)}
    asyncio.run(here.remote_tier.close())
    here.volume.close()


async def test_a_read_error_of_a_drive_does_not_stop_the_peer_tier(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, buddy = node(0), node(1)
    here.knows(buddy, buddies=(buddy,))
    filesystem = here.volume.filesystem
    read, failed = filesystem.read_into, []

    def fail_once(fd: int, into: memoryview, offset: int) -> int:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, into, offset)

    monkeypatch.setattr(filesystem, "read_into", fail_once)
    async with running(here, buddy):
        _, found = here.write(1, rank=0)
        durable(here.remote_tier, found)
        await until(lambda: bool(failed))
        await until(lambda: buddy.copies() == [(1, 0)])


@pytest.mark.root
async def test_a_pod_with_a_failed_drive_still_queries_its_peers(
    node: Make, authority: Authority, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=320 << 20, kind="xfs")
    here, buddy = node(0), Node(drive, 1, authority.files(1))
    here.knows(buddy, buddies=(buddy,))
    buddy.knows(here)
    async with running(here, buddy):
        _, found = here.write(1, rank=0)
        durable(here.remote_tier, found)
        await until(lambda: buddy.copies() == [(1, 0)])
        die(drive)
        inventory = await buddy.remote_tier.scan()
        (shard,) = inventory.shards
        places = [source.where for source in buddy.remote_tier.sources(shard)]
        assert "node rank 0" in places[-1]


@pytest.mark.root
def test_a_pod_serves_the_shards_on_its_working_drives(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = small_drive(mounted, tmp_path / "image", size_bytes=320 << 20, kind="xfs")
    dead, good = Volume(drive / RUN, run=RUN), Volume(tmp_path / "good" / RUN, run=RUN)
    volumes = VolumeSet([dead, good])
    slots = [staged(make_layout(rank=rank), 1) for rank in range(2)]
    written = [volumes.write(slot.view, slot.layout, slot.control).shard for slot in slots]
    volumes.publish_step(step_id(1))
    shards = ServedShards(volumes, KeptCopies([dead, good], run=RUN), run=RUN)
    die(drive)
    listing = shards.listing()
    assert ([shard.rank for shard in listing.shards], listing.ready) == ([1], False)
    lost, left = map(ShardName.of, written)
    with shards.open(left) as reading:
        assert reading.size_bytes == written[1].size_bytes
    (other,) = shards.find_similar_shards(lost)
    assert other.shard.rank == 1
    with pytest.raises(StorageError, match="not here"), shards.open(lost):
        pass


def test_a_shard_that_is_renamed_during_its_lookup_raises_a_clear_error(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node(0)
    _, found = here.write(1, rank=0)
    shards = here.remote_tier._served.shards
    path, engine = shards._find(ShardName.of(found))
    monkeypatch.setattr(shards, "_find", lambda *which: (path.with_name("gone"), engine))
    with pytest.raises(StorageError, match="any more"), shards.open(ShardName.of(found)):
        pass
    asyncio.run(here.remote_tier.close())
    here.volume.close()


class Flood:
    """A stranger that holds `count` connections and opens them again as they are ended."""

    def __init__(self, address: str, *, source: str, count: int = 70) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._from, self._count = (host, int(port)), source, count
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.opened = 0

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        held: list[socket.socket] = []
        while not self._ended.is_set():
            while len(held) < self._count and not self._ended.is_set():
                upstream = socket.create_connection(
                    self._to, timeout=5, source_address=(self._from, 0)
                )
                upstream.setblocking(False)
                held.append(upstream)
                self.opened += 1
            ended, _, _ = select.select(held, (), (), 0.05)
            for upstream in ended:
                held.remove(upstream)
                upstream.close()
        for upstream in held:
            upstream.close()


def served(link: Callable[[], PeerConnection], *, tries: int) -> int:
    count = 0
    for _ in range(tries):
        with contextlib.suppress(StorageError), link() as connection:
            connection.listing()
            count += 1
    return count


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"])
async def test_peers_are_served_while_unauthenticated_connections_flood_the_server(
    node: Make, authority: Authority, source: str
) -> None:
    """From an address of its own, and from the one that the peers share with it."""
    credentials = FileCredentials(authority.files(1))
    here = node(0)
    async with running(here):
        await until(
            lambda: here.remote_tier._server is not None and here.remote_tier._server._threads
        )
        with Flood(here.address, source=source) as flood:
            await until(lambda: flood.opened > 100)
            with PeerConnection(here.address, credentials) as before:
                await asyncio.to_thread(before.listing)
                count = await asyncio.to_thread(
                    served, lambda: PeerConnection(here.address, credentials), tries=12
                )
                assert count >= 8
                await asyncio.to_thread(before.listing)  # on the connection that it had
            assert flood.opened > 110, "it did not stop meanwhile"
