"""A shard that is written while its image is still copied: the same file, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.errors import NoSpaceError, StorageError
from keepstep_sidecar.volume.direct_io import Pace
from keepstep_sidecar.volume.volume import Volume
from keepstep_sidecar.volume.writer import Unfinished
from tests.volume.images import CHUNK, Slot, empty_slot, load, make_layout, staged

PACE = Pace(None)
LAYOUT = make_layout(parameters=5 * CHUNK // 8)  # a good five chunks


def begun(volume: Volume, image: Slot) -> tuple[Unfinished, memoryview]:
    """A file for this image, of which the slot holds nothing but the header."""
    view = empty_slot(image.layout)
    view[: len(image.layout.header)] = image.layout.header
    early = volume.begin(view, image.layout, image.control)
    assert early is not None
    return early, view


def files(volume: Volume) -> list[Path]:
    return [path for path in volume.root.rglob("*rank-*") if path.is_file()]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arrivals=st.lists(st.integers(0, LAYOUT.digests_begin), max_size=12))
def test_however_the_bytes_come_the_shard_is_the_image(
    open_volume: Callable[..., Volume], arrivals: list[int]
) -> None:
    volume = open_volume(f"disk-{len(arrivals)}-{hash(tuple(arrivals))}")
    image = staged(LAYOUT, 3)
    early, view = begun(volume, image)
    copied = len(LAYOUT.header)
    for arrived in sorted(arrivals):
        view[copied:arrived], copied = image.view[copied:arrived], max(copied, arrived)
        early.write(early.ready(copied), PACE)
    view[copied:] = image.view[copied:]
    written = early.finish(PACE)
    found = empty_slot(LAYOUT)
    assert load(volume, written.shard.path, found).id == image.id
    assert found[: LAYOUT.digests_begin] == image.view[: LAYOUT.digests_begin]
    assert [path.name for path in files(volume)] == [written.shard.path.name]
    assert volume.write(image.view, LAYOUT, image.control).shard == written.shard, "there already"
    volume.close()


def test_what_is_dropped_leaves_no_file_and_takes_no_room(volume: Volume) -> None:
    early, _ = begun(volume, staged(LAYOUT, 3))
    early.write(2, PACE)
    assert volume.used_bytes() >= LAYOUT.size_bytes
    early.drop()
    assert files(volume) == []
    assert volume.used_bytes() < CHUNK
    assert volume.scan().shards == ()


def test_only_chunks_that_are_whole_are_ready(volume: Volume) -> None:
    early, _ = begun(volume, staged(LAYOUT, 3))
    assert early.ready(CHUNK - 1) == 0
    assert early.ready(2 * CHUNK + 5) == 2
    early.write(2, PACE)
    assert early.ready(LAYOUT.digests_begin - 1) == LAYOUT.chunk_count - 3
    assert early.ready(LAYOUT.digests_begin) == LAYOUT.chunk_count - 2
    early.drop()


@pytest.mark.parametrize(("kind", "error"), [("enospc", NoSpaceError), ("eio", StorageError)])
def test_a_write_that_fails_on_the_way_leaves_no_shard(
    volume: Volume, armed: Callable[[str], None], kind: str, error: type[Exception]
) -> None:
    early, _ = begun(volume, staged(LAYOUT, 3))
    early.write(1, PACE)
    armed(f"write.data:{kind}")
    with pytest.raises(error):
        early.write(2, PACE)
    assert early.ended
    assert volume.scan().shards == ()
    assert volume.quarantined() == (1 if kind == "eio" else 0)
    assert bool(volume.failed) == (kind == "eio")
    assert (volume.used_bytes() < CHUNK) == (kind == "enospc")
