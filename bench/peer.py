"""Restores one lost rank from its buddy over loopback, beside a plain copy over the same TLS.

    python -m bench.peer [--mib 512] [--rounds 5] [--dir DIR] [--twin]

The floors are what two processes reach over plain TLS, with `sendall` from memory on one side and
`recv_into` on the other, over as many streams as keepstep uses. The receiver of a restore digests
each 8 MiB, in memory of the image's size. The receiver of a copy digests each 8 MiB, writes it with
O_DIRECT, and flushes at the end. keepstep also reads the sender's drive, and checks a copy before
it is sent. A third floor is one plain stream whose receiver does nothing with the bytes. Figures
are medians, and ratios are within a round. In odd rounds the floors come first.

`--twin` measures instead what a buddy does with a copy if its own shard has all chunks of it but
one. It reads these chunks there, and writes them or shares their blocks if the file system of DIR
can (XFS, btrfs). There is no link. The figures are seconds and CPU from the start of the copy until
it has its name, bytes written, and space taken.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.image.xxh3 import CHUNK_BYTES, xxh3_128
from keepstep.steps import shard_name
from keepstep.wire.reports import Peer
from keepstep_sidecar.config.peers import Files
from keepstep_sidecar.tiers.peer.copies import Copies
from keepstep_sidecar.tiers.peer.protocol import STREAMS
from keepstep_sidecar.tiers.peer.serve import Shards
from keepstep_sidecar.tiers.peer.tls import FileCredentials
from keepstep_sidecar.volume.direct_io import aligned_buffer
from keepstep_sidecar.volume.filesystem import Filesystem
from keepstep_sidecar.volume.paths import ShardName
from keepstep_sidecar.volume.volume import Volume
from keepstep_sidecar.volume.volume_set import VolumeSet
from tests.harness import until
from tests.peer.authority import Authority
from tests.peer.nodes import Node, running
from tests.tiers import reading
from tests.tiers.local import durable
from tests.volume.images import RUN, Slot, empty_slot, make_layout, staged

CHUNK = CHUNK_BYTES
PLAIN = "plain TLS, 1 stream(s)"
RESTORE, COPY = "restore from the buddy", "copy"
RESTORE_FLOOR = f"plain TLS, {STREAMS} streams, received and digested"
COPY_FLOOR = f"plain TLS, {STREAMS} streams, received, digested and written"


def _pour(listener: socket.socket, files: Files, size: int, streams: int) -> None:
    """Send `size` bytes over `streams` connections, each time that a receiver connects."""
    data = memoryview(mmap.mmap(-1, CHUNK))

    def one(plain: socket.socket) -> None:
        with FileCredentials(files).current().server.wrap_socket(plain, server_side=True) as tls:
            for _ in range(size // streams // CHUNK):
                tls.sendall(data)

    while True:
        threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()


Use = Callable[[int, memoryview], object]
"""What a receiver does with each chunk of `CHUNK` bytes; the number counts chunks."""


def _drink(address: Any, files: Files, views: list[memoryview], streams: int, use: Use) -> None:
    """Fill `views` over `streams` connections, and call `use` for each."""
    each = len(views) // streams

    def one(stream: int) -> None:
        plain = socket.create_connection(address)
        with FileCredentials(files).current().client.wrap_socket(plain) as tls:
            for number in range(stream * each, (stream + 1) * each):
                done = 0
                while done < CHUNK:
                    done += tls.recv_into(views[number][done:])
                use(number, views[number])

    threads = [threading.Thread(target=one, args=(stream,)) for stream in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def floor(files: Files, views: list[memoryview], streams: int, use: Use) -> float:
    """Seconds of the plain copy between two processes."""
    listener = socket.create_server(("127.0.0.1", 0))
    work = multiprocessing.get_context("fork").Process(
        target=_pour, args=(listener, files, len(views) * CHUNK, streams)
    )
    work.start()
    try:
        began = time.perf_counter()
        _drink(listener.getsockname(), files, views, streams, use)
        return time.perf_counter() - began
    finally:
        work.kill()
        work.join()
        listener.close()


def floors(files: Files, memory: memoryview, directory: Path) -> dict[str, float]:
    """Seconds of each floor, received into `memory`."""
    views = [memory[at : at + CHUNK] for at in range(0, len(memory) // CHUNK * CHUNK, CHUNK)]
    found = {
        PLAIN: floor(files, views, 1, lambda *_: None),
        RESTORE_FLOOR: floor(files, views, STREAMS, lambda _, view: xxh3_128(view)),
    }
    path = directory / "plain"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def write(number: int, view: memoryview) -> None:
        xxh3_128(view)
        os.pwrite(fd, view, number * CHUNK)

    try:
        os.posix_fallocate(fd, 0, len(memory))
        received = floor(files, views, STREAMS, write)
        began = time.perf_counter()
        os.fdatasync(fd)
        found[COPY_FLOOR] = received + time.perf_counter() - began
    finally:
        os.close(fd)
        path.unlink()
    return found


def _buddy(node: Node, files: Files) -> subprocess.Popen[str]:
    paths = [str(path) for path in (files.certificate, files.key, files.authorities)]
    drives = str(node.root.parents[1])
    command = [sys.executable, "-m", "tests.peer.receiver", drives, "1", *paths]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def ours(node: Node, view: memoryview, found: Any, files: Files) -> tuple[float, float]:
    """Seconds to send one copy to a buddy in another process, and to restore it from there."""
    buddy = _buddy(node, files)
    try:
        assert buddy.stdout is not None
        address = buddy.stdout.readline().strip()
        node.remote_tier.peers_are((Peer(node_rank=1, address=address, buddy=True),))
        began = time.perf_counter()
        durable(node.remote_tier, found)
        await until(lambda: node.remote_tier.status().sent, within_s=300)
        sent = time.perf_counter() - began
        remotes = (await node.remote_tier.look()).shards
        began = time.perf_counter()
        await reading.load(node.remote_tier, remotes[0], view)
        return sent, time.perf_counter() - began
    finally:
        buddy.kill()
        buddy.wait()
        buddy.stdout and buddy.stdout.close()


async def one_round(directory: Path, mib: int, *, ours_first: bool) -> dict[str, float]:
    """GB/s of each way in one round."""
    authority = Authority(directory / "certificates")
    node = Node(directory / "drives", 0, authority.files(0))
    files = authority.files(1)
    async with running(node):
        slot, found = node.write(5, rank=0, parameters=(mib << 20) // 8)
        view = empty_slot(slot.layout)
        view[:] = bytes(len(view))  # slots are populated ahead of time
        if not ours_first:
            plain = await asyncio.to_thread(floors, files, view, directory)
        sent, loaded = await ours(node, view, found, files)
        if ours_first:
            plain = await asyncio.to_thread(floors, files, view, directory)
    seconds = {**plain, RESTORE: loaded, COPY: sent}
    return {name: slot.layout.size_bytes / s / 1e9 for name, s in seconds.items()}


# --- a twin's copy ---------------------------------------------------------------------------


class Unshared(Filesystem):
    """A file system that cannot share blocks."""

    def clone(self, source: int, fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _twins(mib: int) -> tuple[Slot, Slot]:
    one, other = (staged(make_layout(rank=rank, parameters=(mib << 20) // 8), 1) for rank in (0, 1))
    begin, end = len(one.layout.header), one.layout.digests_begin
    other.view[begin:end] = one.view[begin:end]
    return one, other


def _written_bytes() -> int:
    """How many bytes this process has written to drives."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["write_bytes"])


