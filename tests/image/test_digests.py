"""The digest of chunks."""

from __future__ import annotations

import sys
import threading

import xxhash

from keepstep.image import xxh3


def test_any_contiguous_buffer_is_digested_as_bytes() -> None:
    data = bytes(range(256)) * 2
    expected = xxhash.xxh3_128_digest(data)
    for buffer in (data, bytearray(data), memoryview(data), memoryview(data).cast("I")):
        assert xxh3.xxh3_128(buffer) == expected


def test_other_threads_run_while_a_chunk_is_digested() -> None:
    data = memoryview(bytearray(256 << 20))
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.0002):
            ticks += 1

    ticker = threading.Thread(target=tick, name="ticker")
    interval = sys.getswitchinterval()
    # Nobody takes the GIL away by force: the ticker moves only if the digest gives it up.
    sys.setswitchinterval(60)
    ticker.start()
    try:
        before = ticks
        xxh3.xxh3_128(data)
        assert ticks > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        ticker.join()
