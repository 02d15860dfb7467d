"""The identity of pods: certificate, key and authorities, from the operator or from a secret.

A certificate names its pod by a URI among its alternative names:
`keepstep://<namespace>/<run>/<node rank>`. The namespace is the border of trust. A pod of another
run is refused even if the same authority signed for it. The agent of a node is named
`keepstep://~agent/<node>/0`, which no pod of a run can be: it is a server to all runs, each of
which gets its own steps, and a client to none. Machines that share a secret instead of a cluster
(see `secret`) are named `keepstep://~secret/<run>/<node rank>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote, urljoin

import aiohttp
import msgspec

from keepstep.errors import KeepstepError, StorageError, UsageError
from keepstep.wire.member_reports import (
    AGENTS,
    CERTIFICATES_PATH,
    CertificateRequest,
    IssuedCertificate,
)
from keepstep_sidecar.config.sidecar import OperatorAccess
from keepstep_sidecar.log import info, warn

SHARED_SECRET: Final = "~secret"
"""In place of a namespace, where a secret is the border of trust; no namespace has this name."""
MEMBERSHIP: Final = "keepstep-membership"
"""What a member of a run asks for in the handshake (ALPN), instead of speaking HTTP."""

_URI = re.compile(r"keepstep://([^/]+)/([^/]+)/(\d{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PodIdentity:
    """A pod's place in a run."""

    namespace: str
    run: str
    node_rank: int

    @classmethod
    def for_agent_of_node(cls, node: str) -> PodIdentity:
        """The agent of a node."""
        return cls(namespace=AGENTS, run=node, node_rank=0)

    def __str__(self) -> str:
        if self.namespace == AGENTS:
            return f"the agent of node {self.run}"
        if self.namespace == SHARED_SECRET:
            return f"node rank {self.node_rank} of run {self.run}"
        return f"node rank {self.node_rank} of run {self.namespace}/{self.run}"

    @property
    def uri(self) -> str:
        """The identity as it stands in a certificate."""
        names = quote(self.namespace, safe=""), quote(self.run, safe="")
        return f"keepstep://{names[0]}/{names[1]}/{self.node_rank}"

    @classmethod
    def parse(cls, uri: str) -> PodIdentity:
        """Inverse of `uri`. Each identity has one spelling. Raises ValueError."""
        if match := _URI.fullmatch(uri):
            names = unquote(match[1]), unquote(match[2])
            found = cls(namespace=names[0], run=names[1], node_rank=int(match[3]))
            if found.uri == uri:
                return found
        raise ValueError(f"not an identity: {uri!r} (like keepstep://namespace/run/0)")

    def shares_run(self, other: PodIdentity) -> bool:
        """Whether both are pods of the same run."""
        return (self.namespace, self.run) == (other.namespace, other.run)


def identity_of_uris(uris: list[str], *, whose: str) -> PodIdentity:
    """The one identity among a certificate's URIs. Raises UsageError that names `whose` it is."""
    ours = [uri for uri in uris if uri.startswith("keepstep://")]
    try:
        (uri,) = ours
        return PodIdentity.parse(uri)
    except ValueError as error:
        raise UsageError(
            f"{whose}: its certificate must name exactly one keepstep://namespace/run/node-rank"
            f" as URI, it names {ours or 'none'}"
        ) from error


def identity_of_peer(certificate: Mapping[str, Any] | None, *, whose: str) -> PodIdentity:
    """The identity in `SSLSocket.getpeercert()`, whose chain was verified. Raises UsageError."""
    names = (certificate or {}).get("subjectAltName", ())
    return identity_of_uris([value for kind, value in names if kind == "URI"], whose=whose)


# --- credentials -----------------------------------------------------------------------------
#
# Contexts are never changed: code that opens a connection asks for the current ones. So a new
# certificate or authority applies from the next connection on, and open connections keep theirs.


@dataclass(frozen=True, kw_only=True)
class Pem:
    """PEM texts: a chain, its key, and the authorities against which other pods are checked."""

    certificate: bytes
    key: bytes
    authorities: bytes


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The contexts for connections, and this pod's identity in them. `member`: for a client that
    asks for `MEMBERSHIP`. `remedy`: what to do where a certificate is refused."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    member: ssl.SSLContext
    identity: PodIdentity
    remedy: str


class TlsContextSource(Protocol):
    """Where the contexts come from."""

    def current(self) -> Tls:
        """For the next connection; from any thread. Raises KeepstepError while there are none."""


def tls_contexts(pem: Pem, *, whose: str, remedy: str) -> Tls:
    """Contexts that show the certificate and demand one. Raises UsageError that names `whose`."""
    try:
        tls = Tls(
            server=_filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem),
            client=_filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem),
            member=_filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem),
            identity=identity_of_uris(_uris(pem.certificate), whose=whose),
            remedy=remedy,
        )
    except (ssl.SSLError, ValueError, OSError) as error:
        raise UsageError(
            f"{whose}: certificate, key or authorities are unusable: {error}"
        ) from error
    for context in (tls.server, tls.member):
        context.set_alpn_protocols([MEMBERSHIP])
    return tls


