"""A server's TLS with a certificate that may change.

The same `SSLContext` is loaded again, so the listeners stay. New connections get the new
certificate; open ones keep theirs. A certificate and key that do not fit together (a half-written
directory) are not loaded until they do.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from keepstep.errors import UsageError
from keepstep_operator.log import info, warn

_CHECK_EVERY_S: Final = 5.0

Shown = tuple[bytes, bytes]
"""PEM of a certificate and of its key."""


class ServerTls:
    """The context with what `shown` returns, which raises OSError while there is nothing; and a
    task that keeps it fresh. Raises UsageError if there is no usable pair at the start."""

    def __init__(self, shown: Callable[[], Shown]) -> None:
        self._shown = shown
        self.context = _context()
        try:
            self._loaded = shown()
            _load(self.context, self._loaded)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"no usable certificate and key: {error}; they come from `keepstep-operator"
                " certificates`"
            ) from error

    def reload(self) -> bool:
        """Load the pair again if it changed. Returns whether it was loaded."""
        try:
            shown = self._shown()
            if shown == self._loaded:
                return False
            _load(_context(), shown)  # a wrong pair must not get into the live context
            _load(self.context, shown)
        except (OSError, ssl.SSLError) as error:
            warn("certificate.load_failed", error=str(error))
            return False
        self._loaded = shown
        info("certificate.loaded")
        return True

    async def keep_fresh(self, *, every_s: float = _CHECK_EVERY_S) -> None:
        """Reload a changed pair, for ever."""
        while True:
            await asyncio.sleep(every_s)
            self.reload()


def read_mounted_pair(directory: Path) -> Shown:
    """The pair in a directory where a Secret is mounted. Raises OSError."""
    return (directory / "tls.crt").read_bytes(), (directory / "tls.key").read_bytes()


def _load(context: ssl.SSLContext, shown: Shown) -> None:
    """`ssl` reads keys only from files. This one is in memory, and never has a name on a drive."""
    fd = os.memfd_create("keepstep-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, b"\n".join(shown))
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # sessions are not resumed; tickets are a tenth of a handshake
    return context
