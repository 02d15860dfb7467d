"""The parts of a write: CPU seconds per GB of the digest alone, and of O_DIRECT alone; and seconds
of both together, by the number of chunks under way at a time.

    python -m bench.parts [--mib 1024] [--threads 4 16 32] [--directory DIR] [--pages huge]

All run over the same memory in the chunks of a writer, in turns. The figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from bench import hugepages
from keepstep_sidecar.concurrency import for_each_chunk
from keepstep_sidecar.volume.direct_io import hashing

CHUNK_BYTES = 8 << 20
_ROUNDS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=1024, help="memory to go over, in MiB")
    parser.add_argument("--threads", type=int, nargs="*", default=[4, 16], help="chunks at a time")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="where to write")
    parser.add_argument("--pages", choices=["small", "huge"], default="small")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    size = options.mib << 20
    huge = hugepages.reserved(size, options.directory)
    with huge if options.pages == "huge" else contextlib.nullcontext():
        measure(options.directory, size, options.threads)


def measure(directory: Path, size: int, threads: Sequence[int]) -> None:
    """Print the figures of `size` bytes that are written below `directory`."""
    memory = hugepages.memory(size) or mmap.mmap(-1, size)
    with memory, tempfile.NamedTemporaryFile(dir=directory) as file:
        _fill(memory)
        fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
        with memoryview(memory) as view:
            parts: dict[str, Callable[[memoryview, int], object]] = {
                "digest (xxh3_128)": lambda chunk, _: xxhash.xxh3_128_digest(chunk),
                "O_DIRECT write": lambda chunk, at: os.pwritev(fd, [chunk], at),
            }
            spent: dict[str, list[float]] = {name: [] for name in parts}
            took: dict[int, list[float]] = {count: [] for count in threads}
            for _ in range(_ROUNDS):
                for name, part in parts.items():
                    spent[name].append(_cpu_s(part, view) * 1e9 / size)
                for count, seconds in took.items():
                    seconds.append(_written_s(fd, view, threads=count))
        os.close(fd)
    for name, found in spent.items():
        print(f"{name}: {statistics.median(found):.3f} s of CPU per GB (median of {_ROUNDS})")
    for count, seconds in took.items():
        print(f"both, {count} chunks at a time: {statistics.median(seconds):.3f} s")


def _written_s(fd: int, view: memoryview, *, threads: int) -> float:
    """Seconds until all of it is hashed, written and flushed, as a writer does it."""
    turn = hashing()

    def write(index: int) -> None:
        with view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] as chunk:
            with turn:
                xxhash.xxh3_128_digest(chunk)
            os.pwritev(fd, [chunk], index * CHUNK_BYTES)

    begun = time.perf_counter()
    for_each_chunk(write, -(-len(view) // CHUNK_BYTES), threads=threads)
    os.fdatasync(fd)
    return time.perf_counter() - begun


def _fill(memory: mmap.mmap) -> None:
    noise = os.urandom(CHUNK_BYTES)
    for at in range(0, len(memory), CHUNK_BYTES):
        memory[at : at + CHUNK_BYTES] = noise


def _cpu_s(part: Callable[[memoryview, int], object], view: memoryview) -> float:
    """CPU seconds of this thread for `part` over the whole memory."""
    begun = time.thread_time()
    for at in range(0, len(view), CHUNK_BYTES):
        with view[at : at + CHUNK_BYTES] as chunk:
            part(chunk, at)
    return time.thread_time() - begun


if __name__ == "__main__":
    main()
