"""Who a certificate says somebody is: a URI among its alternative names, and nothing else.

`keepstep://<namespace>/<run>/<node rank>`. The namespace is the border of trust; a pod of another
run is refused although the same authority signed for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from keepstep.errors import UsageError

_URI = re.compile(r"keepstep://([^/]+)/([^/]+)/(\d{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A pod's place in a run."""

    namespace: str
    run: str
    node_rank: int

    def __str__(self) -> str:
        return f"node rank {self.node_rank} of run {self.namespace}/{self.run}"

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        names = quote(self.namespace, safe=""), quote(self.run, safe="")
        return f"keepstep://{names[0]}/{names[1]}/{self.node_rank}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Inverse of `uri`: each identity has one spelling. Raises ValueError."""
        if match := _URI.fullmatch(uri):
            names = unquote(match[1]), unquote(match[2])
            found = cls(namespace=names[0], run=names[1], node_rank=int(match[3]))
            if found.uri == uri:
                return found
        raise ValueError(f"not an identity: {uri!r} (like keepstep://namespace/run/0)")

    def shares_run(self, other: Identity) -> bool:
        """Whether both are pods of one run."""
        return (self.namespace, self.run) == (other.namespace, other.run)


def of_uris(uris: list[str], *, whose: str) -> Identity:
    """The one identity among a certificate's URIs. Raises UsageError, naming `whose` it is."""
    ours = [uri for uri in uris if uri.startswith("keepstep://")]
    try:
        (uri,) = ours
        return Identity.parse(uri)
    except ValueError as error:
        raise UsageError(
            f"{whose}: its certificate must name exactly one keepstep://namespace/run/node-rank"
            f" as URI, it names {ours or 'none'}"
        ) from error


def of_peer(certificate: Mapping[str, Any] | None, *, whose: str) -> Identity:
    """From `SSLSocket.getpeercert()`, whose chain was verified. Raises UsageError."""
    names = (certificate or {}).get("subjectAltName", ())
    return of_uris([value for kind, value in names if kind == "URI"], whose=whose)
