"""Whether another run of the same name trains, as an archive tells: what is renewed there."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from keepstep.steps import Epoch, EpochId, TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive import heartbeats
from keepstep_sidecar.tiers.archive.heartbeats import RunHeartbeats
from keepstep_sidecar.tiers.archive.index import Surveyor
from keepstep_sidecar.tiers.archive.store import Store, open_store
from keepstep_sidecar.tiers.remote_tier import RunFacts
from tests.archive.conftest import Bucket, running
from tests.harness import until

OLD, OTHER = Epoch(EpochId(1, "00000001")), Epoch(EpochId(2, "00000002"))
RUN = "gpt"


def trained(config: ArchiveConfig, check: Callable[[Store], Awaitable[None]]) -> None:
    """Let a life of epoch `OTHER` begin there, check, and end it."""

    async def work() -> None:
        store, life = open_store(config), [OTHER]
        line = RunHeartbeats(store, RUN)
        keeping = asyncio.ensure_future(line.keep(lambda: next(iter(life), None), tuple))
        surveyor = Surveyor(store, RUN)
        try:

            async def there() -> bool:
                return bool((await surveyor.survey()).lives)

            await until(there)
            await check(store)
            life.clear()

            async def gone() -> bool:
                return not await there()

            await until(gone, within_s=10)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await store.close()

    asyncio.run(work())


def test_a_start_is_refused_when_another_process_renews_its_heartbeat_during_the_wait(
    archive_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "WATCH_S", 0.5)
    config = ArchiveConfig(url=str(archive_dir))

    async def check(store: Store) -> None:
        async with running(config, run=RUN, epochs=(OLD,)) as start:
            begun = time.monotonic()
            found = await start.scan()
            assert found.answer is TierAnswer.UNKNOWN
            assert (
                f"trains on {os.uname().nodename} in epoch {OTHER.id}"
                in start.name_conflict_message
            )
            assert start.status().trouble == found.reason == start.name_conflict_message

            async def clear() -> bool:
                await start.scan()
                return not start.name_conflict_message

            await until(clear)
            assert time.monotonic() - begun >= 0.4
            monkeypatch.setattr(heartbeats, "RENEW_S", 0.0)

            async def renewed() -> bool:
                await start.scan()
                return bool(start.name_conflict_message)

            await until(renewed, within_s=10)

    trained(config, check)


def test_a_start_with_a_known_epoch_or_an_operator_does_not_wait_for_a_heartbeat(
    archive_dir: Path,
) -> None:
    config = ArchiveConfig(url=str(archive_dir))

    async def check(store: Store) -> None:
        for epochs, facts in (
            ((OLD, OTHER), RunFacts()),
            ((OLD,), RunFacts(operated=True)),
            ((OLD,), RunFacts(leads=False)),
            ((OLD,), RunFacts(life=lambda: OLD)),
            ((OLD,), RunFacts(strangers=lambda epochs: frozenset({OTHER.id}))),
        ):
            async with running(config, run=RUN, epochs=epochs, facts=facts) as start:
                assert (await start.scan()).answer is TierAnswer.NONE
                assert start.name_conflict_message == ""

    trained(config, check)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 4000, b"[]", b"{}", b'{"host": 1}', b'{"host": "\\u001b[2J"}'],
)
def test_untrusted_heartbeat_content_is_not_shown_in_messages(
    archive_dir: Path, content: bytes
) -> None:
    written(archive_dir, content)
    assert f"'gpt' trains in epoch {OTHER.id}, and" in contested(archive_dir)


def test_old_heartbeats_and_files_with_other_names_are_ignored(archive_dir: Path) -> None:
    path = written(archive_dir, json.dumps({"host": "b"}).encode())
    (path.parent / "notes.txt").touch()
    assert "trains on b in" in contested(archive_dir)
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    assert contested(archive_dir) == ""


def written(archive_dir: Path, content: bytes) -> Path:
    path = archive_dir / RUN / "lives" / f"{OTHER.id}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def contested(archive_dir: Path) -> str:
    async def check() -> str:
        async with running(ArchiveConfig(url=str(archive_dir)), run=RUN, epochs=(OLD,)) as start:
            await start.scan()
            return start.name_conflict_message

    return asyncio.run(check())


def test_a_renewed_heartbeat_is_detected_in_a_bucket(bucket: Bucket) -> None:
    async def check(store: Store) -> None:
        first = (await Surveyor(store, RUN).survey()).lives
        await store.replace(f"{RUN}/lives/{OTHER.id}.json", b"{}")
        assert (await Surveyor(store, RUN).survey()).lives != first

    trained(bucket.config(), check)
