"""A pair that is replaced in time, as one Secret holds it. No I/O, no keys made.

    tls.crt, tls.key      the pair in use
    next.crt, next.key    the one that will be used next, already trusted
    previous.crt          those that were used before, still trusted
    ca.crt                all of these: what clients must trust
    path                  for the webhook: where it takes reviews

The annotation keepstep.dev/rotate-ca (any value) asks for a new pair now; keepstep.dev/since says
since when the pair is in use. A ring goes through three stages; the second lasts `overlap` from the
beginning of the next pair, the third `overlap` from its first use:

    in use                alone; until two thirds of its life are over
    in use + next         the next pair is trusted, and not used yet
    in use + previous     the next pair is used now; the old one is still trusted

So a client that learns of a new bundle within one overlap trusts whatever is in use.
"""

from __future__ import annotations

import base64
import binascii
import enum
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from keepstep_operator.certificates.pki import (
    KeyPair,
    certificate_validity,
    is_matching_pair,
    split_bundle,
)
from keepstep_operator.object_body import Body

ROTATE_ANNOTATION: Final = "keepstep.dev/rotate-ca"
SINCE_ANNOTATION: Final = "keepstep.dev/since"
_LABELS: Final = {
    "app.kubernetes.io/part-of": "keepstep",
    "app.kubernetes.io/managed-by": "keepstep-certificates",
}


@dataclass(frozen=True, kw_only=True)
class CertificateRing:
    """The pairs. `previous`: PEM of one or more certificates, b'' for none. `since`: when the pair
    in use came after them; None: that is not known. `path`: '' for what is no webhook. `asked`: a
    person asks for another pair now."""

    used: KeyPair | None = None
    next: KeyPair | None = None
    previous: bytes = b""
    since: datetime | None = None
    path: str = ""
    asked: bool = False

    @property
    def bundle(self) -> bytes:
        """All certificates that clients must trust now."""
        pairs = [pair.certificate for pair in (self.used, self.next) if pair is not None]
        return b"".join(dict.fromkeys([*pairs, *split_bundle(self.previous)]))


class RingAction(enum.Enum):
    """What to do with a ring."""

    NONE = "none"
    BEGIN = "begin"
    """No pair can be used: make one, and use it."""
    ADD_NEXT = "add next"
    """Make the next pair, and have it trusted."""
    PROMOTE = "promote"
    """Use the next pair from now on."""
    DROP_PREVIOUS = "drop previous"
    """Nothing of the previous pair is in use any more."""


def due_move(ring: CertificateRing, *, now: datetime, overlap: timedelta) -> RingAction:
    """The one move that is due now."""
    successor = certificate_validity(ring.next.certificate) if ring.next is not None else None
    used = certificate_validity(ring.used.certificate) if ring.used is not None else None
    if used is None or now >= used.ends:
        return (
            RingAction.PROMOTE
            if successor is not None and now < successor.ends
            else RingAction.BEGIN
        )
    if successor is not None:
        return RingAction.PROMOTE if now >= successor.begins + overlap else RingAction.NONE
    if ring.previous:
        over = ring.since is None or now >= ring.since + overlap
        return RingAction.DROP_PREVIOUS if over else RingAction.NONE
    return RingAction.ADD_NEXT if ring.asked or used.is_due(now) else RingAction.NONE


def read_ring(secret: Body | None) -> CertificateRing:
    """Parse the Secret. What cannot be used (no Secret, a key that is not the certificate's) counts
    as missing."""
    if secret is None:
        return CertificateRing()
    annotations = secret["metadata"].get("annotations") or {}
    return CertificateRing(
        used=_pair(secret, "tls"),
        next=_pair(secret, "next"),
        previous=_field(secret, "previous.crt"),
        since=_time(annotations.get(SINCE_ANNOTATION)),
        path=_field(secret, "path").decode(errors="replace"),
        asked=ROTATE_ANNOTATION in annotations,
    )


def ring_secret(old: Body | None, name: str, ring: CertificateRing) -> Body:
    """The Secret to replace `old`. It carries the resource version of `old`, so that a write of
    another client in between is a conflict."""
    data = {
        **_pair_data("tls", ring.used),
        **_pair_data("next", ring.next),
        **({"previous.crt": ring.previous} if ring.previous else {}),
        **({"path": ring.path.encode()} if ring.path else {}),
        "ca.crt": ring.bundle,
    }
    metadata: Body = dict(old["metadata"]) if old else {"name": name}
    metadata["labels"] = {**(metadata.get("labels") or {}), **_LABELS}
    metadata["annotations"] = dict(metadata.get("annotations") or {})
    if ring.since is not None:
        metadata["annotations"][SINCE_ANNOTATION] = ring.since.isoformat()
    if not ring.asked:
        metadata["annotations"].pop(ROTATE_ANNOTATION, None)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": old.get("type", "Opaque") if old else "kubernetes.io/tls",
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def _pair_data(prefix: str, pair: KeyPair | None) -> dict[str, bytes]:
    return {} if pair is None else {f"{prefix}.crt": pair.certificate, f"{prefix}.key": pair.key}


def _pair(secret: Body, prefix: str) -> KeyPair | None:
    pair = KeyPair(certificate=_field(secret, f"{prefix}.crt"), key=_field(secret, f"{prefix}.key"))
    return pair if is_matching_pair(pair) else None


def _field(secret: Body, name: str) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {}).get(name) or "", validate=True)
    except binascii.Error:
        return b""


def _time(text: str | None) -> datetime | None:
    try:
        read = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return read if read.tzinfo else None
