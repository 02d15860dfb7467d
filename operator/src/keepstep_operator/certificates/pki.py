"""Keys and certificates: ECDSA P-256, as PEM. This module knows no Secrets and no schedule."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_MOST_SKEW: Final = timedelta(hours=2)
"""Certificates are valid from this long before they are made, for clients with a slow clock."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The content of a certificate. Times are in UTC; `names` are its DNS names."""

    not_before: datetime
    not_after: datetime
    serial: int
    names: tuple[str, ...] = ()

    @property
    def life(self) -> timedelta:
        return self.not_after - self.not_before


def make_authority(name: str, *, now: datetime, life: timedelta) -> Pair:
    """A self-signed CA that may sign only leaves. Its subject is unique, so that clients can tell
    two CAs of the same `name` apart."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    subject = _subject(f"{name} {serial % (1 << 32):08x}")
    usage = _usage(sign=False, sign_certificates=True)
    builder = (
        _builder(subject, subject, key.public_key(), serial=serial, now=now, life=life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(_key_id(key.public_key()), critical=False)
    )
    return _signed(builder, key, by=key)


def sign_leaf(authority: Pair, *, names: tuple[str, ...], now: datetime, life: timedelta) -> Pair:
    """A server certificate for these DNS names. It does not outlive its authority."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = _private(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    life = min(life, issuer.not_valid_after_utc - now)
    serial = x509.random_serial_number()
    issuer_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    known_as = [x509.DNSName(name) for name in names]
    builder = (
        _builder(
            _subject(names[0]), issuer.subject, key.public_key(), serial=serial, now=now, life=life
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=True, sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(known_as), critical=False)
        .add_extension(_key_id(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id),
            critical=False,
        )
    )
    return _signed(builder, key, by=signer)


def facts(certificate: bytes) -> Facts:
    """The facts of the first certificate in a PEM text. Raises ValueError if there is none."""
    read = x509.load_pem_x509_certificate(certificate)
    try:
        extension = read.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = tuple(extension.value.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        names = ()
    return Facts(
        not_before=read.not_valid_before_utc,
        not_after=read.not_valid_after_utc,
        serial=read.serial_number,
        names=names,
    )


def fits(pair: Pair) -> bool:
    """Whether both parts can be parsed and the key is the certificate's."""
    try:
        read = x509.load_pem_x509_certificate(pair.certificate)
        return _private(pair.key).public_key() == read.public_key()
    except (ValueError, TypeError):
        return False


def is_signed_by(leaf: bytes, authority: bytes) -> bool:
    """Whether the authority's key signed the leaf. Times are not checked."""
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(leaf).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def split(bundle: bytes) -> tuple[bytes, ...]:
    """The certificates of a PEM bundle, one by one; () if it cannot be read."""
    try:
        read = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return ()
    return tuple(one.public_bytes(serialization.Encoding.PEM) for one in read)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    serial: int,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(now - min(_MOST_SKEW, life / 10))
        .not_valid_after(now + life)
    )


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    *,
    by: ec.EllipticCurvePrivateKey,
) -> Pair:
    return Pair(
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


def _key_id(key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key)


def _usage(*, sign: bool, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=sign,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
