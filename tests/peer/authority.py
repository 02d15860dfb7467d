"""An authority of a run and certificates that it signs, as files; made anew for each test."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from keepstep.errors import KeepstepError, UsageError
from keepstep_sidecar.tiers.peer.tls import Pem, PodIdentity, Tls, tls_contexts
from tests.certificates import pem_of

_REMEDY = "both sides must have certificates of the same authority"


@dataclass(frozen=True, kw_only=True)
class Files:
    """Certificate chain, key and authorities, PEM; read again when they change."""

    certificate: Path
    key: Path
    authorities: Path


class FileCredentials:
    """From files that may be replaced at any time; checked every `check_every_s` seconds."""

    def __init__(self, files: Files, *, check_every_s: float = 5.0) -> None:
        """Raises UsageError when the files are not usable at the start."""
        self._files = files
        self._every_s = check_every_s
        self._lock = threading.Lock()
        self._digest = b""
        self._tls = self._load()
        self._checked_at = time.monotonic()

    def current(self) -> Tls:
        with self._lock:
            if time.monotonic() - self._checked_at >= self._every_s:
                self._checked_at = time.monotonic()
                self._reload()
            return self._tls

    def _reload(self) -> None:
        with contextlib.suppress(KeepstepError):  # files that do not fit together yet
            self._tls = self._load()

    def _load(self) -> Tls:
        """The contexts that the files give now; the same objects if nothing changed."""
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
            self._tls = tls_contexts(pem, whose=str(files.certificate), remedy=_REMEDY)
            self._digest = digest
        return self._tls


class Authority:
    """Signs for pods. `directory` gets one folder for each certificate."""

    def __init__(self, directory: Path, name: str = "peers") -> None:
        self.directory = directory / name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def files(
        self,
        node_rank: int,
        *,
        run: str = "gpt",
        namespace: str = "team",
        ends: timedelta = timedelta(hours=1),
        uris: list[str] | None = None,
    ) -> Files:
        """A certificate for this place in the run, as the sidecar is given it."""
        identity = PodIdentity(namespace=namespace, run=run, node_rank=node_rank)
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(uri) for uri in uris or [identity.uri]]
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        directory = self.directory / f"{namespace}-{run}-{node_rank}-{certificate.serial_number}"
        directory.mkdir(parents=True)
        texts = {
            "tls.crt": certificate.public_bytes(serialization.Encoding.PEM),
            "tls.key": pem_of(key),
            "ca.crt": self.pem,
        }
        for name, text in texts.items():
            (directory / name).write_bytes(text)
        return Files(
            certificate=directory / "tls.crt",
            key=directory / "tls.key",
            authorities=directory / "ca.crt",
        )
