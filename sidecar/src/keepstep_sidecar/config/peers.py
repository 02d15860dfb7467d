"""What a sidecar is told about its peers. Constant for the life of the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Files:
    """Certificate chain, key and authorities, PEM; read again when they change."""

    certificate: Path
    key: Path
    authorities: Path


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """`listen`, `advertise`, `peers`: `host:port`. `replicas`: copies of each shard on other pods.

    `listen` '': serve no other pod, and fetch only from pods that the operator names.

    `files` None: the operator issues certificates and names the other pods. `peers`: all other
    pods, if no operator names them. `bytes_per_second`: limit of all copies that are sent; a
    restore is never held back.
    """

    listen: str
    advertise: str = ""
    peers: tuple[str, ...] = ()
    replicas: int = 1
    files: Files | None = None
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        for address in filter(None, (self.listen, self.advertise, *self.peers)):
            split(address)
        if self.peers and self.files is None:
            raise UsageError(
                "--peer needs certificates: give --peer-cert, --peer-key and --peer-ca"
            )


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is no address: expected like 10.0.0.7:9465")
    return host.removeprefix("[").removesuffix("]"), int(port)
