"""Two runs in one place, strangers' files, damaged records: named, refused, and left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.steps import Epoch, EpochId, StepId, TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive import index, step_record
from keepstep_sidecar.volume.volume import Volume
from tests.archive.conftest import commit, running, send, write_step
from tests.harness import until
from tests.tiers.local import committed
from tests.volume.images import EPOCH, RUN, step_id

OTHER = Epoch(EpochId(1, "99999999"))


def everything(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture
async def archived(local: Volume, archive_dir: Path) -> ArchiveConfig:
    """An archive that holds step 10."""
    config = ArchiveConfig(url=str(archive_dir), every=1)

    async with running(config) as remote_tier:
        await send(remote_tier, write_step(local, 10))
    return config


async def test_two_runs_with_the_same_name_in_one_archive_are_detected_and_refused(
    archived: ArchiveConfig, local: Volume, archive_dir: Path
) -> None:
    before = everything(archive_dir)

    async with running(archived, epochs=(OTHER,)) as stranger:
        commit(stranger, write_step(local, 20))
        await until(lambda: stranger.status().trouble)
        held = await stranger.scan()
        assert (held.answer, held.shards) == (TierAnswer.UNKNOWN, ())
        for text in (held.reason, stranger.status().trouble):
            assert str(EPOCH.id) in text
            assert f"{OTHER.id} (this run)" in text
            assert "nothing was deleted" in text
    assert everything(archive_dir) == before


async def test_a_run_that_resumes_from_an_archived_step_is_not_taken_for_another_run(
    archived: ArchiveConfig, local: Volume
) -> None:
    child = Epoch(EpochId(2, "00000002"), step_id(10))

    async with running(archived, epochs=(child,)) as remote_tier:
        held = await remote_tier.scan()
        assert (held.answer, held.reason) == (TierAnswer.STEPS, "")


async def test_a_second_writer_with_other_bytes_for_the_same_step_is_refused(
    archived: ArchiveConfig, volumes: Callable[..., Volume], archive_dir: Path
) -> None:
    before = everything(archive_dir)

    async with running(archived) as remote_tier:
        remote_tier._complete = frozenset()
        other = write_step(volumes("elsewhere"), 10, seed=7)
        with pytest.raises(Exception, match="two writers of one run"):
            await remote_tier._sender.send(other[0])
    assert everything(archive_dir) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda step: (step / "model.safetensors").write_bytes(b"x"), "model.safetensors does not"),
        (
            lambda step: Path(os.fsdecode(bytes(step) + b"/mod\xe8le.safetensors")).touch(),
            r"mod\xe8le.safetensors does not",
        ),
        (
            lambda step: next(step.glob("rank-00001*")).unlink(),
            "rank-00001-of-00002.safetensors is",
        ),
        (lambda step: (step / "step.json").write_bytes(b"{}"), "not the record of a step"),
        (
            lambda step: (step / "step.json").write_bytes(
                (step / "step.json").read_bytes().replace(b'"world": 2', b'"world": 3')
            ),
            "its seal does not fit",
        ),
    ],
)
async def test_foreign_or_missing_files_are_reported_and_that_step_is_neither_offered_nor_deleted(
    damage: Callable[[Path], object],
    message: str,
    archived: ArchiveConfig,
    local: Volume,
    archive_dir: Path,
) -> None:
    step = archive_dir / RUN / str(step_id(10))
    damage(step)
    before = everything(step)

    async with running(archived) as remote_tier:
        held = await remote_tier.scan()
        assert (held.answer, held.shards) == (TierAnswer.UNKNOWN, ())
        assert message in held.reason
        assert held.reason.encode(), "a status and a report can tell it"
        for later in (200, 300, 400, 500):
            commit(remote_tier, write_step(local, later))
        assert await remote_tier.drain(timeout_s=20)
        assert [sealed.step for sealed in sorted((await remote_tier.scan()).complete)] == [
            300,
            400,
            500,
        ]
    assert everything(step) == before


async def test_records_are_read_from_the_newest_on_up_to_a_limit(
    archived: ArchiveConfig, local: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(archived) as remote_tier:
        await send(remote_tier, write_step(local, 20))
    monkeypatch.setattr(index, "RECORDS_BYTES", 1)

    async with running(archived) as remote_tier:
        held = await remote_tier.scan()
        assert held.complete == {step_id(20)}
        assert f"{step_id(10)}/step.json: {index.TOO_MUCH}" in held.reason


_SURVEY = """
import asyncio, sys
from pathlib import Path
import keepstep_sidecar.app
from keepstep_sidecar.tiers.archive.directory_store import DirectoryStore
from keepstep_sidecar.tiers.archive.index import Surveyor

