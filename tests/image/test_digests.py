"""The pure digest is the fast one, byte for byte."""

from __future__ import annotations

import random
import sys
import threading

import pytest
import xxhash

from keepstep.image import xxh3


@pytest.mark.parametrize(
    "size", [*range(241, 420), 1023, 1024, 1025, 1088, 2048, 4064, 4096, 65_537]
)
def test_the_pure_digest_equals_that_of_xxhash(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert xxh3.pure_xxh3_128(data) == xxhash.xxh3_128_digest(data)


def test_the_pure_digest_refuses_what_is_too_short_for_it() -> None:
    for size in (0, 1, 16, 240):
        with pytest.raises(ValueError, match=f"{size} bytes are too few"):
            xxh3.pure_xxh3_128(bytes(size))


def test_any_contiguous_buffer_is_digested_as_bytes() -> None:
    data = bytes(range(256)) * 2
    wanted = xxhash.xxh3_128_digest(data)
    for buffer in (data, bytearray(data), memoryview(data), memoryview(data).cast("I")):
        assert xxh3.xxh3_128(buffer) == wanted
        assert xxh3.pure_xxh3_128(buffer) == wanted


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
