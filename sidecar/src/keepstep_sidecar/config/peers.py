"""What a sidecar is told of its peers. Constant for the life of the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    `listen` '': serve nobody, and fetch only from whom the operator names.

    `files` None: the operator issues certificates, and tells who the others are. `peers`: all other
    pods, where no operator tells them. `bytes_per_second`: limit of all that is sent as copies; a
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
        if self.replicas < 0:
            raise UsageError(f"--peer-replicas {self.replicas}: at least 0")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise UsageError("--peer-bytes-per-second starts at 1; leave it out for no limit")
        if self.peers and self.files is None:
            raise UsageError(
                "--peer needs certificates: give --peer-cert, --peer-key and --peer-ca"
            )

    def to_plain(self) -> dict[str, Any]:
        """For JSON; `of_plain` is the inverse. Paths are absolute: who reads it is elsewhere."""
        plain = {**asdict(self), "peers": list(self.peers)}
        if self.files is not None:
            plain["files"] = {name: os.path.abspath(path) for name, path in plain["files"].items()}
        return plain

    def arguments(self) -> list[str]:
        """The same on a command line, for `peer.options`."""
        files = self.files
        told = {
            "--peer-listen": self.listen or None,
            "--peer-advertise": self.advertise or None,
            "--peer-replicas": self.replicas,
            "--peer-bytes-per-second": self.bytes_per_second,
            "--peer-cert": files and files.certificate,
            "--peer-key": files and files.key,
            "--peer-ca": files and files.authorities,
        }
        words = [str(word) for pair in told.items() if pair[1] is not None for word in pair]
        return [*words, *(word for one in self.peers for word in ("--peer", one))]


def of_plain(plain: Mapping[str, Any] | None) -> PeerSettings | None:
    """Inverse of `PeerSettings.to_plain`. Raises KeyError, TypeError, UsageError."""
    if plain is None:
        return None
    files = plain["files"] and Files(**{name: Path(one) for name, one in plain["files"].items()})
    return PeerSettings(**{**plain, "peers": tuple(plain["peers"]), "files": files})


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is no address: expected like 10.0.0.7:9465")
    return host.removeprefix("[").removesuffix("]"), int(port)
