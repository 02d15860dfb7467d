"""How a sidecar gets the certificate that other pods of its run know it by: JSON over HTTPS.

POST /v1/certificates with the token that reports carry. The request names nobody: the operator
takes namespace, run and node rank from its own record of the pod, and signs only those.
"""

from __future__ import annotations

from dataclasses import dataclass

PATH = "/v1/certificates"


@dataclass(frozen=True, kw_only=True)
class CertificateRequest:
    """`request`: PEM of a PKCS #10 request; only its public key counts."""

    request: str


@dataclass(frozen=True, kw_only=True)
class IssuedCertificate:
    """PEM. `authorities`: all that sign, or have signed, for pods; trust no others."""

    certificate: str
    authorities: str
