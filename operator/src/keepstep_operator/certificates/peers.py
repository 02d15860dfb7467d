"""The authority of sidecars' certificates. It is kept and rotated like the others, but has no leaf.

Its Secret `<service>-ca` is mounted into reconcile, which signs with it
(`reconcile.peer_certificates`).
"""

from __future__ import annotations

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from keepstep_operator.certificates.keeper import Keeper
from keepstep_operator.certificates.pki import Facts, facts
from keepstep_operator.certificates.secrets import StoredAuthority

_SKEW = timedelta(hours=1)


class AuthorityKeeper(Keeper):
    """Keeps the authority alone. `round` returns the facts of its signer."""

    async def _trusted(self) -> bytes:
        """Empty: there is no leaf, and no right to read one."""
        return b""

    async def _path(self) -> str:
        return ""

    async def _leaf(self, authority: StoredAuthority, path: str) -> Facts:
        assert authority.signer is not None
        return facts(authority.signer.certificate)


async def published_with_certificates(bundle: bytes, path: str) -> str:
    """Does nothing: sidecars get the bundle with every certificate, at least once a day."""
    return ""


def sign(
    authority: tuple[bytes, bytes], request: bytes, *, uri: str, now: datetime, life: timedelta
) -> bytes:
    """PEM of a certificate for `uri` and the key of `request`, for both ends of a connection.

    `authority`: certificate and key. Raises ValueError if `request` is not a certificate request,
    is not signed by its own key, or has a key that is not on the curve P-256.
    """
    issuer = x509.load_pem_x509_certificate(authority[0])
    signer = serialization.load_pem_private_key(authority[1], password=None)
    asked = x509.load_pem_x509_csr(request)
    key = asked.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_proven(asked):
        raise ValueError("it must be signed with its own elliptic curve key")
    if not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the key must be on the curve P-256, not {key.curve.name}")
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    known_as = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    issuer_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(known_as, critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def _is_proven(request: x509.CertificateSigningRequest) -> bool:
    try:
        return request.is_signature_valid
    except (InvalidSignature, ValueError):
        return False
