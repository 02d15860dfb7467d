"""An archive in a directory: what is sent, read back, and retired."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.retention import Retention
from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError
from keepstep.image import PAGE_BYTES
from keepstep.steps import StepId, TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers import source
from keepstep_sidecar.tiers.archive.directory_store import DirectoryStore
from keepstep_sidecar.tiers.archive.tier import ArchiveTier
from keepstep_sidecar.tiers.remote_tier import RunFacts
from keepstep_sidecar.volume.files import Filesystem, ShardFile
from keepstep_sidecar.volume.volume import Volume
from tests.archive.conftest import commit, running, send, write_step
from tests.harness import files_below, matching, until
from tests.tiers.local import committed, durable, gone
from tests.volume.images import EPOCH, RUN, step_id


def config(directory: Path, *, every: int = 1, **more: object) -> ArchiveConfig:
    return ArchiveConfig(url=str(directory), every=every, **more)  # type: ignore[arg-type]


async def test_a_committed_step_is_archived_with_its_record_last(
    local: Volume, archive_dir: Path
) -> None:
    news: list[bool] = []
    async with running(
        config(archive_dir), facts=RunFacts(changed=lambda: news.append(True))
    ) as remote_tier:
        shards = write_step(local, 10)
        await send(remote_tier, shards)
        held = await remote_tier.scan()
        status = remote_tier.status()
    assert held.answer is TierAnswer.STEPS
    assert held.complete == {step_id(10)}
    assert [(shard.rank, shard.world, shard.root) for shard in held.shards] == [
        (rank, 2, shards[rank].root) for rank in range(2)
    ]
    assert held.epochs == (EPOCH,)
    assert news
    assert (status.sent, status.backlog, status.trouble) == (2, 0, "")
    directory = archive_dir / RUN / str(step_id(10))
    names = sorted(path.name for path in directory.iterdir())
    assert names == [*(f"rank-0000{r}-of-00002.safetensors" for r in range(2)), "step.json"]
    newest = max(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.name == "step.json"
    original = local.root / "pending" / str(step_id(10)) / names[0]
    assert (directory / names[0]).read_bytes() == original.read_bytes()


async def test_a_step_older_than_the_newest_commit_is_archived_without_its_own_commit_notice(
    local: Volume, archive_dir: Path
) -> None:
    """Others may have archived and retired it before this pod heard of anything."""
    facts = RunFacts(commit=lambda: step_id(20))
    async with running(config(archive_dir, every=10), facts=facts) as remote_tier:
        for step in (10, 15, 20, 30):
            durable(remote_tier, *write_step(local, step).values())
        assert remote_tier.replicator.is_step_in_transfer(step_id(10)), "and is not deleted before"
        assert await remote_tier.drain(timeout_s=60)
        assert (await remote_tier.scan()).complete == {step_id(10)}


async def test_the_first_commit_after_a_skipped_due_step_is_archived_when_the_leader_requests_it(
    local: Volume, archive_dir: Path
) -> None:
    async with running(config(archive_dir, every=10)) as remote_tier:
        for step in (9, 12, 13):
            commit(remote_tier, write_step(local, step))
        assert await remote_tier.drain(timeout_s=60)
        assert (await remote_tier.scan()).complete == set()
        remote_tier.request(step_id(12))
        assert await remote_tier.drain(timeout_s=60)
        assert (await remote_tier.scan()).complete == {step_id(12)}


async def test_two_sidecars_complete_a_step_together(local: Volume, archive_dir: Path) -> None:
    shards = write_step(local, 10)
    async with (
        running(config(archive_dir)) as tier,
        running(config(archive_dir)) as other,
    ):
        committed(tier, step_id(10), [shards[0]])
        await until(lambda: matching(archive_dir, "*/*/*.safetensors"))
        assert not await tier.drain(timeout_s=0.3)
        held = await other.scan()
        assert (held.answer, held.shards) == (TierAnswer.UNKNOWN, ())
        assert "in part only" in held.reason
        committed(other, step_id(10), [shards[1]])
        assert await tier.drain(timeout_s=60)
        assert await other.drain(timeout_s=60)
        assert (await tier.scan()).complete == {step_id(10)}


async def test_a_step_that_is_due_for_the_archive_is_not_retired_before_its_upload(
    local: Volume, archive_dir: Path
) -> None:
    remote_tier = ArchiveTier(config(archive_dir, every=10), DirectoryStore(archive_dir), run=RUN)
    for step in (10, 15, 20):
        commit(remote_tier, write_step(local, step))
    in_use = remote_tier.replicator.is_step_in_transfer
    assert [step for step in (10, 15, 20) if in_use(step_id(step))] == [10, 20]
    archive_dir.rmdir()
    work = asyncio.ensure_future(remote_tier.run())
    await until(lambda: remote_tier.status().trouble)
    await until(lambda: not in_use(step_id(10)) and not in_use(step_id(20)))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await remote_tier.close()


async def test_an_unreachable_archive_is_still_reported_after_its_backlog_is_empty(
    local: Volume, archive_dir: Path
) -> None:
    archive_dir.rmdir()
    async with running(config(archive_dir)) as remote_tier:
        commit(remote_tier, write_step(local, 10))
        await until(lambda: remote_tier.status().trouble)
        gone(remote_tier, [step_id(10)])
        failures = remote_tier.status().failures
        await until(lambda: remote_tier.status().failures > failures + 1)
        assert remote_tier.status().backlog == 0
        assert "mount it" in remote_tier.status().trouble
        archive_dir.mkdir()
        await until(lambda: not remote_tier.status().trouble)


async def test_a_successful_upload_clears_the_reported_archive_error_despite_a_backlog(
    local: Volume, archive_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses once; then, while one step is on its way, the next becomes committed."""
    coming = [write_step(local, step, world=1) for step in range(2, 8)]
    uploads, seen = 0, list[tuple[str, int]]()
    really = DirectoryStore.upload

    async def upload(store: DirectoryStore, *given: Any, **more: Any) -> None:
        nonlocal uploads
        uploads += 1
        if uploads == 1:
            raise StorageError("it refuses once")
        if coming:
            commit(remote_tier, coming.pop(0))
            seen.append((remote_tier.status().trouble, remote_tier.status().backlog))
        await really(store, *given, **more)

    monkeypatch.setattr(DirectoryStore, "upload", upload)
    async with running(config(archive_dir)) as remote_tier:
        await send(remote_tier, write_step(local, 1, world=1), within_s=20)
    assert seen == [("it refuses once", 2), *[("", 2)] * 5], "trouble, backlog"


