"""Every remote tier keeps the promises of `RemoteTier`: another pod, a directory, S3."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.image import PAGE_BYTES
from keepstep.steps import TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.remote_tier import RemoteTier
from keepstep_sidecar.volume.run_tree import LocalShard
from tests.archive.conftest import commit, write_step
from tests.archive.conftest import running as archiving
from tests.harness import files_below, flip, until
from tests.peer.nodes import running
from tests.tiers.local import committed, durable


@dataclass(frozen=True)
class Scene:
    """A tier that has nothing yet. `send`: rank 0's shard of a step, durable and committed here, is
    given to it; `leave`: it cannot be reached any more; `store`: where its files lie."""

    tier: RemoteTier
    send: Callable[[int], LocalShard]
    leave: Callable[[], Awaitable[None]]
    store: Path

    def files(self) -> set[Path]:
        return set(files_below(self.store, ".safetensors"))


Tiers = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[Scene]]


@asynccontextmanager
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    node = request.getfixturevalue("node")
    here, buddy = node(0), node(1)
    here.knows(buddy, buddies=(buddy,))

    def send(step: int) -> LocalShard:
        _, found = here.write(step, rank=0)
        durable(here.remote_tier, found)
        committed(here.remote_tier, found.step_id, [found])
        return found

    async with running(here, buddy):
        yield Scene(here.remote_tier, send, buddy.remote_tier.close, buddy.root / "peers")


@asynccontextmanager
async def _archive(
    request: pytest.FixtureRequest, config: ArchiveConfig, leave: Callable[[], None], store: Path
) -> AsyncIterator[Scene]:
    volume = request.getfixturevalue("local")

    async def left() -> None:
        leave()

    async with archiving(config) as remote_tier:

        def send(step: int) -> LocalShard:
            shards = write_step(volume, step)
            commit(remote_tier, shards)
            return shards[0]

        yield Scene(remote_tier, send, left, store)


def directory(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Scene]:
    root: Path = request.getfixturevalue("archive_dir")

    def leave() -> None:  # as a share that is not mounted any more
        root.rename(root.with_name("elsewhere"))
        root.write_text("")

    return _archive(request, ArchiveConfig(url=str(root), every=1), leave, root)


def s3(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Scene]:
    bucket = request.getfixturevalue("bucket")

    def leave() -> None:
        bucket.proxy.faults.answer = 503

    return _archive(request, bucket.config(), leave, bucket.directory)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is looked at from time to time is looked at often."""
    for name in (
        "replicator.SCAN_AGAIN_S",
        "peer.tier._LIST_EVERY_S",
        "replicator._COMPARE_EVERY_S",
    ):
        monkeypatch.setattr(f"keepstep_sidecar.tiers.{name}", 0.1)


on_every_tier = pytest.mark.parametrize(
    "tiers", [peers, directory, s3], ids=lambda make: make.__name__
)


@on_every_tier
async def test_a_scan_of_an_empty_tier_answers_none(
    tiers: Tiers, request: pytest.FixtureRequest
) -> None:
    async with tiers(request) as scene:
        seen = await scene.tier.scan()
        assert (seen.answer, seen.shards, seen.reason) == (TierAnswer.NONE, (), "")
        assert scene.tier.status().backlog == 0


@on_every_tier
async def test_a_sent_shard_is_listed_with_its_properties_after_a_drain(
    tiers: Tiers, request: pytest.FixtureRequest
) -> None:
    async with tiers(request) as scene:
        found = scene.send(5)
        assert await scene.tier.drain(timeout_s=60)
        seen = await scene.tier.scan()
        assert seen.answer is TierAnswer.STEPS
        remote = next(shard for shard in seen.shards if shard.rank == 0)
        assert (remote.step_id, remote.world, remote.size_bytes) == (
            found.step_id,
            found.world,
            found.size_bytes,
        )
        assert (remote.root, remote.tier) == (found.root, scene.tier.tier)
        status = scene.tier.status()
        assert (status.backlog, status.trouble) == (0, "")
        assert status.sent_bytes > 0
        assert not scene.tier.replicator.is_step_in_transfer(found.step_id)


@on_every_tier
async def test_sending_the_same_shard_again_transfers_nothing(
    tiers: Tiers, request: pytest.FixtureRequest
) -> None:
    async with tiers(request) as scene:
        found = scene.send(5)
        assert await scene.tier.drain(timeout_s=60)
        sent = scene.tier.status().sent_bytes
        durable(scene.tier, found)
        committed(scene.tier, found.step_id, [found])
        assert await scene.tier.drain(timeout_s=60)
        assert scene.tier.status().sent_bytes == sent


@on_every_tier
async def test_a_locally_corrupted_shard_is_not_sent(
    tiers: Tiers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiers(request) as scene:
        with monkeypatch.context() as deaf:
            deaf.setattr(type(scene.tier), "wake", lambda self: None)
            found = scene.send(5)
            flip(found.path, PAGE_BYTES * 3)
        scene.tier.wake()
        await until(lambda: scene.tier.status().trouble or scene.tier.status().failures)
        name = found.path.name.removesuffix(".safetensors")
        assert not [path for path in scene.files() if name in path.name]


@on_every_tier
async def test_an_unreachable_tier_answers_unknown_with_a_reason_and_keeps_a_backlog(
    tiers: Tiers, request: pytest.FixtureRequest
) -> None:
    async with tiers(request) as scene:
        await scene.leave()
        scene.send(5)
        assert not await scene.tier.drain(timeout_s=1)
        seen = await scene.tier.scan()
        assert seen.answer is TierAnswer.UNKNOWN
        assert seen.reason
        assert scene.tier.status().backlog > 0


@pytest.mark.usefixtures("quick")
@on_every_tier
async def test_a_store_that_was_emptied_externally_is_filled_again(
    tiers: Tiers, request: pytest.FixtureRequest
) -> None:
    async with tiers(request) as scene:
        scene.send(5)
        assert await scene.tier.drain(timeout_s=60)
        whole = (".safetensors", "step.json")
        before = set(files_below(scene.store, *whole))
        assert before
        for path in before:
            path.unlink()
        await until(lambda: before <= set(files_below(scene.store, *whole)))
        assert await scene.tier.drain(timeout_s=60)
        assert (await scene.tier.scan()).answer is TierAnswer.STEPS


@pytest.mark.usefixtures("quick")
@on_every_tier
async def test_a_lost_wake_up_delays_sending_by_at_most_one_period(
    tiers: Tiers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiers(request) as scene:
        scene.send(5)
        assert await scene.tier.drain(timeout_s=60)
        before = scene.files()
        with monkeypatch.context() as deaf:
            deaf.setattr(type(scene.tier), "wake", lambda self: None)
            scene.send(6)
        await until(lambda: scene.files() - before)  # a buddy gives up the older step by then
