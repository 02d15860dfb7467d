"""Keys and certificates: ECDSA P-256, as PEM. This module knows no Secrets and no schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_MOST_SKEW: Final = timedelta(hours=2)
"""Certificates are valid from this long before they are made, for clients with a slow clock."""
_SIGNS: Final = x509.KeyUsage(
    digital_signature=False,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
_SERVER: Final = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
_BOTH_ENDS: Final = x509.ExtendedKeyUsage(
    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
)


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Validity:
    """From when and until when a certificate holds, in UTC."""

    begins: datetime
    ends: datetime

    def is_due(self, now: datetime) -> bool:
        """Whether two thirds of it are over."""
        return now >= self.begins + (self.ends - self.begins) * 2 / 3


def make_authority(name: str, *, now: datetime, life: timedelta) -> KeyPair:
    """A self-signed CA that may sign only leaves. Its subject is unique, so that clients can tell
    two CAs of the same `name` apart."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"{name} {x509.random_serial_number() % (1 << 32):08x}")
    builder = _builder(subject, key.public_key(), now=now, ends=now + life)
    builder = builder.issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_SIGNS, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return _pair(builder.add_extension(identifier, critical=False), key, by=key)


def make_server(names: Iterable[str], *, now: datetime, life: timedelta) -> KeyPair:
    """A certificate of a server with these DNS names, which signs itself: who trusts it trusts this
    server alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    known_as = [*names]
    builder = _builder(_subject(known_as[0]), key.public_key(), now=now, ends=now + life)
    builder = _leaf(builder, _dns(known_as), _SERVER).issuer_name(_subject(known_as[0]))
    return _pair(builder, key, by=key)


def sign_server(
    authority: KeyPair, names: Iterable[str], *, now: datetime, life: timedelta
) -> KeyPair:
    """The same, signed by the authority. It does not outlive it."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder, signer = _below(authority, key.public_key(), now=now, life=life)
    return _pair(_leaf(builder, _dns(names), _SERVER), key, by=signer)


def sign_request(
    authority: KeyPair, request: bytes, *, uri: str, now: datetime, life: timedelta
) -> bytes:
    """PEM of a certificate for `uri` and the key of `request`, for both ends of a connection.

    Raises ValueError if `request` is not a certificate request, is not signed by its own key, or
    has a key that is not on the curve P-256.
    """
    asked = x509.load_pem_x509_csr(request)
    key = asked.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not asked.is_signature_valid:
        raise ValueError("it must be signed with its own elliptic curve key")
    if not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the key must be on the curve P-256, not {key.curve.name}")
    builder, signer = _below(authority, key, now=now, life=life)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    made = _leaf(builder, names, _BOTH_ENDS).sign(signer, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def certificate_validity(certificate: bytes) -> Validity:
    """Of the first certificate in a PEM text. Raises ValueError if there is none."""
    read = x509.load_pem_x509_certificate(certificate)
    return Validity(begins=read.not_valid_before_utc, ends=read.not_valid_after_utc)


def is_matching_pair(pair: KeyPair) -> bool:
    """Whether both parts can be parsed and the key is the certificate's."""
    try:
        read = x509.load_pem_x509_certificate(pair.certificate)
        return _private(pair.key).public_key() == read.public_key()
    except (ValueError, TypeError):
        return False


def split_bundle(bundle: bytes) -> tuple[bytes, ...]:
    """The certificates of a PEM bundle, one by one; () if it cannot be read."""
    try:
        read = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return ()
    return tuple(certificate.public_bytes(serialization.Encoding.PEM) for certificate in read)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, *, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - min(_MOST_SKEW, (ends - now) / 10))
        .not_valid_after(ends)
    )


def _below(
    authority: KeyPair, key: ec.EllipticCurvePublicKey, *, now: datetime, life: timedelta
) -> tuple[x509.CertificateBuilder, ec.EllipticCurvePrivateKey]:
    """What the authority is to sign, and with which key. The subject is empty: names count."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    ends = min(now + life, issuer.not_valid_after_utc)
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = _builder(x509.Name([]), key, now=now, ends=ends).issuer_name(issuer.subject)
    return builder.add_extension(signed_by, critical=False), _private(authority.key)


def _leaf(
    builder: x509.CertificateBuilder, names: x509.SubjectAlternativeName, use: x509.ExtendedKeyUsage
) -> x509.CertificateBuilder:
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(use, critical=False)
        .add_extension(names, critical=True)
    )


def _pair(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    *,
    by: ec.EllipticCurvePrivateKey,
) -> KeyPair:
    return KeyPair(
        certificate=builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic curve key")
    return key


def _subject(name: str) -> x509.Name:
    """A subject with this common name, which may have 64 characters. Clients check only the DNS
    names."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _dns(names: Iterable[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
