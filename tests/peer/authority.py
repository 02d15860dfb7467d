"""An authority of a run and certificates that it signs, as files; made anew for each test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from keepstep_sidecar.config.sidecar import Files
from keepstep_sidecar.tiers.peer.tls import Identity
from tests.certificates import pem_of


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
        identity = Identity(namespace=namespace, run=run, node_rank=node_rank)
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
