"""Uploads to a local S3 gateway: keepstep's tier beside plain `obstore.put` of the same bytes.

    python -m bench.archive [--mib 512] [--rounds 5]

The figures are medians of interleaved rounds, for one shard of one rank. `versitygw` must be
installed. The gateway shares the cores and the drive with the uploader, so the absolute figures are
those of the gateway. The bar is the ratio: at least 0.9. RSS is that of this process during an
upload; it must not grow with the size of the upload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import obstore
import psutil
from obstore.store import S3Store

from keepstep_sidecar.config.archive import ArchiveConfig
from keepstep_sidecar.tiers.archive.store import open_store
from keepstep_sidecar.tiers.archive.tier import ArchiveTier
from keepstep_sidecar.volume.scan import LocalShard
from keepstep_sidecar.volume.volume import Volume
from tests.archive.gateway import ACCESS, SECRET, Gateway
from tests.tiers.local import committed
from tests.volume.images import RUN, make_layout, staged

BAR = 0.9
_PART_BYTES = 8 << 20
_PARTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where the drive is")
    asked = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS, AWS_SECRET_ACCESS_KEY=SECRET)
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-", dir=asked.dir))
    gateway = Gateway(home / "buckets", home / "log").start()
    try:
        print(json.dumps(measure(gateway, home, mib=asked.mib, rounds=asked.rounds), indent=1))
    finally:
        gateway.stop()
        shutil.rmtree(home)


def measure(gateway: Gateway, home: Path, *, mib: int, rounds: int) -> dict[str, Any]:
    """Upload in both ways, in turns. Returns their figures."""
    volume = Volume(home / "local" / RUN, run=RUN)
    layout = make_layout(world=1, parameters=mib << 17)
    slot = staged(layout, 1)
    volume.write(slot.view, slot.layout, slot.control)
    (found,) = volume.scan().shards
    slot.view.release()
    figures: dict[str, list[dict[str, float]]] = {"ours": [], "obstore": []}
    for _ in range(rounds + 1):
        for name, upload in (("ours", ours), ("obstore", plain)):
            bucket = f"b-{secrets.token_hex(4)}"
            directory = gateway.bucket(bucket)
            figures[name].append(asyncio.run(_observed(upload(gateway, bucket, found))))
            shutil.rmtree(directory)
            os.sync()
    volume.close()
    return _summary(figures, layout.size_bytes)


def _summary(figures: dict[str, list[dict[str, float]]], size_bytes: int) -> dict[str, Any]:
    """The figures without the first round of each way, in which threads and caches are cold."""
    speed = {
        name: statistics.median(size_bytes / one["seconds"] / 1e6 for one in rounds[1:])
        for name, rounds in figures.items()
    }
    return {
        "bytes": size_bytes,
        "MB/s": {name: round(one) for name, one in speed.items()},
        "ratio": round(speed["ours"] / speed["obstore"], 3),
        "bar": BAR,
        "rss growth MiB": {
            name: round(max(one["grown"] for one in rounds[1:]) / (1 << 20), 1)
            for name, rounds in figures.items()
        },
        "cpu seconds": {
            name: round(statistics.median(one["cpu"] for one in rounds[1:]), 2)
            for name, rounds in figures.items()
        },
        "seconds": {name: [round(one["seconds"], 3) for one in r] for name, r in figures.items()},
    }


async def ours(gateway: Gateway, bucket: str, found: LocalShard) -> None:
    """Upload as a sidecar does: check before, compute digests, read back, and write the record."""
    config = ArchiveConfig(
        url=f"s3://{bucket}/runs", every=1, endpoint=gateway.endpoint, region="us-east-1"
    )
    remote_tier = ArchiveTier(config, open_store(config), run=RUN)
    work = asyncio.ensure_future(remote_tier.run())
    committed(remote_tier, found.step_id, [found])
    if not await remote_tier.drain(timeout_s=300):
        raise RuntimeError(remote_tier.status().trouble)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await remote_tier.close()


async def plain(gateway: Gateway, bucket: str, found: LocalShard) -> None:
    """Upload the same bytes from a mapping, in parts of the same size and number."""
    store = S3Store(
        bucket,
        endpoint=gateway.endpoint,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "120s"},
    )
    with found.path.open("rb") as file:
        # drop the pages that the last round left in the cache: keepstep reads from the drive, too
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        await obstore.put_async(
            store,
            f"runs/{RUN}/{found.step_id}/{found.path.name}",
            memoryview(mapping),
            chunk_size=_PART_BYTES,
            max_concurrency=_PARTS,
        )


async def _observed(work: Any) -> dict[str, float]:
    """Seconds of `work`, and the growth of RSS in bytes and the CPU seconds of this process."""
    process, ended = psutil.Process(), threading.Event()
    before, peak = process.memory_info().rss, 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.monotonic(), time.process_time()
    await work
    figures = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    ended.set()
    watcher.join()
    return {**figures, "grown": float(max(0, peak - before))}


if __name__ == "__main__":
    main()
