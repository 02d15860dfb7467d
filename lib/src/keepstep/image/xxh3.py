"""xxh3_128, the only digest of keepstep: of chunks, of headers (layout ids), of seals.

The digest finds damaged bytes. It does not protect against forged bytes. With `xxhash` installed it
runs at memory speed and releases the GIL. The training container may lack `xxhash` and does not
need it: the trainer digests only a header and a control page, for which the pure Python below is
fast enough (some megabytes a second). The sidecar, which always has `xxhash`, digests chunks and
the few bytes of a section's digest. So the variants for short inputs are left out here.

Algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, seed 0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

CHUNK_BYTES = 8 << 20
"""Bytes that one entry of an image's digest table covers, and that one write moves."""

DIGEST_BYTES = 16

LEAST_BYTES = 241
"""Everything that a trainer digests has at least this many bytes."""

Buffer = bytes | bytearray | memoryview


def pure_xxh3_128(data: Buffer) -> bytes:
    """`xxh3_128` without `xxhash`. Raises ValueError for fewer than `LEAST_BYTES`."""
    view = memoryview(data).cast("B")
    if len(view) < LEAST_BYTES:
        raise ValueError(f"{len(view)} bytes are too few for a digest without xxhash")
    low, high = _long(view)
    return struct.pack(">QQ", high, low)


_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MX1 = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u64(data: Buffer, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * _MX1 & _M64
    return h ^ h >> 32


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


xxh3_128: Callable[[Buffer], bytes]
"""The digest of a contiguous buffer, read as bytes: 16 bytes, canonical (big endian). Without
`xxhash`, the buffer must have at least `LEAST_BYTES`."""
try:
    from xxhash import xxh3_128_digest as xxh3_128
except ImportError:  # the training container may have only torch and the standard library
    xxh3_128 = pure_xxh3_128

HAVE_FAST = xxh3_128 is not pure_xxh3_128
