"""xxh3_128, the only digest of keepstep: of chunks, of headers (layout ids), of seals.

It finds broken bytes; it is no defence against somebody who forges them. With `xxhash` installed it
runs at memory speed and releases the GIL. The training image may not have it, and needs none: the
trainer digests only a header and a control page, for which the pure Python below is quick enough
(some megabytes a second). Chunks are digested by the sidecar, which always has `xxhash`.

Algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, seed 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

try:
    from xxhash import xxh3_128_digest as _fast
except ImportError:  # the training image has torch and the standard library only
    _fast = None  # type: ignore[assignment]

HAVE_FAST = _fast is not None

CHUNK_BYTES = 8 << 20
"""What one entry of an image's digest table covers, and what one write moves."""

DIGEST_BYTES = 16

Buffer = bytes | bytearray | memoryview


def xxh3_128(data: Buffer) -> bytes:
    """16 bytes, canonical (big endian). `data`: any contiguous buffer, read as bytes."""
    return _fast(data) if _fast is not None else pure_xxh3_128(data)


def pure_xxh3_128(data: Buffer) -> bytes:
    """The same without `xxhash`, for small inputs."""
    view = memoryview(data).cast("B")
    if len(view) <= 16:
        low, high = _up_to_16(view)
    elif len(view) <= 240:
        low, high = _up_to_240(view)
    else:
        low, high = _long(view)
    return struct.pack(">QQ", high, low)


_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MX1, _MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u32(data: Buffer, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: Buffer, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _swap(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * _MX1 & _M64
    return h ^ h >> 32


def _avalanche64(h: int) -> int:
    h ^= h >> 33
    h = h * _P64_2 & _M64
    h ^= h >> 29
    h = h * _P64_3 & _M64
    return h ^ h >> 32


def _up_to_16(data: memoryview) -> tuple[int, int]:
    size = len(data)
    if size > 8:
        return _9_to_16(data)
    if size >= 4:
        return _4_to_8(data)
    if size == 0:
        return (
            _avalanche64(_u64(_SECRET, 64) ^ _u64(_SECRET, 72)),
            _avalanche64(_u64(_SECRET, 80) ^ _u64(_SECRET, 88)),
        )
    low = data[0] << 16 | data[size >> 1] << 24 | data[size - 1] | size << 8
    swapped = _swap(low, 4)
    high = (swapped << 13 | swapped >> 19) & _M32
    return (
        _avalanche64(low ^ _u32(_SECRET, 0) ^ _u32(_SECRET, 4)),
        _avalanche64(high ^ _u32(_SECRET, 8) ^ _u32(_SECRET, 12)),
    )


def _4_to_8(data: memoryview) -> tuple[int, int]:
    size = len(data)
    keyed = _u32(data, 0) | _u32(data, size - 4) << 32
    keyed ^= _u64(_SECRET, 16) ^ _u64(_SECRET, 24)
    product = keyed * (_P64_1 + (size << 2))
    low, high = product & _M64, product >> 64
    high = high + (low << 1) & _M64
    low ^= high >> 3
    low = (low ^ low >> 35) * _MX2 & _M64
    return low ^ low >> 28, _avalanche(high)


def _9_to_16(data: memoryview) -> tuple[int, int]:
    size = len(data)
    first, last = _u64(data, 0), _u64(data, size - 8)
    product = (first ^ last ^ _u64(_SECRET, 32) ^ _u64(_SECRET, 40)) * _P64_1
    low, high = (product & _M64) + ((size - 1) << 54) & _M64, product >> 64
    last ^= _u64(_SECRET, 48) ^ _u64(_SECRET, 56)
    high = high + last + (last & _M32) * (_P32_2 - 1) & _M64
    low ^= _swap(high, 8)
    product = low * _P64_2
    high = (product >> 64) + high * _P64_2 & _M64
    return _avalanche(product & _M64), _avalanche(high)


def _up_to_240(data: memoryview) -> tuple[int, int]:
    size = len(data)
    accs = (size * _P64_1 & _M64, 0)
    if size <= 128:
        for i in reversed(range((size - 1) // 32 + 1)):
            accs = _mix_32(accs, data, 16 * i, size - 16 * (i + 1), 32 * i)
    else:
        for at in range(0, 128, 32):
            accs = _mix_32(accs, data, at, at + 16, at)
        accs = (_avalanche(accs[0]), _avalanche(accs[1]))
        for at in range(128, size - 31, 32):
            accs = _mix_32(accs, data, at, at + 16, 3 + at - 128)
        accs = _mix_32(accs, data, size - 16, size - 32, 103)
    low, high = accs
    mixed = low * _P64_1 + high * _P64_4 + size * _P64_2 & _M64
    return _avalanche(low + high & _M64), -_avalanche(mixed) & _M64


def _mix_32(
    accs: tuple[int, int], data: memoryview, one: int, two: int, secret: int
) -> tuple[int, int]:
    low, high = accs
    low = low + _mix_16(data, one, secret) & _M64
    low ^= _u64(data, two) + _u64(data, two + 8) & _M64
    high = high + _mix_16(data, two, secret + 16) & _M64
    high ^= _u64(data, one) + _u64(data, one + 8) & _M64
    return low, high


def _mix_16(data: memoryview, at: int, secret: int) -> int:
    return _fold(
        _u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8)
    )


_STRIPE = struct.Struct("<8Q")
_STRIPES_PER_BLOCK = 16
_KEYS = [_STRIPE.unpack_from(_SECRET, 8 * i) for i in range(_STRIPES_PER_BLOCK)]
_SCRAMBLE_KEY = _STRIPE.unpack_from(_SECRET, 128)
_LAST_KEY = _STRIPE.unpack_from(_SECRET, 121)


def _long(data: memoryview) -> tuple[int, int]:
    size = len(data)
    accs = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    for stripe in range((size - 1) // 64):
        place = stripe % _STRIPES_PER_BLOCK
        _accumulate(accs, _STRIPE.unpack_from(data, 64 * stripe), _KEYS[place])
        if place == _STRIPES_PER_BLOCK - 1:
            _scramble(accs)
    _accumulate(accs, _STRIPE.unpack_from(data, size - 64), _LAST_KEY)
    low = _merge(accs, 11, size * _P64_1 & _M64)
    return low, _merge(accs, 117, ~(size * _P64_2) & _M64)


def _accumulate(accs: list[int], lanes: Sequence[int], keys: Sequence[int]) -> None:
    for i in range(8):
        lane = lanes[i]
        key = lane ^ keys[i]
        accs[i] = accs[i] + (key & _M32) * (key >> 32) & _M64
        accs[i ^ 1] = accs[i ^ 1] + lane & _M64


def _scramble(accs: list[int]) -> None:
    for i, acc in enumerate(accs):
        accs[i] = (acc ^ acc >> 47 ^ _SCRAMBLE_KEY[i]) * _P32_1 & _M64


def _merge(accs: list[int], secret: int, start: int) -> int:
    folds = (
        _fold(
            accs[i] ^ _u64(_SECRET, secret + 8 * i), accs[i + 1] ^ _u64(_SECRET, secret + 8 * i + 8)
        )
        for i in (0, 2, 4, 6)
    )
    return _avalanche(start + sum(folds) & _M64)
