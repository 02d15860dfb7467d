"""A step of another run, read from a real store by a run that begins there."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from keepstep.image import check_control
from keepstep.steps import Tier, TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig, parse_restore_from
from keepstep_sidecar.tiers.archive.store import open_store
from keepstep_sidecar.tiers.archive.tier import AncestorTier
from keepstep_sidecar.tiers.remote_tier import RunFacts
from keepstep_sidecar.volume.volume import Volume
from tests.archive.conftest import Bucket, commit, running, write_step
from tests.tiers import reading
from tests.volume.images import RUN, step_id


@pytest.fixture(params=["directory", "s3"])
def config(request: pytest.FixtureRequest, archive_dir: Path) -> ArchiveConfig:
    if request.param == "directory":
        return ArchiveConfig(url=str(archive_dir), every=1)
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.config()


async def test_a_fork_loads_a_shard_of_the_original_run_without_writing_to_its_archive(
    config: ArchiveConfig, local: Volume
) -> None:
    async with running(config) as remote_tier:
        for number in (10, 20):
            commit(remote_tier, write_step(local, number))
        assert await remote_tier.drain(timeout_s=30)
    store = open_store(config)
    before = await store.list_below("")
    ancestor = AncestorTier(store, parse_restore_from(f"{RUN}/10"), run="second")
    found = await ancestor.scan()
    assert (found.answer, found.epochs) == (TierAnswer.STEPS, ())
    assert {shard.step_id for shard in found.shards} == ancestor.ids == {step_id(10)}
    assert {(shard.rank, shard.world, shard.tier) for shard in found.shards} == {
        (0, 2, Tier.ARCHIVE),
        (1, 2, Tier.ARCHIVE),
    }
    for shard in found.shards:
        layout = (await reading.manifest(ancestor, shard)).layout
        view = memoryview(mmap.mmap(-1, shard.size_bytes))
        control = await reading.load(ancestor, shard, view)
        check_control(control, layout, run="second", step_id=step_id(10))
        assert bytes(view[layout.control_begin :]) == control.to_bytes()
    assert await store.list_below("") == before

    ancestor.set_run_facts(RunFacts(outgrown=lambda: True))
    assert (await ancestor.scan()).answer is TierAnswer.NONE
    await ancestor.close()


async def test_a_fork_does_not_start_at_step_0_when_the_archive_is_unreachable(
    tmp_path: Path,
) -> None:
    store = open_store(ArchiveConfig(url=str(tmp_path / "gone"), every=1))
    ancestor = AncestorTier(store, parse_restore_from("first/10"), run="second")
    found = await ancestor.scan()
    assert found.answer is TierAnswer.UNKNOWN
    assert "begin from first/10, but" in found.reason
    assert str(tmp_path / "gone") in found.reason
    await ancestor.close()
