"""What lies in a directory that a pod left is served to the others of its run, and only read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keepstep.steps import Answer, Tier
from keepstep.wire.reports import Peer
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.relay.serve import Shelf, report
from keepstep_sidecar.tiers.peer.protocol import Wanted
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.peer.tls import FileCredentials
from keepstep_sidecar.volume.directories import LocalShard
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import until
from tests.peer.authority import Authority
from tests.peer.nodes import Node, running, same
from tests.tiers import reading
from tests.tiers.local import durable
from tests.volume.images import RUN, Slot, empty_slot, make_layout, staged

HELPER = 100_000_007


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@contextlib.asynccontextmanager
async def serving(shelf: Shelf, authority: Authority) -> AsyncIterator[Peer]:
    credentials = FileCredentials(authority.files(HELPER))
    server = Server("127.0.0.1:0", credentials, shelf.context)
    server.start()
    try:
        yield Peer(node_rank=HELPER, address=f"127.0.0.1:{server.port}")
    finally:
        await asyncio.to_thread(server.stop)


def fetching(tmp_path: Path, authority: Authority) -> PeerTier:
    """Of a pod that serves nobody, on an empty drive."""
    empty = Volume(tmp_path / "new" / RUN, run=RUN)
    return PeerTier(
        PeerSettings(listen="", replicas=0),
        VolumeSet([empty]),
        run=RUN,
        credentials=FileCredentials(authority.files(1)),
    )


def write(directory: Path, step: int, *, parameters: int = 6000) -> tuple[Slot, LocalShard]:
    """A shard of rank 1 in a pod's directory, as the pod leaves it."""
    slot = staged(make_layout(rank=1, world=2, parameters=parameters), step)
    volume = Volume(directory / RUN, run=RUN)
    volume.write(slot.view, slot.layout, slot.control)
    (found,) = (one for one in volume.scan().shards if one.step_id == slot.id)
    volume.close()
    return slot, found


async def test_a_shard_that_was_left_comes_back_byte_for_byte(
    tmp_path: Path, authority: Authority
) -> None:
    directory = tmp_path / "old"
    slot, found = write(directory, 5, parameters=3_000_000)
    before = _files(directory)
    shelf = Shelf([directory], run=RUN)
    assert not shelf.listing.ready
    shelf.look()
    remote_tier = fetching(tmp_path, authority)
    assert remote_tier.address == ""
    assert (await remote_tier.look()).answer is Answer.NONE, "without an operator it is as without"
    async with serving(shelf, authority) as helper:
        remote_tier.peers_are((helper,))
        seen = await remote_tier.look()
        (remote,) = seen.shards
        assert (remote.step_id, remote.rank, remote.tier) == (found.step_id, 1, Tier.PEER)
        view = empty_slot(slot.layout)
        await reading.load(remote_tier, remote, view)
        assert same(view, slot)
    assert _files(directory) == before, "nothing was written, locked or moved"
    await remote_tier.close()


async def test_while_it_is_awaited_nobody_says_that_nothing_is_there(
    tmp_path: Path, authority: Authority
) -> None:
    remote_tier = fetching(tmp_path, authority)
    remote_tier.peers_are((), awaits="shards lie on node b")
    seen = await remote_tier.look()
    assert (seen.answer, seen.reason) == (Answer.UNKNOWN, "shards lie on node b")
    remote_tier.peers_are(())
    assert (await remote_tier.look()).answer is Answer.NONE
    await remote_tier.close()


async def test_copies_of_others_are_served_too_and_nobody_can_want_them_away(
    tmp_path: Path, authority: Authority
) -> None:
    directory = tmp_path / "old" / "1"
    node = Node(tmp_path / "old", 1, authority.files(1))
    sender = Node(tmp_path / "old", 0, authority.files(0))
    async with running(node, sender):
        sender.knows(node, buddies=(node,))
        for sent, step in enumerate((4, 5)):
            _, found = sender.write(step, rank=0)
            durable(sender.remote_tier, found)
            await until(lambda: sender.remote_tier.status().sent > sent)  # noqa: B023
    shelf = Shelf([directory], run=RUN)
    assert [(one.step_id.step, one.copy) for one in shelf.look().shards] == [(4, True), (5, True)]
    newest = Wanted(ranks={0: (found.step_id,)}, committed=found.step_id)
    assert shelf.context.copies.want(newest, sender=0) == 0
    assert len(shelf.look().shards) == 2


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "0001.aaaaaaaa-000000004").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / RUN).symlink_to(tmp_path / "elsewhere")  # no link is followed
    listing = Shelf([tmp_path / "1"], run=RUN).look()
    assert not listing.ready
    assert listing.reason
    told = report(listing, address="", started_at=1.0, sequence=1)
    assert (told.ready, told.warnings) == (False, (listing.reason,))


def _files(directory: Path) -> dict[str, int]:
    return {str(one): one.stat().st_mtime_ns for one in sorted(directory.rglob("*"))}
