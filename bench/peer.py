"""One lost rank from its buddy over loopback, beside a plain copy over the same TLS.

    python -m bench.peer [--mib 512] [--rounds 3] [--dir DIR]

The floor is what two processes reach that do nothing but `sendall` and `recv_into` over TLS: one
stream, and as many as we use. Ours also reads the buddy's drive, checks every digest, and fills a
slot. Sending a copy is measured, too. Medians; all in one run, rounds interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from keepstep.wire.reports import Peer
from keepstep_sidecar.config.peers import Files
from keepstep_sidecar.tiers.peer.tls import FileCredentials
from tests.harness import until
from tests.peer.authority import Authority
from tests.peer.nodes import Node, running
from tests.tiers import reading
from tests.tiers.local import durable
from tests.volume.images import empty_slot

CHUNK = 8 << 20
STREAMS = 2


def _pour(listener: socket.socket, files: Files, size: int, streams: int) -> None:
    """Send `size` bytes over `streams` connections, as often as somebody connects."""
    data = memoryview(mmap.mmap(-1, CHUNK))

    def one(plain: socket.socket) -> None:
        with FileCredentials(files).current().server.wrap_socket(plain, server_side=True) as tls:
            for _ in range(size // streams // CHUNK):
                tls.sendall(data)

    while True:
        threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()


def _drink(address: Any, files: Files, size: int, streams: int) -> float:
    """Seconds to receive `size` bytes over `streams` connections."""

    def one() -> None:
        into = memoryview(mmap.mmap(-1, CHUNK))
        plain = socket.create_connection(address)
        with FileCredentials(files).current().client.wrap_socket(plain) as tls:
            for _ in range(size // streams // CHUNK):
                done = 0
                while done < CHUNK:
                    done += tls.recv_into(into[done:])

    threads = [threading.Thread(target=one) for _ in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def floor(files: Files, size: int, streams: int) -> float:
    """Seconds of the plain copy between two processes."""
    listener = socket.create_server(("127.0.0.1", 0))
    work = multiprocessing.get_context("fork").Process(
        target=_pour, args=(listener, files, size, streams)
    )
    work.start()
    try:
        return _drink(listener.getsockname(), files, size, streams)
    finally:
        work.kill()
        work.join()
        listener.close()


def _buddy(node: Node, files: Files) -> subprocess.Popen[str]:
    paths = [str(path) for path in (files.certificate, files.key, files.authorities)]
    drives = str(node.root.parents[1])
    command = [sys.executable, "-m", "tests.peer.receiver", drives, "1", *paths]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def ours(node: Node, slot: Any, found: Any, files: Files) -> tuple[float, float]:
    """Seconds to send one copy to a buddy in a process of its own, and to restore it."""
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
        view = empty_slot(slot.layout)
        view[:] = bytes(len(view))  # slots are populated ahead of time
        began = time.perf_counter()
        await reading.load(node.remote_tier, remotes[0], view)
        return sent, time.perf_counter() - began
    finally:
        buddy.kill()
        buddy.wait()
        buddy.stdout and buddy.stdout.close()


async def one_round(directory: Path, mib: int) -> dict[str, float]:
    """GB/s of each way, in one round."""
    authority = Authority(directory / "certificates")
    node = Node(directory / "drives", 0, authority.files(0))
    async with running(node):
        slot, found = node.write(5, rank=0, parameters=(mib << 20) // 8)
        size = slot.layout.size_bytes
        sent, loaded = await ours(node, slot, found, authority.files(1))
        files = authority.files(1)
        plain = {n: await asyncio.to_thread(floor, files, mib << 20, n) for n in (1, STREAMS)}
    rates = {f"plain TLS, {n} stream(s)": (mib << 20) / s / 1e9 for n, s in plain.items()}
    return {**rates, "restore from the buddy": size / loaded / 1e9, "copy": size / sent / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            rounds.append(asyncio.run(one_round(Path(directory), options.mib)))
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    for name, rate in medians.items():
        print(f"{name:28} {rate:6.2f} GB/s")
    ratio = medians["restore from the buddy"] / medians["plain TLS, 1 stream(s)"]
    print(f"restore / plain TLS of one stream: {ratio:.2f} (bar: 0.80)")


if __name__ == "__main__":
    main()
