"""xxh3_128, the digest of chunks: it runs at memory speed and releases the GIL.

It needs the package `xxhash`, which the sidecar always has. A training container may lack it: the
trainer digests only a header, a control page and claims, with `layout.blake2b_digest`. Both find
damaged bytes; neither protects against forged bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.errors import UsageError

DIGEST_BYTES = 16

Buffer = bytes | bytearray | memoryview


def _missing(_: Buffer) -> bytes:
    raise UsageError("verifying the chunks of an image needs the package xxhash: install it")


xxh3_128: Callable[[Buffer], bytes]
"""The digest of a contiguous buffer, read as bytes: 16 bytes, canonical (big endian). Raises
UsageError without `xxhash`."""
try:
    from xxhash import xxh3_128_digest as xxh3_128
except ImportError:  # the training container may have only torch and the standard library
    xxh3_128 = _missing
