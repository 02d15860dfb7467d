"""Where the archive is and what is sent there: `--archive` and its companions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from keepstep.core.retention import Retention
from keepstep.core.schedule import on_grid
from keepstep.errors import UsageError

SCHEMES = ("s3", "gs", "az", "file")
_OBJECT_STORES = SCHEMES[:3]


@dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    """`url`: `s3://bucket/prefix`, `gs://...`, `az://container/prefix`, `file:///dir` or a path.

    `every`: steps that are multiples of it are sent (see `base`). `endpoint` and `region`: of an S3
    store that is not Amazon's. Credentials are never configured here. They come from the
    environment, in the variables of each store (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
    AZURE_STORAGE_ACCOUNT_KEY), or from the machine's own identity.
    """

    url: str
    every: int = 1000
    endpoint: str | None = None
    region: str | None = None
    retention: Retention = field(default_factory=lambda: Retention(last=3))

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        if self.every < 1:
            raise UsageError(f"--archive-every {self.every}: starts at 1")
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise UsageError(f"--archive {self.url}: not one of {known} or a directory")
        if self.scheme in _OBJECT_STORES and not urlsplit(self.url).netloc:
            raise UsageError(
                f"--archive {self.url}: names no bucket, like {self.scheme}://ckpt/gpt"
            )
        if self.scheme == "file" and not self.directory.is_absolute():
            raise UsageError(f"--archive {self.url}: write it like file:///mnt/archive")
        if self.endpoint is not None and self.scheme != "s3":
            raise UsageError("--archive-endpoint goes with an s3:// archive only")

    @property
    def scheme(self) -> str:
        """The kind of store. A path without a scheme is a directory (`file`)."""
        return self.url.partition("://")[0] if "://" in self.url else "file"

    @property
    def directory(self) -> Path:
        """The directory of the archive. For `file` only."""
        if "://" not in self.url:
            return Path(self.url).absolute()
        parts = urlsplit(self.url)
        return Path(parts.netloc + parts.path)

    @property
    def bucket(self) -> str:
        """The bucket or container. For object stores only."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """What all names in the bucket begin with, without leading and trailing slashes."""
        return urlsplit(self.url).path.strip("/")

    def base(self, persist_base: int) -> int:
        """Multiples of this many steps are sent: `every`, rounded up to the grid of durable
        steps."""
        return on_grid(self.every, persist_base)
