"""The base of a shard lies beside it, one file for all steps that refer to it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from keepstep.errors import ImageError, UsageError
from keepstep.image import BaseRef, Layout, TensorRole, TensorSpec
from keepstep_sidecar.volume.files import Filesystem
from keepstep_sidecar.volume.volume import SealedMemoryImage
from tests.volume.images import make_layout, staged, step_id


class Unlinked(Filesystem):
    """A file system without hard links."""

    def link(self, source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def base_of(seed=0):
    tensors = [TensorSpec("model.frozen", "F32", (3_000_000,), TensorRole.PARAMS)]
    layout = Layout.build(tensors, rank=0, world=1, is_base=True)
    slot = staged(layout, 0, seed=seed)
    control = replace(slot.control, extras_bytes=0)
    return SealedMemoryImage(view=slot.view, layout=layout, control=control)


def write(volume, step, base):
    slot = staged(make_layout(world=1), step)
    control = replace(slot.control, base=BaseRef.of(base.control, base.layout))
    return volume.write(slot.view, slot.layout, control, base=base)


def test_every_step_links_to_a_base_that_is_stored_once(volume):
    base, shards = base_of(), []
    for step in range(3):
        written = write(volume, step, base)
        shards.append(written.shard)
        assert (written.bytes > base.layout.size_bytes) == (step == 0)
        volume.publish_step(step_id(step))
    scan = volume.scan()
    assert [shard.base.root for shard in scan.shards] == [scan.shards[0].base.root] * 3
    assert len({shard.base_shard.path.stat().st_ino for shard in scan.shards}) == 1
    assert volume.used_bytes() < 1.2 * base.layout.size_bytes
    for step in range(2):
        volume.delete_step(step_id(step))
    (left,) = volume.scan().shards
    assert left.base_shard.path.stat().st_nlink == 1
    volume.delete_step(step_id(2))
    assert volume.used_bytes() < 1 << 20


def test_each_step_stores_its_own_base_on_a_file_system_without_hard_links(open_volume):
    volume = open_volume(filesystem=Unlinked())
    base = base_of()
    for step in range(2):
        assert write(volume, step, base).bytes > base.layout.size_bytes
    shards = volume.scan().shards
    assert len({shard.base_shard.path.stat().st_ino for shard in shards}) == len(shards) == 2


def test_a_different_base_with_the_same_layout_is_not_reused(volume):
    write(volume, 0, base_of())
    other = base_of(seed=1)
    other = replace(other, control=replace(other.control, step=1))
    other.view[other.layout.control_begin :] = other.control.to_bytes()
    assert write(volume, 1, other).bytes > other.layout.size_bytes
    first, two = volume.scan().shards
    assert first.base.root != two.base.root


def test_a_rewritten_shard_joins_its_published_step_although_the_base_still_exists(volume):
    base = base_of()
    write(volume, 0, base)
    shard = volume.publish_step(step_id(0)) / "rank-00000-of-00001.safetensors"
    shard.unlink()
    write(volume, 0, base)
    volume.publish_step(step_id(0))
    (found,) = volume.scan().shards
    assert found.published
    assert found.base_shard.path.exists()


@pytest.mark.parametrize("lost", ["base", "shard"])
def test_a_shard_without_its_base_or_a_base_without_its_shard_is_removed_by_a_scan(volume, lost):
    (shard,) = [write(volume, 0, base_of()).shard]
    (shard.base_shard.path if lost == "base" else shard.path).unlink()
    scan = volume.scan()
    assert not scan.shards
    if lost == "base":
        (problem,) = scan.problems
        assert isinstance(problem.error, ImageError)
        assert "base-00000-of-00001.safetensors" in str(problem.error)
        assert problem.moved_to is not None
    volume.scan()
    assert not list(volume.root.rglob("base-*"))


def test_writing_an_image_with_a_wrong_or_missing_base_is_refused(volume):
    base = base_of()
    slot = staged(make_layout(world=1), 3)
    control = replace(slot.control, base=BaseRef.of(base.control, base.layout))
    with pytest.raises(UsageError, match="base"):
        volume.write(slot.view, slot.layout, control)
    other = replace(control, base=replace(control.base, step=step_id(2)))
    with pytest.raises(UsageError, match="base"):
        volume.write(slot.view, slot.layout, other, base=base)
    assert not list(volume.root.rglob("*.safetensors"))
