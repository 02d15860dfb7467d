"""A certificate from the operator, made anew after two thirds of its life.

The key is made here and never leaves the memory of this process. While the operator is away the
old certificate serves until it ends; then peers are refused, and training goes on without them.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from urllib.parse import urljoin

import aiohttp
import msgspec

from keepstep.certificates import PATH, CertificateRequest, IssuedCertificate
from keepstep.errors import KeepstepError, StorageError
from keepstep_sidecar.config import Reporting
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.peer.credentials import Pem, Tls, contexts

_TIMEOUT = aiohttp.ClientTimeout(total=10.0, connect=5.0)
_RETRY_S = (1.0, 60.0)
_DUE = 2 / 3
_LARGEST_BYTES = 1 << 20


class IssuedCredentials:
    """See `credentials.Credentials`. `keep_fresh` asks, until cancelled."""

    def __init__(self, reporting: Reporting) -> None:
        self._reporting = reporting
        self._trust = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=reporting.ca)
        self._tls: Tls | None = None
        self._reason = "not asked yet"

    def current(self) -> Tls:
        if self._tls is None:
            raise StorageError(f"the operator has issued no certificate for peers: {self._reason}")
        return self._tls

    async def keep_fresh(self) -> None:
        """Ask, and ask again before it ends; a failure is said once and tried again."""
        wait_s = _RETRY_S[0]
        while True:
            pause_s = await self._renewed()
            if pause_s is None:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])
            else:
                wait_s = _RETRY_S[0]
                await asyncio.sleep(pause_s)

    async def _renewed(self) -> float | None:
        """Seconds to the next renewal; None when there is no new certificate."""
        try:
            key, request = _make_request()
            issued = await self._ask(request)
            certificate, authorities = issued.certificate.encode(), issued.authorities.encode()
            pem = Pem(certificate=certificate, key=key, authorities=authorities)
            self._tls = contexts(pem, whose=self._address())
            due_s = _due_s(certificate)
        except (KeepstepError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            if reason != self._reason:
                warn("no peer certificate", url=self._address(), reason=reason)
            self._reason = reason
            return None
        say("peer certificate issued", identity=self._tls.identity.uri, renew_in_s=round(due_s))
        self._reason = ""
        return due_s

    async def _ask(self, request: str) -> IssuedCertificate:
        token = self._reporting.token_file.read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = msgspec.json.encode(CertificateRequest(request=request))
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=1)
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
        """Beside the reports."""
        return urljoin(self._reporting.address, PATH)


def _make_request() -> tuple[bytes, str]:
    """A new key, and a request that proves that it is ours. It names nobody: nobody would look."""
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
    """Seconds until two thirds of its life are over."""
    from cryptography import x509

    read = x509.load_pem_x509_certificate(certificate)
    life = read.not_valid_after_utc - read.not_valid_before_utc
    due = read.not_valid_before_utc + _DUE * life
    return max((due - datetime.now(UTC)).total_seconds(), _RETRY_S[0])
