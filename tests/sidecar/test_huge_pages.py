"""Slots on huge pages: as good as those on small ones, and never in the way of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer import FakeTrainer, come_back, content, read_image

from keepstep.image import HUGE_PAGE_BYTES
from keepstep.image.layout import LEAST_ON_HUGE_PAGES_BYTES
from keepstep.steps import Tier
from keepstep.wire.trainer import Flushed, StopSidecarRequest, UnseenHugePagesRequest
from keepstep_sidecar.memory.slot_directories import SlotDirectories
from tests import hugetlbfs
from tests.harness import SidecarProcess, eventually

_SIZE = LEAST_ON_HUGE_PAGES_BYTES
_SLOT_PAGES = _SIZE // HUGE_PAGE_BYTES + 1
_SLOTS = 3

Trainers = Callable[..., FakeTrainer]


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with pages for all slots of one rank."""
    with hugetlbfs.for_test(tmp_path / "huge", (_SLOTS + 1) * _SLOT_PAGES) as directory:
        yield directory


@pytest.fixture
def sidecar(sidecars: Callable[..., SidecarProcess]) -> SidecarProcess:
    """Not yet started."""
    return sidecars()


def start(sidecar: SidecarProcess, directory: Path, *options: str) -> SidecarProcess:
    return sidecar.start("--slots", str(_SLOTS), "--huge-pages-dir", str(directory), *options)


def committed(trainer: FakeTrainer, *steps: int) -> None:
    for step in steps:
        assert trainer.wait(trainer.stage(step), "committed", flush=True).reached


def slots(root: Path) -> list[Path]:
    return sorted(root.glob("rank-*/*.slot"))