def explain_tls_error(error: Exception, remedy: str = "") -> str:
    """A text that says what to do. OpenSSL's words alone do not say which side is meant."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused here: {error.verify_message}; {remedy}"
    if not isinstance(error, ssl.SSLError):
        number = getattr(error, "errno", None) or 0  # those of names are negative
        text = os.strerror(number) if number > 0 else getattr(error, "strerror", None)
        return text or str(error) or type(error).__name__
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        return f"our certificate is refused there: TLS {reason}; {remedy}"
    return f"TLS: {reason}"


def _filled(context: ssl.SSLContext, pem: Pem) -> ssl.SSLContext:
    # Pods are known by the URI in their certificate, because their addresses change.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=pem.authorities.decode())
    _with_file(pem.certificate + b"\n" + pem.key, context.load_cert_chain)
    return context


def _with_file(data: bytes, use: Callable[[str], None]) -> None:
    """`ssl` reads keys only from files. This file is in memory, and never has a name on a drive."""
    fd = os.memfd_create("keepstep-peer", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        use(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _uris(certificate: bytes) -> list[str]:
    # only with peers: this import costs memory and a tenth of a second
    from cryptography import x509

    read = x509.load_pem_x509_certificate(certificate)
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


# --- certificates from the operator ----------------------------------------------------------
#
# The key is made here and never leaves this pod: it is kept beside the authorities, for a sidecar
# that begins while the operator is away. The old certificate is used until it expires. Then peers
# are refused, and training goes on without them.


_TIMEOUT = aiohttp.ClientTimeout(total=10.0, connect=5.0)
_RETRY_S = (1.0, 60.0)
_DUE = 2 / 3
_ISSUED_REMEDY = "both sides must have certificates of the same operator; check the clocks"
_LARGEST_BYTES = 1 << 20
_KEPT_APART = b"\0"


class IssuedCredentials:
    """See `TlsContextSource`. `keep_fresh` asks the operator until cancelled."""

    def __init__(self, reporting: OperatorAccess) -> None:
        self._reporting = reporting
        self._tls: Tls | None = None
        self._reason = "not asked yet"
        self._wait_s = 0.0
        if (pem := self._kept()) is not None:
            with contextlib.suppress(UsageError):
                self._tls = tls_contexts(
                    pem, whose="the certificate kept here", remedy=_ISSUED_REMEDY
                )
                self._wait_s = _due_s(pem.certificate)

    def current(self) -> Tls:
        if self._tls is None:
            raise StorageError(f"the operator has issued no certificate for peers: {self._reason}")
        return self._tls

    async def keep_fresh(self) -> None:
        """Ask for a certificate, and again before it expires. Failures are logged once and
        retried."""
        wait_s = _RETRY_S[0]
        await asyncio.sleep(self._wait_s)
        while True:
            pause_s = await self._renewed()
            if pause_s is None:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])
            else:
                wait_s = _RETRY_S[0]
                await asyncio.sleep(pause_s)

    async def _renewed(self) -> float | None:
        """Ask once. Returns the seconds until the next renewal; None without a new certificate."""
        try:
            key, request = _make_request()
            issued = await self._ask(request)
            certificate, authorities = issued.certificate.encode(), issued.authorities.encode()
            pem = Pem(certificate=certificate, key=key, authorities=authorities)
            self._tls = tls_contexts(pem, whose=self._address(), remedy=_ISSUED_REMEDY)
            due_s = _due_s(certificate)
            self._keep(pem)
        except (KeepstepError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            if reason != self._reason:
                warn("certificate.request_failed", url=self._address(), error=reason)
            self._reason = reason
            return None
        info("certificate.issued", identity=self._tls.identity.uri, renew_in_s=round(due_s))
        self._reason = ""
        return due_s

    def _keep(self, pem: Pem) -> None:
        """For the next sidecar of this pod. One that cannot keep it asks again."""
        if self._file is None:
            return
        written = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
            with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_KEPT_APART.join((pem.certificate, pem.key, pem.authorities)))
            written.replace(self._file)

    def _kept(self) -> Pem | None:
        if self._file is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            certificate, key, authorities = self._file.read_bytes().split(_KEPT_APART)
            return Pem(certificate=certificate, key=key, authorities=authorities)
        return None

    @property
    def _file(self) -> Path | None:
        ca_file = self._reporting.ca_file
        return None if ca_file is None else ca_file.with_name("peer.pem")

    async def _ask(self, request: str) -> IssuedCertificate:
        token = self._reporting.token()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = msgspec.json.encode(CertificateRequest(request=request))
        connector = aiohttp.TCPConnector(ssl=self._reporting.make_ssl_context(), limit=1)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session,
            session.post(
                self._address(), data=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            data = await response.content.read(_LARGEST_BYTES)
            if response.status != 200:
                text = data[:300].decode(errors="replace")
                raise StorageError(f"status {response.status}: {text}")
        try:
            return msgspec.json.decode(data, type=IssuedCertificate)
        except (ValueError, RecursionError) as error:
            raise StorageError(f"the answer is no certificate: {error}") from None

    def _address(self) -> str:
        """The address for certificates, beside that for reports."""
        return urljoin(self._reporting.address, CERTIFICATES_PATH)


def _make_request() -> tuple[bytes, str]:
    """A new key, and a request that proves possession of it. The request names no subject: the
    operator would not look at it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem, signed.decode()


def _due_s(certificate: bytes) -> float:
    """Seconds until two thirds of the certificate's life are over."""
    from cryptography import x509

    read = x509.load_pem_x509_certificate(certificate)
    life = read.not_valid_after_utc - read.not_valid_before_utc
    due = read.not_valid_before_utc + _DUE * life
    return max((due - datetime.now(UTC)).total_seconds(), _RETRY_S[0])
