"""What commands read while a sidecar goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_sidecar.tiers.source import ShardGone, file_source
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, make_layout, staged, step_id


def test_a_shard_that_is_published_before_it_is_opened_is_read_under_its_new_name(
    tmp_path: Path,
) -> None:
    volume, slot = Volume(tmp_path / RUN, run=RUN), staged(make_layout(), 1)
    source = file_source(volume.write(slot.view, slot.layout, slot.control).shard, run=RUN)
    volume.publish_step(step_id(1))
    with source.open() as file:
        assert file.fd
    volume.unpublish(step_id(1))
    with source.open() as file:
        assert file.fd
    volume.delete_step(step_id(1))
    with pytest.raises(ShardGone), source.open():
        pass
    volume.close()
