"""The parts of a write: CPU seconds per GB of the digest alone, and of O_DIRECT alone.

    python -m bench.parts [--mib 1024] [--directory DIR]

Both run over the same memory in the chunks of a writer, separately and in turns. The figures are
medians.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

CHUNK_BYTES = 8 << 20
_ROUNDS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=1024, help="memory to go over, in MiB")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="where to write")
    options = parser.parse_args()
    size = options.mib << 20
    options.directory.mkdir(parents=True, exist_ok=True)
    with mmap.mmap(-1, size) as memory, tempfile.NamedTemporaryFile(dir=options.directory) as file:
        _fill(memory)
        fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
        with memoryview(memory) as view:
            parts: dict[str, Callable[[memoryview, int], object]] = {
                "digest (xxh3_128)": lambda chunk, _: xxhash.xxh3_128_digest(chunk),
                "O_DIRECT write": lambda chunk, at: os.pwritev(fd, [chunk], at),
            }
            spent: dict[str, list[float]] = {name: [] for name in parts}
            for _ in range(_ROUNDS):
                for name, part in parts.items():
                    spent[name].append(_cpu_s(part, view) * 1e9 / size)
        os.close(fd)
    for name, found in spent.items():
        print(f"{name}: {statistics.median(found):.3f} s of CPU per GB (median of {_ROUNDS})")


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
