"""What lies in directories that pods left is served to the others of its run, and only read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keepstep.steps import Tier, TierAnswer
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.agent.left_shards_server import LeftShardsServer
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.peer.tls import PodIdentity
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import until
from tests.peer.authority import Authority, FileCredentials, Files
from tests.peer.nodes import Node, running, same
from tests.tiers import reading
from tests.tiers.local import durable
from tests.volume.images import RUN, Slot, empty_slot, make_layout, staged

NODE = "node-1.zone"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a pod of node rank 1 left below a policy's own directory of a hostPath."""
    return tmp_path / "host" / "Fast_1" / "team" / RUN / "1"


def agent_files(authority: Authority, node: str = NODE) -> Files:
    return authority.files(0, uris=[PodIdentity.for_agent_of_node(node).uri])


@contextlib.asynccontextmanager
async def serving(host: Path, files: Files, *, node: str = NODE) -> AsyncIterator[dict[str, str]]:
    server = Server(
        "127.0.0.1:0", FileCredentials(files), LeftShardsServer([host]).find_context_for_client
    )
    server.start()
    try:
        yield {node: f"127.0.0.1:{server.port}"}
    finally:
        await asyncio.to_thread(server.stop)


_TIERS: list[PeerTier] = []


def fetching(tmp_path: Path, files: Files) -> PeerTier:
    """Of a pod, on an empty drive."""
    empty = Volume(tmp_path / "new" / RUN, run=RUN)
    _TIERS.append(
        PeerTier(
            PeerSettings(listen="127.0.0.1:0", replicas=0),
            VolumeSet([empty]),
            run=RUN,
            credentials=FileCredentials(files),
        )
    )
    return _TIERS[-1]


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """All that a test fetches with is closed at its end."""
    yield
    while _TIERS:
        await _TIERS.pop().close()


def write(directory: Path, step: int, *, parameters: int = 6000) -> tuple[Slot, LocalShard]:
    """A shard of rank 1 in a pod's directory, as the pod leaves it."""
    slot = staged(make_layout(rank=1, world=2, parameters=parameters), step)
    volume = Volume(directory / RUN, run=RUN)
    volume.write(slot.view, slot.layout, slot.control)
    (found,) = (shard for shard in volume.scan().shards if shard.step_id == slot.id)
    volume.close()
    return slot, found