def _keep_copy(copies: Copies, shards: Shards, sent: Path, slot: Slot) -> None:
    """Do all that the keeper of a copy does, except for TLS."""
    layout, name = slot.layout, ShardName(id=slot.id, rank=0, world=2)
    with sent.open("rb") as file, aligned_buffer(CHUNK) as first, memoryview(first) as data:
        file.readinto(data)
        file.seek(layout.digests_begin)
        manifest = memoryview(layout.header + file.read())
        part = copies.begin(name, shard_name(0, 2), manifest, whose="the bench")
        assert part is not None
        for other in shards.others(name):
            copies.take_from(part, other)
        assert part.missing == (0,)
        copies.write(part, 0, data, whose="the bench")
    copies.seal(part)


def twin(directory: Path, mib: int, filesystem: Filesystem) -> tuple[float, ...]:
    """(seconds, CPU seconds, MiB written, MiB of space taken) of one copy of a twin's shard."""
    one, other = _twins(mib)
    sender = Volume(directory / "sender" / RUN, run=RUN)
    sent = sender.write(one.view, one.layout, one.control).shard.path
    keeper = Volume(directory / "keeper" / RUN, run=RUN, filesystem=filesystem)
    keeper.write(other.view, other.layout, other.control)
    copies = Copies([keeper], run=RUN)
    shards = Shards(VolumeSet([keeper]), copies, run=RUN)
    os.sync()
    free, written = filesystem.free_bytes(directory), _written_bytes()
    began, cpu = time.perf_counter(), time.process_time()
    _keep_copy(copies, shards, sent, one)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    sizes = (_written_bytes() - written, free - filesystem.free_bytes(directory))
    for volume in (copies, keeper, sender):
        volume.close()
    return took, cpu, *(size / 2**20 for size in sizes)


def twins(options: argparse.Namespace) -> None:
    """Measure both ways in turns, and print medians."""
    found: dict[str, list[tuple[float, ...]]] = {"written": [], "shared": []}
    for _ in range(options.rounds):
        for way, filesystem in (("written", Unshared()), ("shared", Filesystem())):
            with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                found[way].append(twin(Path(directory), options.mib, filesystem))
    for way, rounds in found.items():
        took, cpu, written, space = map(statistics.median, zip(*rounds, strict=True))
        low, high = min(one[0] for one in rounds), max(one[0] for one in rounds)
        print(
            f"{way:8} {took:.2f} s [{low:.2f}, {high:.2f}], CPU {cpu:.3f} s,"
            f" {written:.0f} MiB written, {space:.0f} MiB of space"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--twin", action="store_true")
    options = parser.parse_args()
    if options.twin:
        twins(options)
        return
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            work = one_round(Path(directory), options.mib, ours_first=number % 2 == 0)
            rounds.append(asyncio.run(work))
    for name in rounds[0]:
        print(f"{name:58} {statistics.median(one[name] for one in rounds):6.2f} GB/s")
    for name, beside, bar in ((RESTORE, RESTORE_FLOOR, " (bar: 0.90)"), (COPY, COPY_FLOOR, "")):
        ratios = sorted(one[name] / one[beside] for one in rounds)
        print(
            f"{name} / its floor: {statistics.median(ratios):.2f}"
            f" [{ratios[0]:.2f}, {ratios[-1]:.2f}]{bar}"
        )


if __name__ == "__main__":
    main()
