"""Bytes that changed on the drive are noticed before anybody restores them, and kept aside."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.errors import DigestError, ForeignError, ImageError, TornError, VersionError
from keepstep.image import PAGE_BYTES
from keepstep.image.layout import blake2b_digest
from keepstep.steps import shard_name
from keepstep_sidecar.volume.volume import Volume
from tests.harness import flip
from tests.volume.images import CHUNK, Slot, empty_slot, load, make_layout, staged, step_id

REGIONS: dict[str, Callable[[Slot], int]] = {
    "first byte": lambda slot: 0,
    "header": lambda slot: 100,
    "padding of the header": lambda slot: len(slot.layout.header) - 1,
    "first tensor": lambda slot: slot.layout.entries["model.weight"].begin,
    "last tensor": lambda slot: slot.layout.extras_begin - 1,
    "extras": lambda slot: slot.layout.extras_begin + 5,
    "padding of the extras": lambda slot: slot.layout.digests_begin - 1,
    "digest table": lambda slot: slot.layout.digests_begin,
    "padding of the table": lambda slot: slot.layout.control_begin - 1,
    "control page": lambda slot: slot.layout.control_begin + 30,
    "padding of the control page": lambda slot: slot.layout.size_bytes - 40,
    "last byte": lambda slot: slot.layout.size_bytes - 1,
}


@pytest.fixture(scope="module")
def slot() -> Slot:
    return staged(make_layout(), 1)


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_found_when_loading(volume: Volume, slot: Slot, region: str) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    flip(path, REGIONS[region](slot))
    view = empty_slot(slot.layout)
    view[-PAGE_BYTES:] = slot.view[-PAGE_BYTES:]
    with pytest.raises(ImageError, match=str(path)):
        load(volume, path, view)
    assert not path.exists()
    assert volume.count_quarantined_files() == 1
    assert view[-PAGE_BYTES:] == bytes(PAGE_BYTES), "a broken image must not look sealed"


@pytest.mark.parametrize("region", ["header", "digest table", "control page", "last byte"])
def test_a_scan_quarantines_shards_that_are_visibly_broken(
    volume: Volume, slot: Slot, region: str
) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    volume.publish_step(slot.id)
    path = volume.root / str(slot.id) / path.name
    flip(path, REGIONS[region](slot))
    scan = volume.scan()
    assert scan.shards == ()
    (problem,) = scan.problems
    assert problem.path == path
    assert problem.moved_to in volume.root.glob("quarantine/*")
    assert not path.parent.exists(), "a step that lost a shard is still visible"
    assert volume.scan().problems == ()


def test_the_error_names_the_chunk_and_its_tensors(volume: Volume) -> None:
    big = staged(make_layout(parameters=2_300_000), 1)
    path = volume.write(big.view, big.layout, big.control).shard.path
    flip(path, CHUNK + 12345)
    view = empty_slot(big.layout)
    with pytest.raises(DigestError, match=r"chunk 1 .* optimizer\.exp_avg, model") as caught:
        load(volume, path, view)
    assert caught.value.chunk == 1
    assert caught.value.tensors == ("optimizer.exp_avg", "model.weight")
    assert view[-PAGE_BYTES:] == bytes(PAGE_BYTES), "a broken image must not look sealed"


def test_a_broken_shard_can_be_replaced_by_a_new_one(volume: Volume, slot: Slot) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    flip(path, slot.layout.size_bytes - 1)
    assert volume.write(slot.view, slot.layout, slot.control).seconds > 0
    assert len(volume.scan().shards) == 1
    assert volume.count_quarantined_files() == 1


def test_a_quarantined_file_keeps_a_descriptive_name_and_is_never_read_again(
    volume: Volume, slot: Slot
) -> None:
    for number in (1, 2):
        path = volume.write(slot.view, slot.layout, slot.control).shard.path
        flip(path, slot.layout.extras_begin)
        with pytest.raises(DigestError):
            load(volume, path, empty_slot(slot.layout))
        name = f"0001.1f9c2d7a-000000001.rank-00000-of-00002.digest.{number}"
        assert (volume.root / "quarantine" / name).stat().st_size == slot.layout.size_bytes
    assert volume.scan().shards == ()
    assert volume.scan().problems == ()


@pytest.mark.parametrize(
    "size_of",
    [
        lambda layout: 0,
        lambda layout: 7,
        lambda layout: len(layout.header) - 1,
        lambda layout: layout.extras_begin,
        lambda layout: layout.digests_begin,
        lambda layout: layout.control_begin,
        lambda layout: layout.size_bytes - 1,
        lambda layout: layout.size_bytes + 1,
    ],
)
def test_a_file_with_the_wrong_size_is_quarantined(
    volume: Volume, slot: Slot, size_of: Callable[[object], int]
) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    os.truncate(path, size_of(slot.layout))
    (problem,) = volume.scan().problems
    assert isinstance(problem.error, ImageError)
    assert problem.moved_to is not None


def test_a_shard_under_another_name_is_foreign(volume: Volume, slot: Slot) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    other_rank = path.rename(path.with_name(shard_name(1, 2)))
    other_step = volume.root / "pending" / str(step_id(9))
    other_step.mkdir()
    os.link(other_rank, other_step / path.name)
    problems = volume.scan().problems
    assert [type(problem.error) for problem in problems] == [ForeignError, ForeignError]


def test_the_shard_of_another_run_is_foreign(
    open_volume: Callable[..., Volume], volume: Volume, tmp_path: Path
) -> None:
    stranger = Volume(tmp_path / "bert", run="bert")
    theirs = staged(make_layout(), 1, run="bert")
    path = stranger.write(theirs.view, theirs.layout, theirs.control).shard.path
    stranger.close()
    step = volume.root / "pending" / path.parent.name
    step.mkdir(parents=True)
    (step / path.name).write_bytes(path.read_bytes())
    (problem,) = volume.scan().problems
    assert isinstance(problem.error, ForeignError)
    assert "the image of run bert, not of gpt" in str(problem.error)


def test_a_staged_image_without_digests_is_not_accepted_as_a_shard(
    volume: Volume, slot: Slot
) -> None:
    step = volume.root / "pending" / str(slot.id)
    step.mkdir(parents=True)
    (step / shard_name(0, 2)).write_bytes(slot.view)
    (problem,) = volume.scan().problems
    assert isinstance(problem.error, TornError)


def test_a_shard_with_a_newer_format_version_is_not_moved(volume: Volume, slot: Slot) -> None:
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    volume.publish_step(slot.id)
    path = volume.root / str(slot.id) / path.name
    page = replace(slot.control, format_version=99).to_bytes()
    assert page[-32:] == blake2b_digest(page[:-32]).hex().encode()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), page, slot.layout.control_begin)
    (problem,) = volume.scan().problems
    assert isinstance(problem.error, VersionError)
    assert problem.moved_to is None
    with pytest.raises(VersionError):
        load(volume, path, empty_slot(slot.layout))
    assert path.exists()
    assert volume.count_quarantined_files() == 0
