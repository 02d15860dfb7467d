"""An archive in a real S3 gateway, and what happens when the network or the store misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from keepstep.errors import StorageError
from keepstep.image import PAGE_BYTES
from keepstep.steps import TierAnswer
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers.archive.store import open_store
from keepstep_sidecar.volume.volume import Volume
from tests.archive.conftest import Bucket, commit, running, send, write_step
from tests.archive.gateway import free_port
from tests.harness import until
from tests.tiers import reading
from tests.volume.images import RUN, empty_slot, step_id

SEVERAL_PARTS = 3 << 20  # parameters: 24 MiB an image


def in_bucket(bucket: Bucket, step: int) -> Path:
    return bucket.directory / "runs" / RUN / str(step_id(step))


async def test_the_last_pod_that_shuts_down_writes_the_step_record(
    local: Volume, bucket: Bucket
) -> None:
    shards = write_step(local, 10)
    async with running(bucket.config()) as first:
        commit(first, {0: shards[0]})
        assert await first.drain(timeout_s=30, whole=False)
    bucket.proxy.faults.delay_s = 0.2  # it takes a while to see that all is there
    async with running(bucket.config()) as last:
        commit(last, {1: shards[1]})
        assert await last.drain(timeout_s=30, whole=False)
        assert (in_bucket(bucket, 10) / "step.json").is_file()


async def test_uploads_are_retried_until_a_throttling_store_accepts_the_step(
    local: Volume, bucket: Bucket
) -> None:
    faults = bucket.proxy.faults
    faults.answer, faults.to = 503, "^(PUT|POST)"
    async with running(bucket.config()) as remote_tier:
        commit(remote_tier, write_step(local, 10))
        await until(lambda: remote_tier.status().trouble)
        trouble = remote_tier.status().trouble
        assert "SlowDown" in trouble or "503" in trouble
        faults.answer = None
        assert await remote_tier.drain(timeout_s=20)
        assert remote_tier.status().trouble == ""
        assert (await remote_tier.scan()).complete == {step_id(10)}
    assert faults.broken > 3


async def test_connections_that_break_in_the_middle_of_a_part_only_delay_it(
    local: Volume, bucket: Bucket
) -> None:
    faults = bucket.proxy.faults
    faults.drop_after = 1 << 20
    async with running(bucket.config()) as remote_tier:
        shards = write_step(local, 10, parameters=SEVERAL_PARTS)
        commit(remote_tier, shards)
        await until(lambda: faults.broken >= 3)
        faults.drop_after = None
        assert await remote_tier.drain(timeout_s=30)
        remote = (await remote_tier.scan()).shards[0]
        slot = empty_slot((await reading.manifest(remote_tier, remote)).layout)
        await reading.load(remote_tier, remote, slot)
        assert bytes(slot) == shards[0].path.read_bytes()


async def test_pod_shutdown_does_not_wait_for_a_store_that_rejects_requests(
    local: Volume, bucket: Bucket
) -> None:
    bucket.proxy.faults.answer = 503
    async with running(bucket.config()) as remote_tier:
        commit(remote_tier, write_step(local, 10))
        assert not await remote_tier.drain(timeout_s=60, whole=False)
        assert remote_tier.status().trouble


def test_an_unreachable_store_is_reported_with_an_identical_message_each_time(
    local: Volume, bucket: Bucket
) -> None:
    """Else each attempt of a long outage would be news: a line in the log, a report."""

    async def scenario() -> set[str]:
        reasons: set[str] = set()
        unreachable = replace(bucket.config(), endpoint=f"http://127.0.0.1:{free_port()}")
        async with running(unreachable) as remote_tier:
            commit(remote_tier, write_step(local, 10))
            for failures in (1, 2):
                await until(lambda n=failures: remote_tier.status().failures >= n)
                reasons.add(remote_tier.status().trouble)
        return reasons

    (trouble,) = asyncio.run(scenario())
    assert "error sending request" in trouble
    assert "retries" not in trouble


async def test_an_upload_whose_digests_read_back_differently_is_not_recorded_as_complete(
    local: Volume, bucket: Bucket
) -> None:
    async with running(bucket.config()) as remote_tier:
        bucket.proxy.faults.flip = PAGE_BYTES + 10  # in the tail that is read back
        commit(remote_tier, write_step(local, 10))
        await until(lambda: "other bytes than it was sent" in remote_tier.status().trouble)
        assert (await remote_tier.scan()).complete == frozenset()
        bucket.proxy.faults.flip = None
        assert await remote_tier.drain(timeout_s=20)


async def test_a_shard_with_a_missing_part_is_reported_and_not_offered(
    local: Volume, bucket: Bucket
) -> None:
    async with running(bucket.config()) as remote_tier:
        await send(remote_tier, write_step(local, 10, parameters=SEVERAL_PARTS), within_s=30)
        damaged = in_bucket(bucket, 10) / "rank-00001-of-00002.safetensors"
        os.truncate(damaged, damaged.stat().st_size - (8 << 20))
        held = await remote_tier.scan()
        assert (held.answer, held.shards) == (TierAnswer.UNKNOWN, ())
        assert "rank-00001-of-00002.safetensors has" in held.reason


async def test_a_shard_that_arrived_damaged_is_sent_again(local: Volume, bucket: Bucket) -> None:
    shards = write_step(local, 10, parameters=SEVERAL_PARTS)
    place = in_bucket(bucket, 10) / "rank-00001-of-00002.safetensors"
    place.parent.mkdir(parents=True)
    place.write_bytes(shards[1].path.read_bytes()[: 8 << 20])
    async with running(bucket.config()) as remote_tier:
        await send(remote_tier, shards, within_s=30)
    assert place.read_bytes() == shards[1].path.read_bytes()


def test_errors_for_wrong_credentials_and_missing_buckets_name_the_fix(
    local: Volume, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reason(config: ArchiveConfig) -> str:
        async with running(config) as remote_tier:
            commit(remote_tier, write_step(local, 10))
            held = await remote_tier.scan()
            assert not await remote_tier.drain(timeout_s=0.5)
            assert remote_tier.status().trouble
            assert held.answer is TierAnswer.UNKNOWN
            return held.reason

    absent = ArchiveConfig(
        url="s3://no-such-bucket/runs", every=1, endpoint=bucket.gateway.endpoint
    )
    assert "create the bucket" in asyncio.run(reason(absent))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    message = asyncio.run(reason(bucket.config()))
    assert "check the credentials" in message
    assert "wrong" not in message


async def test_a_pooled_connection_is_not_reused_after_its_address_changed(bucket: Bucket) -> None:
    """A service may move, and whoever was there before may go on answering."""
    moved, writers, copies = False, list[asyncio.StreamWriter](), set[asyncio.Task[None]]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if moved:
            port = urlsplit(bucket.gateway.endpoint).port
            answers, there = await asyncio.open_connection("127.0.0.1", port)
            writers.append(there)
            copies.add(asyncio.ensure_future(copy(answers, writer)))
            return await copy(reader, there)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = open_store(replace(bucket.config(), endpoint=f"http://127.0.0.1:{port}"))
    with pytest.raises(StorageError, match="404"):
        await store.list_below("")
    moved = True
    assert await store.list_below("") == []
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await asyncio.gather(*copies)
