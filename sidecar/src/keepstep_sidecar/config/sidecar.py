"""What a sidecar is told when it starts. Constant for the life of the process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from keepstep.core.retention import Retention
from keepstep.errors import UsageError
from keepstep.wire.reports import PATH
from keepstep_sidecar.config.archive import ArchiveConfig
from keepstep_sidecar.config.fork import Fork, require_archive
from keepstep_sidecar.config.peers import PeerSettings
from keepstep_sidecar.config.restore_from import Wish
from keepstep_sidecar.config.verify import Verify

_LONGEST_SOCKET_PATH = 107
"""`sun_path` of a unix socket, without its closing zero (unix(7))."""


_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def check_run(name: str) -> None:
    """The name of a run is that of a directory on each volume. Raises UsageError for any other."""
    if not _RUN.fullmatch(name):
        raise UsageError(
            f"--run {name!r} cannot name a run: use letters, digits, '.', '_' and '-', and begin"
            " with a letter or digit"
        )


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Whom to tell of this pod: an operator that sees the whole run.

    `ca`: PEM text, the only authorities that are trusted. `token_file`: read anew for each report,
    because Kubernetes replaces it.
    """

    url: str
    ca: str = field(repr=False)
    token_file: Path

    def __post_init__(self) -> None:
        """Raises UsageError for an address to which no token may be sent."""
        if not self.url.startswith("https://"):
            raise UsageError(f"--report-url {self.url}: the token goes over https:// only")

    @property
    def address(self) -> str:
        """Where reports go; an URL without a path means the one that is agreed on."""
        without = urlsplit(self.url).path in ("", "/")
        return self.url.rstrip("/") + PATH if without else self.url


@dataclass(frozen=True, kw_only=True)
class Config:
    """`volumes`: directories that hold runs; this run's root is `<volume>/<run>`.

    `memory_limit_bytes`: for the slots of all ranks of this machine; None: what the tmpfs has.
    `keep`: which committed steps stay on local volumes. `capacity_bytes`: limit of each volume.
    `bytes_per_second`: limit of all writes together. `linger_s`: end by itself when no trainer was
    there for so long, and the process `owner_pid` is gone; None: never. `reporting` None: nobody
    but this sidecar sees the run, so its ranks are all there are, unless a trainer says otherwise.
    `wish`: the step that the next epoch shall go on from. `fork`: the step of another run that this
    one begins from.
    """

    run: str
    memory_dir: Path
    volumes: tuple[Path, ...]
    slots: int = 4
    memory_limit_bytes: int | None = None
    stage_every: int = 1
    persist_every: int = 1
    keep: Retention = field(default_factory=Retention)
    capacity_bytes: int | None = None
    io_threads: int = 4
    bytes_per_second: int | None = None
    verify: Verify = Verify.FULL
    flush_timeout_s: float = 25.0
    linger_s: float | None = None
    owner_pid: int | None = None
    metrics_port: int | None = None
    reporting: Reporting | None = None
    archive: ArchiveConfig | None = None
    peers: PeerSettings | None = None
    wish: Wish | None = None
    fork: Fork | None = None

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        check_run(self.run)
        if not self.volumes:
            raise UsageError("a sidecar needs at least one volume: pass --volume DIR")
        if self.slots < 2:
            raise UsageError(f"--slots {self.slots}: a rank needs at least 2, 4 are better")
        if min(self.stage_every, self.persist_every, self.io_threads) < 1:
            raise UsageError("--stage-every, --persist-every, --io-threads start at 1")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise UsageError("--bytes-per-second starts at 1; leave it out for no limit")
        if self.peers is not None and self.peers.files is None and self.reporting is None:
            raise UsageError(
                "--peer-listen without --report-url needs certificates: give --peer-cert,"
                " --peer-key and --peer-ca"
            )
        if self.fork is not None:
            require_archive(self.fork, self.archive)
        if len(str(self.socket).encode()) > _LONGEST_SOCKET_PATH:
            raise UsageError(
                f"{self.socket}: a unix socket's path has at most {_LONGEST_SOCKET_PATH} bytes;"
                " choose a shorter --memory-dir"
            )

    @property
    def socket(self) -> Path:
        """Where trainers and the `keepstep` command find this sidecar."""
        return self.memory_dir / "sidecar.sock"

    @property
    def persist_base(self) -> int:
        """Every so many steps one is persisted. Only what is staged can be, so the persist grid
        is a multiple of the stage grid."""
        return -(-self.persist_every // self.stage_every) * self.stage_every
