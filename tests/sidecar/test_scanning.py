"""A scan takes a while, and the machine does not stand still meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.errors import StorageError
from keepstep.retention import Retention
from keepstep_sidecar.catalog import Catalog
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.origins import LocalReader
from keepstep_sidecar.remotes import Remotes
from keepstep_sidecar.scan import Scan
from keepstep_sidecar.slotkeeper import Slotkeeper
from keepstep_sidecar.volume import Volume
from keepstep_sidecar.volumes import VolumeSet
from tests.volume.images import RUN, make_layout, staged


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[VolumeSet]:
    made = VolumeSet([Volume(tmp_path / "volume" / RUN, run=RUN)])
    yield made
    made.close()


@pytest.fixture
def catalog(volumes: VolumeSet, tmp_path: Path) -> Iterator[Catalog]:
    (tmp_path / "memory").mkdir()
    with ThreadPoolExecutor(1) as threads:
        yield Catalog(
            volumes,
            Slotkeeper(tmp_path / "memory", run=RUN),
            keep=Retention(last=9),
            executor=threads,
            changes=Changes(),
            busy=lambda id: False,
            reader=LocalReader(volumes, loads=threads, chunks=threads),
            remotes=Remotes(),
            told=True,
        )


def write(catalog: Catalog, number: int) -> None:
    """The only rank makes a step durable."""
    slot = staged(make_layout(world=1), number)
    written = catalog.volumes.write(slot.view, slot.layout, slot.control)
    catalog.wrote(written, slot.layout, slot.control)


class Held:
    """A survey that has looked, and does not tell yet."""

    def __init__(self, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looked, self.tell = threading.Event(), threading.Event()
        self._scan = volumes.scan
        monkeypatch.setattr(volumes, "scan", self)

    def __call__(self) -> Scan:
        found = self._scan()
        self.looked.set()
        assert self.tell.wait(20)
        return found


def test_a_shard_that_becomes_durable_during_a_scan_is_not_forgotten(
    catalog: Catalog, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[int]:
        write(catalog, 1)
        held = Held(volumes, monkeypatch)
        scan = asyncio.ensure_future(catalog.scan())
        await asyncio.to_thread(held.looked.wait, 20)
        write(catalog, 2)
        held.tell.set()
        await scan
        return sorted(id.step for id in catalog.stock.shards)

    assert asyncio.run(story()) == [1, 2]


def test_a_shard_that_is_deleted_during_a_scan_does_not_come_back(
    catalog: Catalog, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[int]:
        write(catalog, 1)
        write(catalog, 2)
        held = Held(volumes, monkeypatch)
        scan = asyncio.ensure_future(catalog.scan())
        await asyncio.to_thread(held.looked.wait, 20)
        catalog.stock.drop(min(catalog.stock.shards))
        held.tell.set()
        await scan
        return sorted(id.step for id in catalog.stock.shards)

    assert asyncio.run(story()) == [2]


def test_a_volume_that_can_be_read_again_is_no_longer_in_doubt(
    catalog: Catalog, volumes: VolumeSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> Scan:
        raise StorageError("Input/output error")

    async def story() -> None:
        write(catalog, 1)
        with monkeypatch.context() as broken:
            broken.setattr(volumes, "scan", failing)
            await catalog.scan()
        assert "Input/output" in catalog.unreadable
        await catalog.scan()
        assert catalog.unreadable == ""
        assert [id.step for id in catalog.stock.shards] == [1]

    asyncio.run(story())