@pytest.mark.parametrize("when", ["opened", "read"])
async def test_a_shard_that_cannot_be_read_from_its_drive_blocks_no_later_step(
    local: Volume, archive_dir: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    works, error = source.open_shard, OSError(errno.EIO, os.strerror(errno.EIO))

    class Dead(ShardFile):
        def read(self, into: memoryview, offset: int) -> int:
            raise error

    @contextlib.contextmanager
    def fail(path: Path, **more: Any) -> Any:
        with works(path, **more) as file:
            if str(step_id(10)) in str(path):
                if when == "opened":
                    raise error
                file = Dead(**vars(file))
            yield file

    monkeypatch.setattr(source, "open_shard", fail)
    async with running(config(archive_dir, every=10)) as remote_tier:
        commit(remote_tier, write_step(local, 10))
        await send(remote_tier, write_step(local, 20))
        assert (await remote_tier.scan()).complete == {step_id(20)}
        assert remote_tier.status().failures == 2, "one for each shard"


async def test_old_steps_are_deleted_record_first_and_the_newest_is_kept(
    local: Volume, archive_dir: Path
) -> None:
    policy = Retention(last=1, every_steps=100)

    pinned = {step_id(120)}
    async with running(
        config(archive_dir, retention=policy), facts=RunFacts(pinned=lambda: pinned)
    ) as remote_tier:
        for step in (100, 110, 120, 130):
            await send(remote_tier, write_step(local, step))
        left = {archived.step for archived in (await remote_tier.scan()).complete}
        assert left == {100, 120, 130}
    assert not (archive_dir / RUN / str(step_id(110))).exists()


async def test_no_step_is_deleted_until_the_pinned_steps_are_known(
    local: Volume, archive_dir: Path
) -> None:
    """A sidecar that has just started, while the operator is away."""
    pinned: set[StepId] | None = None

    settings = config(archive_dir, retention=Retention(last=1))
    async with running(settings, facts=RunFacts(pinned=lambda: pinned)) as remote_tier:
        for step, left in ((1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (4, {1, 4})):
            if step == 4:
                pinned = {step_id(1)}
            await send(remote_tier, write_step(local, step))
            assert {archived.step for archived in (await remote_tier.scan()).complete} == left


async def test_a_share_that_becomes_read_only_during_an_upload_raises_a_storage_error(
    archive_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither writing nor tidying works any more, and none of it is done on the event loop."""
    threads: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        threads.append(threading.current_thread().name)
        raise OSError(errno.EROFS, "Read-only file system")

    async def pieces() -> AsyncIterator[memoryview]:
        yield memoryview(b"x" * PAGE_BYTES)

    store = DirectoryStore(archive_dir)
    monkeypatch.setattr(Filesystem, "write", refuse)
    monkeypatch.setattr(OpenDirectory, "unlink", refuse)
    with pytest.raises(StorageError, match="Read-only"):
        await store.upload("run/step/shard", pieces(), part_bytes=PAGE_BYTES, parts=1)
    await store.close()
    assert len(threads) == 2
    assert threading.main_thread().name not in threads


def test_a_failed_upload_leaves_no_file_and_no_open_descriptor(
    archive_dir: Path,
) -> None:
    async def story() -> None:
        async def pieces() -> AsyncIterator[memoryview]:
            yield memoryview(b"x" * PAGE_BYTES)
            raise StorageError("the shard is gone")

        store = DirectoryStore(archive_dir)
        with pytest.raises(StorageError, match="gone"):
            await store.upload("run/step/shard", pieces(), part_bytes=PAGE_BYTES, parts=1)
        await store.close()

    before = os.listdir("/proc/self/fd")
    asyncio.run(story())
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert [path for path in archive_dir.rglob("*") if path.is_file()] == []


async def test_a_step_that_the_archive_has_retired_is_not_uploaded_again(
    local: Volume, archive_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep_sidecar.tiers.replicator.SCAN_AGAIN_S", 0.05)

    shards = [write_step(local, step) for step in (1, 2, 3)]
    for sent in (4, 0):  # by one that begins anew, too
        async with running(config(archive_dir, retention=Retention(last=1))) as remote_tier:
            for each in shards:
                commit(remote_tier, each)
            assert await remote_tier.drain(timeout_s=60)
            await until(lambda: len(files_below(archive_dir, "step.json")) == 1)
            listed = remote_tier._listed
            await until(lambda: remote_tier._listed is not listed)  # noqa: B023
            assert remote_tier.status().backlog == 0
            assert remote_tier.status().sent == sent
            assert {archived.step for archived in (await remote_tier.scan()).complete} == {3}


async def test_listing_does_not_descend_below_step_directories(
    local: Volume, archive_dir: Path
) -> None:
    async with running(config(archive_dir)) as remote_tier:
        await send(remote_tier, write_step(local, 10))
        step = archive_dir / RUN / str(step_id(10))
        (step / "a" / "b").mkdir(parents=True)
        (step / "a" / "file").touch()
        store = DirectoryStore(archive_dir)
        below = [entry.name for entry in await store.list_below("")]
        assert below == [entry.name for entry in await store.list_below(RUN)]
        assert below == [f"{RUN}/{step.name}/{name}" for name in sorted(os.listdir(step))[1:]]
        assert await store.list_below(f"{RUN}/{step.name}") == await store.list_below(RUN)
        assert (await remote_tier.scan()).complete == {step_id(10)}


def test_a_process_can_exit_while_an_archive_listing_hangs(archive_dir: Path) -> None:
    """As on a server that is away: here, the listing waits for ever in a pipe that nobody fills."""
    os.mkfifo(archive_dir / "pipe")
    code = """
import asyncio, sys
from pathlib import Path
from keepstep.directory import OpenDirectory
from keepstep_sidecar.tiers.archive.directory_store import DirectoryStore

root = Path(sys.argv[1])
OpenDirectory.names = lambda directory: (root / "pipe").read_text().split()

async def list_it():
    store = DirectoryStore(root)
    try:
        async with asyncio.timeout(0.2):
            await store.list_below("run")
    except TimeoutError:
        await store.close()
        print("given up")

(root / "run").mkdir()
asyncio.run(list_it())
"""
    words = [sys.executable, "-c", code, str(archive_dir)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "given up\n"), ended.stderr