surveyor = Surveyor(DirectoryStore(Path(sys.argv[1])), sys.argv[2])
for _ in range(2):
    print(len(asyncio.run(surveyor.survey()).faults))
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.parametrize("of", ["shards", "epochs"])
def test_large_records_take_less_memory_than_a_sidecar_has_beside_its_slots(
    archive_dir: Path, of: str
) -> None:
    """256Mi by default."""
    name = "rank-00000-of-00001.safetensors"
    shard = {"rank": 0, "name": name, "bytes": 1, "root": "r", "params": None}
    many: dict[str, list[object]] = {"epochs": [], "shards": [shard]}
    record, length = (shard, 180_000) if of == "shards" else ({"id": "0001.0123abcd"}, 600_000)
    many[of] = [record] * length
    more = {"format_version": 1, "keepstep": "x", "run": RUN, "world": 1, "written_at": 1.0}
    for number in range(4):
        step = archive_dir / RUN / str(step_id(number))
        body = {**more, **many, "step": str(step_id(number))}
        step.mkdir(parents=True)
        text = json.dumps({**body, "seal": step_record._seal(body)}, separators=(",", ":"))
        assert 12 << 20 < len(text) < step_record.LIMIT_BYTES
        (step / "step.json").write_text(text)
    words = [sys.executable, "-c", _SURVEY, str(archive_dir), RUN]
    *faults, peak_kib = subprocess.run(
        words, capture_output=True, check=True, timeout=60
    ).stdout.split()
    assert faults == [b"4", b"4"]
    assert int(peak_kib) < 200 << 10


@pytest.mark.parametrize("size_bytes", [0, (16 << 20) + 1, 1 << 40])
async def test_a_record_of_impossible_size_is_reported_and_hides_no_other_step(
    archived: ArchiveConfig, archive_dir: Path, size_bytes: int
) -> None:
    planted = archive_dir / RUN / str(step_id(20)) / "step.json"
    planted.parent.mkdir()
    with planted.open("wb") as file:
        file.truncate(size_bytes)

    async with running(archived) as remote_tier:
        held = await remote_tier.scan()
        assert held.complete == {step_id(10)}
        assert str(planted.relative_to(archive_dir)) in held.reason
    assert planted.stat().st_size == size_bytes


@pytest.mark.parametrize("name", ["", "step.json", "rank-00001-of-00002.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
async def test_links_and_special_files_in_the_archive_are_not_followed_and_block_no_step(
    archived: ArchiveConfig,
    local: Volume,
    archive_dir: Path,
    tmp_path: Path,
    name: str,
    kind: str,
) -> None:
    victim, planted = tmp_path / "victim", archive_dir / RUN / str(step_id(20)) / name
    async with running(archived) as remote_tier:
        await send(remote_tier, write_step(local, 20))
    planted.rename(victim)
    match kind:
        case "link":
            planted.symlink_to(victim)
        case "pipe":
            os.mkfifo(planted)
        case _:
            planted.mkdir()
    before = everything(victim) if victim.is_dir() else victim.read_bytes()

    async with running(archived) as remote_tier:
        assert (await remote_tier.scan()).complete == {step_id(10)}
    assert (everything(victim) if victim.is_dir() else victim.read_bytes()) == before
    assert planted.lstat(), "it is left alone"


async def test_a_record_of_another_step_does_not_pass_for_this_one(
    archived: ArchiveConfig, archive_dir: Path
) -> None:
    moved = archive_dir / RUN / str(step_id(77))
    shutil.copytree(archive_dir / RUN / str(step_id(10)), moved)

    async with running(archived) as remote_tier:
        held = await remote_tier.scan()
        assert held.complete == {step_id(10)}
        assert f"step {step_id(10)}" in held.reason


async def test_a_shard_of_another_step_is_not_recorded_as_one_of_this(
    local: Volume, archive_dir: Path
) -> None:
    config = ArchiveConfig(url=str(archive_dir), every=1)

    shards, older = write_step(local, 10), write_step(local, 9)
    place = archive_dir / RUN / str(step_id(10)) / "rank-00001-of-00002.safetensors"
    place.parent.mkdir(parents=True)
    shutil.copy(older[1].path, place)
    async with running(config) as remote_tier:
        committed(remote_tier, step_id(10), [shards[0]])
        await until(lambda: "not step" in remote_tier.status().trouble)
        assert (await remote_tier.scan()).complete == frozenset()


async def test_steps_of_an_abandoned_epoch_are_deleted_once_a_current_step_is_archived(
    archived: ArchiveConfig, local: Volume, archive_dir: Path
) -> None:
    """Rolled back to step 10 after 20 was archived, and trained on."""
    child = Epoch(EpochId(2, "00000002"), step_id(10))

    async with running(archived) as remote_tier:
        await send(remote_tier, write_step(local, 20))
    async with running(archived, epochs=(EPOCH, child)) as remote_tier:
        assert await remote_tier.delete_expired() == ()  # none of the new life is there yet
        later = StepId(child.id, 15)
        await send(remote_tier, write_step(local, 15, epoch=child))
        await until(lambda: not (archive_dir / RUN / str(step_id(20))).exists())
        assert (await remote_tier.scan()).complete == {step_id(10), later}