async def test_an_agent_serves_a_shard_on_its_node_byte_for_byte(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    slot, found = write(left, 5, parameters=3_000_000)
    before = _files(tmp_path / "host")
    tier = fetching(tmp_path, authority.files(1))
    assert (await tier.scan()).answer is TierAnswer.UNKNOWN, "nobody was named yet"
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((), agents=agents)
        (remote,) = (await tier.scan()).shards
        assert (remote.step_id, remote.rank, remote.tier) == (found.step_id, 1, Tier.PEER)
        view = empty_slot(slot.layout)
        await reading.load(tier, remote, view)
        assert same(view, slot)
    assert _files(tmp_path / "host") == before, "nothing was written, locked or moved"


async def test_an_agent_and_a_pod_with_node_rank_0_are_both_queried_and_the_agent_gets_no_copies(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    _, found = write(left, 5)
    node = Node(tmp_path, 0, authority.files(0))
    own = node.write(6, rank=0)[1]
    tier = fetching(tmp_path, authority.files(1))
    async with running(node), serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((Peer(node_rank=0, address=node.address),), agents=agents)
        seen = await tier.scan()
        assert {shard.step_id for shard in seen.shards} == {found.step_id, own.step_id}
        assert tier.status().where == "no buddy"


@pytest.mark.parametrize(
    ("namespace", "run"), [("else", RUN), ("team", "bert"), ("..", RUN), ("team", "..")]
)
async def test_an_agent_serves_no_shard_to_a_pod_of_another_run(
    tmp_path: Path, authority: Authority, left: Path, namespace: str, run: str
) -> None:
    write(left, 5)
    tier = fetching(tmp_path, authority.files(1, namespace=namespace, run=run))
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((), agents=agents)
        seen = await tier.scan()
        assert (seen.answer, seen.shards) == (TierAnswer.UNKNOWN, ())
        assert f"nothing of run {namespace}/{run} lies on this node" in seen.reason


async def test_a_response_from_any_peer_but_the_agent_of_the_node_is_rejected(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    write(left, 5)
    strangers = {
        "the agent of node other": agent_files(authority, "other"),
        f"node rank 1 of run team/{RUN}": authority.files(1),
    }
    for name, files in strangers.items():
        tier = fetching(tmp_path / name.replace("/", "-"), authority.files(1))
        async with serving(tmp_path / "host", files) as agents:
            tier.peers_are((), agents=agents)
            seen = await tier.scan()
            assert seen.answer is TierAnswer.UNKNOWN
            assert f"is {name}, not the agent of node {NODE}" in seen.reason


async def test_an_agent_certificate_cannot_read_shards_from_pods_or_agents(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    write(left, 5)
    files = agent_files(authority)
    node = Node(tmp_path, 0, authority.files(0))
    node.write(6, rank=0)
    tier = fetching(tmp_path, files)
    async with running(node), serving(tmp_path / "host", files) as agents:
        tier.peers_are((Peer(node_rank=0, address=node.address),), agents=agents)
        assert (await tier.scan()).shards == ()


async def test_a_pod_of_the_run_cannot_pass_for_an_agent_among_its_peers(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    write(left, 5)
    tier = fetching(tmp_path, authority.files(1))
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((Peer(node_rank=0, address=agents[NODE]),))
        assert "not of this run" in (await tier.scan()).reason


async def test_a_scan_answers_unknown_until_the_expected_agent_responds(
    tmp_path: Path, authority: Authority
) -> None:
    tier = fetching(tmp_path, authority.files(1))
    tier.peers_are((), awaits="shards lie on node b")
    seen = await tier.scan()
    assert (seen.answer, seen.reason) == (TierAnswer.UNKNOWN, "shards lie on node b")
    tier.peers_are(())
    assert (await tier.scan()).answer is TierAnswer.NONE


async def test_an_agent_serves_peer_copies_too_and_accepts_no_upload_or_deletion(
    tmp_path: Path, authority: Authority
) -> None:
    place = tmp_path / "host" / "team" / RUN
    node, sender = Node(place, 1, authority.files(1)), Node(place, 0, authority.files(0))
    async with running(node, sender):
        sender.knows(node, buddies=(node,))
        for sent, step in enumerate((4, 5)):
            _, found = sender.write(step, rank=0)
            durable(sender.remote_tier, found)
            await until(lambda: sender.remote_tier.status().sent > sent)  # noqa: B023
    before = _files(tmp_path / "host")
    again = Node(tmp_path / "again", 0, authority.files(0))
    async with serving(tmp_path / "host", agent_files(authority)) as agents, running(again):
        _, new = again.write(6, rank=0)
        again.remote_tier.peers_are((), agents=agents)
        (known,) = again.remote_tier._directory.known.values()
        known.buddy = True  # as no operator would have it
        durable(again.remote_tier, new)
        await until(lambda: again.remote_tier.status().trouble, what="it is refused")
        seen = await again.remote_tier.scan()
        assert [(shard.step_id.step, shard.rank) for shard in seen.shards] == [(4, 0), (5, 0)]
    assert _files(tmp_path / "host") == before


@pytest.mark.parametrize("link", ["team", f"team/{RUN}", f"team/{RUN}/1", f"team/{RUN}/1/{RUN}"])
async def test_an_agent_follows_no_symbolic_link_to_foreign_files(
    tmp_path: Path, authority: Authority, link: str
) -> None:
    write(tmp_path / "precious" / "team" / RUN / "1", 5)
    place = tmp_path / "host" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "precious" / link)
    tier = fetching(tmp_path, authority.files(1))
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((), agents=agents)
        seen = await tier.scan()
        assert (seen.answer, seen.shards) == (TierAnswer.UNKNOWN, ())


async def test_a_drive_that_is_not_mounted_is_not_an_empty_one(
    tmp_path: Path, authority: Authority
) -> None:
    (tmp_path / "host").mkdir()
    tier = fetching(tmp_path, authority.files(1))
    for host in (tmp_path / "host", tmp_path / "nothing"):
        async with serving(host, agent_files(authority)) as agents:
            tier.peers_are((), agents=agents)
            seen = await tier.scan()
            assert (seen.answer, "is its drive mounted?" in seen.reason) == (
                TierAnswer.UNKNOWN,
                True,
            )


async def test_a_step_that_is_published_between_two_scans_appears_in_the_second(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    _, first = write(left, 5)
    tier = fetching(tmp_path, authority.files(1))
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((), agents=agents)
        assert len((await tier.scan()).shards) == 1
        volume = Volume(left / RUN, run=RUN)
        volume.publish_step(first.step_id)
        volume.close()
        _, second = write(left, 6)
        seen = await tier.scan()
        assert [shard.step_id for shard in seen.shards] == [first.step_id, second.step_id]


async def test_many_connections_leave_no_descriptors(
    tmp_path: Path, authority: Authority, left: Path
) -> None:
    write(left, 5)
    tier = fetching(tmp_path, authority.files(1))
    async with serving(tmp_path / "host", agent_files(authority)) as agents:
        tier.peers_are((), agents=agents)
        await tier.scan()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert (await tier.scan()).shards
        # both ends close after the last answer
        await until(lambda: len(os.listdir("/proc/self/fd")) < before + 10)


def _files(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}
