"""How Secrets hold an authority and a leaf.

<service>-ca    tls.crt, tls.key        the CA that signs now
                next.crt, next.key      the CA that will sign next, already published
                previous.crt            the CA that signed before, still published
                annotations keepstep.dev/since (when the stage began, RFC 3339) and
                keepstep.dev/rotate-ca (any value: begin a rotation now)
<service>-tls   tls.crt, tls.key, ca.crt (the bundle); for admission also `path`, the webhook's
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from keepstep_operator.bodies import Body
from keepstep_operator.certificates.pki import Facts, Pair, facts, fits, split
from keepstep_operator.certificates.rotation import Authority
from keepstep_operator.tls import PATH

SINCE_ANNOTATION: Final = "keepstep.dev/since"
ROTATE_ANNOTATION: Final = "keepstep.dev/rotate-ca"
_LABELS: Final = {
    "app.kubernetes.io/part-of": "keepstep",
    "app.kubernetes.io/managed-by": "keepstep-certificates",
}


@dataclass(frozen=True, kw_only=True)
class StoredAuthority:
    """The content of `<service>-ca`. `previous`: PEM of one or more CAs, b'' for none."""

    signer: Pair | None = None
    next: Pair | None = None
    previous: bytes = b""
    since: datetime | None = None
    asked: bool = False

    @property
    def bundle(self) -> bytes:
        """All CAs that clients must trust now."""
        pairs = [one.certificate for one in (self.signer, self.next) if one is not None]
        return b"".join(dict.fromkeys([*pairs, *split(self.previous)]))

    def summary(self) -> Authority:
        """The facts on which decisions are based."""
        return Authority(
            signer=_facts(self.signer),
            next=_facts(self.next),
            previous=facts(self.previous) if split(self.previous) else None,
            since=self.since,
            asked=self.asked,
        )


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """The content of `<service>-tls`. `path`: '' for a server that is no webhook."""

    pair: Pair | None = None
    bundle: bytes = b""
    path: str = ""


def read_authority(secret: Body | None) -> StoredAuthority:
    """Parse the Secret. What cannot be used (no Secret, a key that is not the certificate's) counts
    as missing."""
    if secret is None:
        return StoredAuthority()
    annotations = secret["metadata"].get("annotations") or {}
    return StoredAuthority(
        signer=_pair(secret, "tls"),
        next=_pair(secret, "next"),
        previous=_field(secret, "previous.crt"),
        since=_time(annotations.get(SINCE_ANNOTATION)),
        asked=ROTATE_ANNOTATION in annotations,
    )


def read_leaf(secret: Body | None) -> StoredLeaf:
    if secret is None:
        return StoredLeaf()
    return StoredLeaf(
        pair=_pair(secret, "tls"),
        bundle=_field(secret, "ca.crt"),
        path=_field(secret, PATH).decode(errors="replace"),
    )


def write_authority(old: Body | None, name: str, authority: StoredAuthority) -> Body:
    """The Secret to replace `old`. It carries the resource version of `old`, so that a write of
    another client in between is a conflict."""
    assert authority.signer is not None
    data = {
        **_pair_data("tls", authority.signer),
        **(_pair_data("next", authority.next) if authority.next else {}),
        **({"previous.crt": authority.previous} if authority.previous else {}),
    }
    secret = _secret(old, name, data)
    annotations = secret["metadata"].setdefault("annotations", {})
    annotations.pop(SINCE_ANNOTATION, None)
    if authority.since is not None:
        annotations[SINCE_ANNOTATION] = authority.since.isoformat()
    if not authority.asked:
        annotations.pop(ROTATE_ANNOTATION, None)
    return secret


def write_leaf(old: Body | None, name: str, leaf: StoredLeaf) -> Body:
    """The Secret to replace `old`."""
    assert leaf.pair is not None
    path = {PATH: leaf.path.encode()} if leaf.path else {}
    return _secret(old, name, {**_pair_data("tls", leaf.pair), "ca.crt": leaf.bundle, **path})


def _secret(old: Body | None, name: str, data: dict[str, bytes]) -> Body:
    metadata: Body = dict(old["metadata"]) if old else {"name": name}
    metadata["labels"] = {**(metadata.get("labels") or {}), **_LABELS}
    metadata["annotations"] = dict(metadata.get("annotations") or {})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": old.get("type", "Opaque") if old else "kubernetes.io/tls",
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def _pair_data(prefix: str, pair: Pair) -> dict[str, bytes]:
    return {f"{prefix}.crt": pair.certificate, f"{prefix}.key": pair.key}


def _pair(secret: Body, prefix: str) -> Pair | None:
    pair = Pair(certificate=_field(secret, f"{prefix}.crt"), key=_field(secret, f"{prefix}.key"))
    return pair if fits(pair) else None


def _field(secret: Body, name: str) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {}).get(name) or "", validate=True)
    except binascii.Error:
        return b""


def _facts(pair: Pair | None) -> Facts | None:
    return facts(pair.certificate) if pair else None


def _time(text: str | None) -> datetime | None:
    try:
        read = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return read if read.tzinfo else None
