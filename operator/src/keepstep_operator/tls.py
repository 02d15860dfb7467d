"""A server's TLS from files that may change: the kubelet replaces them when their Secret is
written.

The same `SSLContext` is loaded again, so the listeners stay. New connections get the new
certificate; open ones keep theirs. A certificate and key that do not fit together (a half-written
directory) are not loaded until they do.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Final

from keepstep.errors import UsageError
from keepstep_operator.journal import say, warn

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
PATH: Final = "path"
_LOOK_EVERY_S: Final = 5.0


class ServerTls:
    """The context of `directory` (tls.crt, tls.key), and a task that keeps it fresh. `authorities`:
    PEM of all CAs that clients must trust (ca.crt); '' if there is none. `path`: the only path that
    answers (path); '' if there is none.

    Raises UsageError if there is no usable pair at the start.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.context = _context()
        try:
            self._loaded = self._digest()
            self.context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
            self.authorities, self.path = self._read(AUTHORITIES), self._read(PATH)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{directory} holds no usable {CERTIFICATE} and {KEY}: {error}; they come from"
                " `keepstep-operator certificates`, or from cert-manager"
            ) from error

    def reload(self) -> bool:
        """Load the files again if they changed. Returns whether they were loaded."""
        try:
            digest = self._digest()
            if digest == self._loaded:
                return False
            files = self._directory / CERTIFICATE, self._directory / KEY
            _context().load_cert_chain(*files)  # a wrong pair must not get into the live context
            self.context.load_cert_chain(*files)
            self.authorities, self.path = self._read(AUTHORITIES), self._read(PATH)
        except (OSError, ssl.SSLError) as error:
            warn("certificate not loaded", directory=str(self._directory), reason=str(error))
            return False
        self._loaded = digest
        say("certificate loaded", directory=str(self._directory))
        return True

    async def keep_fresh(self, *, every_s: float = _LOOK_EVERY_S) -> None:
        """Reload changed files, for ever."""
        while True:
            await asyncio.sleep(every_s)
            self.reload()

    def _digest(self) -> str:
        both = [(self._directory / name).read_bytes() for name in (CERTIFICATE, KEY)]
        others = [self._read(name).encode() for name in (AUTHORITIES, PATH)]
        return hashlib.sha256(b"\0".join([*both, *others])).hexdigest()

    def _read(self, name: str) -> str:
        path = self._directory / name
        return path.read_text() if path.exists() else ""


def _context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # sessions are not resumed; tickets are a tenth of a handshake
    return context
