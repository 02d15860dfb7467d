"""A shard that is written while its image is still copied: the same file, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.errors import DigestError, NoSpaceError, StorageError
from keepstep.image import chunk_bounds
from keepstep_sidecar.volume.volume import Volume
from keepstep_sidecar.volume.writer import EarlyWrite
from tests.volume.images import CHUNK, Slot, empty_slot, load, make_layout, staged

LAYOUT = make_layout(parameters=5 * CHUNK // 8)  # five chunks and a bit


class Copy:
    """A copy that makes these pauses, and ends after the last one."""

    def __init__(self, image: Slot, *pauses: int) -> None:
        self.view = empty_slot(image.layout)
        self.view[: len(image.layout.header)] = image.layout.header
        self._image, self._pauses = image, sorted(pauses)
        self._there = len(image.layout.header)

    def until(self, end: int) -> None:
        self.view[self._there : end], self._there = self._image.view[self._there : end], end

    def __call__(self, size_bytes: int) -> bool:
        while self._there < size_bytes and self._pauses:
            self.until(max(self._there, self._pauses.pop(0)))
        return self._there >= size_bytes


def begun(volume: Volume, image: Slot, *pauses: int) -> tuple[EarlyWrite, Copy]:
    """A file for this image, with the chunks that were copied up to the last of the pauses."""
    copy = Copy(image, *pauses)
    return volume.begin(copy.view, image.layout, image.control, copied=copy), copy


def files(volume: Volume) -> list[Path]:
    return [path for path in volume.root.rglob("*rank-*") if path.is_file()]


def written(volume: Volume, image: Slot) -> list[int]:
    """The chunks of the image that lie in the only file."""
    (path,) = files(volume)
    data, each = path.read_bytes(), range(image.layout.chunk_count)
    spans = {index: slice(*chunk_bounds(image.layout, index)) for index in each}
    return [index for index, span in spans.items() if data[span] == image.view[span]]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pauses=st.lists(st.integers(0, LAYOUT.digests_begin), max_size=12))
def test_however_the_bytes_come_the_shard_is_the_image(
    open_volume: Callable[..., Volume], pauses: list[int]
) -> None:
    volume = open_volume(f"disk-{len(pauses)}-{hash(tuple(pauses))}")
    image = staged(LAYOUT, 3)
    early, copy = begun(volume, image, *pauses)
    copy.until(LAYOUT.size_bytes)
    path = early.finish().shard.path
    found = empty_slot(LAYOUT)
    assert load(volume, path, found).id == image.id
    assert found[: LAYOUT.digests_begin] == image.view[: LAYOUT.digests_begin]
    assert [one.name for one in files(volume)] == [path.name]
    early.drop()
    assert volume.write(image.view, LAYOUT, image.control).shard.path == path, "there already"
    volume.close()


def test_whole_chunks_are_written_as_soon_as_they_are_copied(volume: Volume) -> None:
    image = staged(LAYOUT, 3)
    early, _ = begun(volume, image, 1, CHUNK, 3 * CHUNK + 5)
    assert written(volume, image) == [0, 1, 2]
    assert volume.scan().shards == ()
    early.drop()
    early, _ = begun(volume, image, LAYOUT.digests_begin - 1)
    assert written(volume, image) == [*range(LAYOUT.chunk_count - 1)]
    early.drop()


def test_what_changes_after_it_was_written_early_is_no_shard_that_verifies(volume: Volume) -> None:
    """Digests are of the bytes that are sealed, not of those that were written."""
    early, copy = begun(volume, staged(LAYOUT, 3), 2 * CHUNK)
    copy.until(LAYOUT.size_bytes)
    copy.view[CHUNK] ^= 1
    path = early.finish().shard.path
    with pytest.raises(DigestError, match="chunk 1 "):
        load(volume, path, empty_slot(LAYOUT))


def test_what_is_dropped_leaves_no_file_and_takes_no_room(volume: Volume) -> None:
    early, _ = begun(volume, staged(LAYOUT, 3), 2 * CHUNK)
    assert volume.used_bytes() >= LAYOUT.size_bytes
    early.drop()
    assert files(volume) == []
    assert volume.used_bytes() < CHUNK


@pytest.mark.parametrize(("kind", "error"), [("enospc", NoSpaceError), ("eio", StorageError)])
@pytest.mark.parametrize("early_chunks", [0, 3])
def test_a_write_that_fails_before_or_after_the_seal_leaves_no_shard(
    volume: Volume,
    armed: Callable[[str], None],
    kind: str,
    error: type[Exception],
    early_chunks: int,
) -> None:
    def write() -> None:
        early, copy = begun(volume, staged(LAYOUT, 3), early_chunks * CHUNK)
        copy.until(LAYOUT.size_bytes)
        early.finish()

    armed(f"write.data:{kind}@2")
    with pytest.raises(error):
        write()
    assert volume.scan().shards == ()
    assert volume.quarantined() == (1 if kind == "eio" else 0)
    assert bool(volume.failed) == (kind == "eio")
    assert volume.used_bytes() < CHUNK, "what is in quarantine counts as free"
