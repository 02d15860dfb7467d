"""Certificate, key and authorities of this pod, as contexts for both directions.

Contexts are never changed: whoever opens a connection asks for the current ones. So a new
certificate or authority holds from the next connection on, and those that are open keep theirs.
A pair that does not fit together (a half-written directory) is left alone until it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.peer.identity import Identity, of_uris
from keepstep_sidecar.peer.settings import Files

_LOOK_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Pem:
    """PEM texts: a chain, its key, and the authorities that others are checked against."""

    certificate: bytes
    key: bytes
    authorities: bytes


@dataclass(frozen=True, kw_only=True)
class Tls:
    """What a connection is opened with, and who we are in it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    identity: Identity


class Credentials(Protocol):
    """Where the contexts come from."""

    def current(self) -> Tls:
        """For the next connection; from any thread. Raises KeepstepError while there are none."""


class FileCredentials:
    """From files that may be replaced under us; they are looked at every `look_every_s`."""

    def __init__(self, files: Files, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        """Raises UsageError when they are not usable to begin with."""
        self._files = files
        self._every_s = look_every_s
        self._lock = threading.Lock()
        self._digest = b""
        self._tls = self._load()
        _warn_of_readers(files.key)
        self._looked_at = time.monotonic()

    def current(self) -> Tls:
        with self._lock:
            if time.monotonic() - self._looked_at >= self._every_s:
                self._looked_at = time.monotonic()
                self._reload()
            return self._tls

    def _reload(self) -> None:
        before = self._digest
        try:
            self._tls = self._load()
        except KeepstepError as error:
            warn("peer certificate not loaded", reason=str(error))
            return
        if self._digest != before:
            say("peer certificate loaded", identity=self._tls.identity.uri)

    def _load(self) -> Tls:
        """The contexts of what the files say now; the same ones when nothing changed."""
        files = self._files
        try:
            pem = Pem(
                certificate=files.certificate.read_bytes(),
                key=files.key.read_bytes(),
                authorities=files.authorities.read_bytes(),
            )
        except OSError as error:
            raise UsageError(f"cannot read the peers' certificate: {error}") from error
        digest = hashlib.sha256(b"\0".join((pem.certificate, pem.key, pem.authorities))).digest()
        if digest != self._digest:
            self._tls, self._digest = contexts(pem, whose=str(files.certificate)), digest
        return self._tls


def _warn_of_readers(key: Path) -> None:
    """Whoever has the key is this pod to all others."""
    with contextlib.suppress(OSError):
        if (mode := stat.S_IMODE(key.stat().st_mode)) & 0o007:
            why = "everybody on this machine may read or write it; chmod 600"
            warn("peer key not private", path=str(key), mode=f"{mode:04o}", reason=why)


def contexts(pem: Pem, *, whose: str) -> Tls:
    """Contexts that show the certificate and demand one. Raises UsageError, naming `whose`."""
    try:
        return Tls(
            server=_filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem),
            client=_filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem),
            identity=of_uris(_uris(pem.certificate), whose=whose),
        )
    except (ssl.SSLError, ValueError, OSError) as error:
        raise UsageError(f"{whose}: certificate, key or authorities are no use: {error}") from error


def _filled(context: ssl.SSLContext, pem: Pem) -> ssl.SSLContext:
    # pods are known by the URI in their certificate: their addresses change
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=pem.authorities.decode())
    _with_file(pem.certificate + b"\n" + pem.key, context.load_cert_chain)
    return context


def _with_file(data: bytes, use: Callable[[str], None]) -> None:
    """`ssl` reads keys from files only: this one is memory, and never has a name on a drive."""
    fd = os.memfd_create("keepstep-peer", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        use(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _uris(certificate: bytes) -> list[str]:
    from cryptography import x509  # with peers only: it costs memory and a tenth of a second

    read = x509.load_pem_x509_certificate(certificate)
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