def test_a_step_is_saved_committed_and_restored_on_huge_pages_through_kill_9(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    start(sidecar, huge)
    trainer = trainers(sidecar.socket, size=_SIZE).begin_run()
    committed(trainer, 1, 2)
    eventually(lambda: len(slots(huge)) == _SLOTS, what="all slots on huge pages")
    assert slots(sidecar.memory) == []
    assert sidecar.get("/v1/status")["locked"] == "hugepages"
    trainer.disconnect()
    sidecar.kill()
    start(sidecar, huge)
    again = trainers(sidecar.socket, size=_SIZE)
    again.connect()
    newest = again.candidates().candidates[-1]
    assert (newest.id.step, newest.tier) == (2, Tier.MEMORY)
    opened = again.open(newest.id)
    assert Path(opened.path).is_relative_to(huge)
    assert read_image(again.layout, opened.path) == content(again.layout, 2)
    shard = next(sidecar.root.glob("0*2/rank-*"))
    assert read_image(again.layout, shard) == content(again.layout, 2)
    again.go_on()
    committed(again, 3)


def test_an_image_read_from_a_volume_lands_on_huge_pages(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    start(sidecar, huge)
    committed(trainers(sidecar.socket, size=_SIZE).begin_run(), 1)
    sidecar.terminate()
    for path in slots(huge):
        path.unlink()
    start(sidecar, huge)
    again = trainers(sidecar.socket, size=_SIZE)
    again.connect()
    opened = again.open(again.candidates().candidates[-1].id)
    assert read_image(again.layout, opened.path) == content(again.layout, 1)


def test_slots_use_small_pages_when_no_huge_page_is_free(
    sidecar: SidecarProcess, trainers: Trainers, tmp_path: Path
) -> None:
    """Of this mount's bytes one slot can be made, though more pages are free."""
    size_bytes = (2 * _SLOT_PAGES - 1) * HUGE_PAGE_BYTES
    pages = (_SLOTS + 1) * _SLOT_PAGES
    with hugetlbfs.for_test(tmp_path / "huge", pages, size_bytes=size_bytes) as huge:
        start(sidecar, huge)
        trainer = trainers(sidecar.socket, size=_SIZE).begin_run()
        committed(trainer, 1, 2, 3)
        assert (len(slots(huge)), len(slots(sidecar.memory))) == (1, _SLOTS - 1)
        assert "slot.small_pages_used" in sidecar.text()
        assert sidecar.get("/v1/status")["locked"] != "hugepages"


@pytest.mark.parametrize("why", ["no hugetlbfs", "not there", "a link", "another sidecar's"])
def test_an_unusable_huge_pages_directory_falls_back_to_small_pages(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path, tmp_path: Path, why: str
) -> None:
    directory = tmp_path / "elsewhere"
    if why == "no hugetlbfs":
        directory.mkdir()
    elif why == "a link":
        directory.symlink_to(huge)
    elif why == "another sidecar's":
        directory = huge
        other = SlotDirectories(tmp_path, huge=huge)
        assert other.huge == huge
    start(sidecar, directory)
    committed(trainers(sidecar.socket, size=_SIZE).begin_run(), 1)
    assert slots(huge) == []
    assert slots(sidecar.memory) != []
    assert "memory.huge_pages_disabled" in sidecar.text()
    if why == "another sidecar's":
        other.close()


def test_a_sidecar_switched_to_small_pages_restores_from_slots_on_huge_pages(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    start(sidecar, huge)
    committed(trainers(sidecar.socket, size=_SIZE).begin_run(), 1)
    eventually(lambda: len(slots(huge)) == _SLOTS, what="all slots")
    sidecar.kill()
    before = slots(huge)
    start(sidecar, huge, "--small-pages")
    again = trainers(sidecar.socket, size=_SIZE)
    again.connect()
    newest = again.candidates().candidates[-1]
    assert (newest.id.step, newest.tier) == (1, Tier.MEMORY)
    again.go_on()
    committed(again, 2, 3)
    eventually(
        lambda: len(slots(huge)) + len(slots(sidecar.memory)) == _SLOTS, what="slots in place of"
        " those that the dead trainer might have been filling"
    )  # fmt: skip
    assert set(slots(huge)) < set(before)


@pytest.mark.parametrize("damage", ["truncated", "removed", "directory"])
def test_a_damaged_slot_on_huge_pages_does_not_crash_the_sidecar(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path, damage: str
) -> None:
    start(sidecar, huge)
    trainer = trainers(sidecar.socket, size=_SIZE).begin_run()
    committed(trainer, 1)
    eventually(lambda: len(slots(huge)) == _SLOTS, what="all slots")
    for path in slots(huge):
        os.truncate(path, HUGE_PAGE_BYTES) if damage == "truncated" else path.unlink()
    if damage == "directory":
        (huge / "rank-00000").rmdir()
    come_back(trainer)
    committed(trainer, 2)
    assert sidecar.process is not None
    assert sidecar.process.poll() is None


def test_huge_pages_are_freed_when_the_run_ends(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    own = huge / "run"
    start(sidecar, own)
    trainer = trainers(sidecar.socket, size=_SIZE).begin_run()
    committed(trainer, 1)
    assert slots(own) != []
    trainer.disconnect()
    trainer.call("/v1/stop", StopSidecarRequest(drain=True, forget=True), Flushed)
    eventually(lambda: not own.exists(), what="the directory is gone")


def test_a_trainer_without_access_to_huge_pages_restores_from_a_copy_on_small_pages(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    """As in a container of its own, with this machine's /dev/shm but not its hugetlbfs."""
    start(sidecar, huge, "--persist-every", "1000")
    trainer = trainers(sidecar.socket, size=_SIZE)
    assert trainer.connect().huge_pages_dir == str(huge)
    trainer.go_on()
    trainer.stage(1)  # in memory alone
    assert [path.parent.parent for path in slots(huge)][:1] == [huge]
    trainer.disconnect()
    blind = trainers(sidecar.socket, size=_SIZE)
    blind.connect()
    blind.call("/v1/unseen", UnseenHugePagesRequest(lease=blind.lease), dict)
    assert slots(huge) == []
    opened = blind.open(blind.candidates().candidates[-1].id)
    assert Path(opened.path).is_relative_to(sidecar.memory)
    assert read_image(blind.layout, opened.path) == content(blind.layout, 1)
    blind.go_on()
    committed(blind, 2, 3)
    assert slots(huge) == []
    assert "does not see it; mount it there, too" in sidecar.text()


def test_slot_names_stay_unique_across_sidecar_restarts_with_and_without_huge_pages(
    sidecar: SidecarProcess, trainers: Trainers, huge: Path
) -> None:
    for number, options in enumerate(
        (("--huge-pages-dir", str(huge)), (), ("--huge-pages-dir", str(huge)))
    ):
        sidecar.start("--slots", str(_SLOTS), *options)
        trainer = trainers(sidecar.socket, size=_SIZE).begin_run()
        committed(trainer, *range(3 * number + 1, 3 * number + 4))
        trainer.disconnect()
        sidecar.kill()
    names = [path.name for root in (huge, sidecar.memory) for path in slots(root)]
    assert len(names) == len(set(names)) > _SLOTS
