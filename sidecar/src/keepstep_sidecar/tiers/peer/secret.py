"""TlsContextSource of a run without Kubernetes, derived from one secret that its machines share.

Each machine derives the same key of an authority from the secret and the run's name, and with it
the same certificate of the authority, byte for byte. It then signs a certificate of its own, whose
key never leaves its memory. Another secret, or another run, is another authority.

No certificate expires, so no clock matters: a certificate that ended earlier would not lock out
anybody who knows the secret. To lock somebody out, change the secret.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from keepstep.directory import OpenDirectory
from keepstep.errors import UsageError
from keepstep_sidecar.tiers.peer.tls import SHARED_SECRET, Pem, PodIdentity, Tls, tls_contexts

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VARIABLE: Final = "KEEPSTEP_SECRET"
_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 4096
_MADE_BYTES: Final = 32
_REMEDY: Final = (
    "the secret and the run's name must be the same on all machines of the run"
    f" (its file, or {VARIABLE})"
)
_BEGIN, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280, 4.1.2.5: the end of a certificate that has none."""


class SecretCredentials:
    """See `TlsContextSource`."""

    def __init__(self, secret: bytes, run: str, node_rank: int) -> None:
        """Raises UsageError for a secret that is too short."""
        if len(secret) < _LEAST_BYTES:
            raise UsageError(
                f"the secret of the run has {len(secret)} bytes, and {_LEAST_BYTES} are the least;"
                " `keepstep secret FILE` makes one"
            )
        identity = PodIdentity(namespace=SHARED_SECRET, run=run, node_rank=node_rank)
        pem = _issued(_authority_key(secret, run), identity)
        self._tls = tls_contexts(pem, whose="the run's secret", remedy=_REMEDY)

    def current(self) -> Tls:
        return self._tls


def secret_id(secret: bytes, run: str) -> str:
    """A name of the secret. Whoever reads it cannot try secrets quickly."""
    return hashlib.scrypt(secret, salt=run.encode(), n=1 << 14, r=8, p=1, dklen=8).hex()


def make_secret() -> str:
    """A new secret, as text."""
    return base64.b64encode(os.urandom(_MADE_BYTES)).decode()


def read_secret(file: Path | None) -> bytes:
    """The secret in `file`, or else in the environment. Raises UsageError if it is in neither, or
    another user may have read or written it."""
    if file is None:
        if not (text := os.environ.get(VARIABLE, "").strip()):
            raise UsageError(
                f"the run has no secret: name its file, or set {VARIABLE}; `keepstep secret FILE`"
                " makes one"
            )
        return text.encode()
    try:
        directory = OpenDirectory.open_path(file.parent)
        fd = directory.open_file(file.name, os.O_RDONLY)
        with open(fd, "rb") as opened:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise UsageError(
                    f"{file}: mode {stat.S_IMODE(found.st_mode):04o}, of user {found.st_uid}; the"
                    f" secret must be of user {os.geteuid()} and private: chmod 600 {file}"
                )
            return opened.read(_MOST_BYTES).strip()
    except OSError as error:
        raise UsageError(f"cannot read the run's secret: {error}") from error


# --- certificates ----------------------------------------------------------------------------
#
# `cryptography` is imported only where there is a secret: it costs memory and a tenth of a second.


def _authority_key(secret: bytes, run: str) -> Ed25519PrivateKey:
    """The same key on each machine: HKDF-SHA256 (RFC 5869) of the secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"authority of run " + run.encode()
    seed = HKDF(algorithm=SHA256(), length=32, salt=b"keepstep", info=info).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _issued(authority: Ed25519PrivateKey, identity: PodIdentity) -> Pem:
    """A new key with a certificate of the authority, for a machine of the run."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keepstep")])
    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    ca = _begun(name, name, authority, serial=1).add_extension(is_authority, critical=True)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)])
    leaf = _begun(x509.Name([]), name, key, serial=x509.random_serial_number())
    leaf = leaf.add_extension(names, critical=True)
    pem = serialization.Encoding.PEM
    return Pem(
        certificate=leaf.sign(authority, None).public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        authorities=ca.sign(authority, None).public_bytes(pem),
    )


def _begun(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PrivateKey, *, serial: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
    )
