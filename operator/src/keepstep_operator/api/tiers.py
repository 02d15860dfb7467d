"""What a policy asks for beyond the pod: copies on peers, and an archive. Pure.

Of credentials, only the name of a Secret is known here, never a value. An archive in an object
store or on the nodes is divided by namespace, since the namespace is the boundary of trust. A claim
belongs to one namespace anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from keepstep.core.retention import Retention
from keepstep_operator.api.fields import Fields

HOSTNAME: Final = "kubernetes.io/hostname"
_LABEL = re.compile(
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
_BUCKET = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,220}[A-Za-z0-9])?$")
_PREFIX = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9_.=]*(/[A-Za-z0-9][-A-Za-z0-9_.=]*)*$")
_ENDPOINT = re.compile(r"^https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._/-]*)?$")
_MOST_REPLICAS = 8
_MOST_STEPS = 1_000_000_000
_STORES: Final = ("s3", "gcs", "azure", "directory")
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azure": "az"}

CREDENTIALS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gcs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "azure": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
}
"""Keys of the Secret, any of which may be missing. The sidecar's variables have the same names."""


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """Copies of each durable shard, kept by other pods of the run. `topology_key`: a label of
    nodes; copies go to nodes with different values if there are any."""

    replicas: int = 1
    topology_key: str = HOSTNAME
    bytes_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class ArchiveBucket:
    """An object store. `kind`: s3, gcs or azure. `secret`: name of a Secret with the keys of
    CREDENTIALS; None for the credentials that the node or the service account provides."""

    kind: str
    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    account: str | None = None
    secret: str | None = None

    def url(self, namespace: str) -> str:
        """The URL below which the runs of this namespace lie."""
        parts = [part for part in (self.name, self.prefix, namespace) if part]
        return f"{_SCHEMES[self.kind]}://{'/'.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class ArchiveDirectory:
    """A file system that all nodes see: the namespace's `claim`, or the same `path` on every
    node."""

    claim: str | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The archive. It gets the committed steps whose number is a multiple of `every`. `kept`: which
    of them stay."""

    store: ArchiveBucket | ArchiveDirectory
    every: int = 1000
    kept: Retention = field(default_factory=lambda: Retention(last=3))

    @property
    def bucket(self) -> ArchiveBucket | None:
        return self.store if isinstance(self.store, ArchiveBucket) else None

    @property
    def directory(self) -> ArchiveDirectory | None:
        return self.store if isinstance(self.store, ArchiveDirectory) else None

    @property
    def where(self) -> str:
        """The archive's name for people, without the namespace."""
        if isinstance(self.store, ArchiveBucket):
            return self.store.url("")
        return f"claim {self.store.claim}" if self.store.claim else f"directory {self.store.path}"


def parse_peers(spec: Fields) -> PeerSpec | None:
    """`spec.peers`; None if it is left out. Raises PolicyError."""
    if spec.value("peers") is None:
        return None
    fields = spec.child("peers")
    return PeerSpec(
        replicas=fields.number("replicas", 1, least=1, most=_MOST_REPLICAS),
        topology_key=fields.text("topologyKey", _LABEL, "a label of nodes", default=HOSTNAME),
        bytes_per_second=fields.optional_size("bytesPerSecondLimit"),
    )


def parse_archive(spec: Fields) -> Archive | None:
    """`spec.archive` with its retention; None if it is left out. Raises PolicyError."""
    retention = spec.child("retention")
    if spec.value("archive") is None:
        if retention.value("archive") is not None:
            raise retention.wrong("archive", "has no effect without spec.archive; remove it")
        return None
    fields = spec.child("archive")
    given = [store for store in _STORES if fields.value(store) is not None]
    if len(given) != 1:
        raise fields.wrong("", f"exactly one of {', '.join(_STORES)} is needed, not {len(given)}")
    store = fields.child(given[0])
    return Archive(
        store=_directory(store) if given[0] == "directory" else _bucket(given[0], store),
        every=fields.number("every", 1000, least=1, most=_MOST_STEPS),
        kept=parse_retention(retention.child("archive"), 3, most=100_000),
    )


def parse_retention(fields: Fields, last: int, *, most: int) -> Retention:
    """Which steps of a tier stay. `last`: the default of that field. Raises PolicyError."""
    steps = fields.value("everySteps")
    every = fields.value("every")
    if steps is not None and every is not None:
        raise fields.wrong("", "takes everySteps or every, not both")
    return Retention(
        last=fields.number("last", last, least=1, most=most),
        every_steps=(
            None if steps is None else fields.number("everySteps", 1, least=1, most=_MOST_STEPS)
        ),
        every_s=None if every is None else fields.duration("every", "", least=60, most=8760 * 3600),
    )


def _bucket(kind: str, fields: Fields) -> ArchiveBucket:
    name = "container" if kind == "azure" else "bucket"
    reference = fields.value("credentialsSecretRef")
    example = "a URL like https://s3.example:9000"
    named = fields.child("credentialsSecretRef")
    secret = None if reference is None else named.text("name", _NAME, "the name of a Secret")
    return ArchiveBucket(
        kind=kind,
        name=fields.text(name, _BUCKET, f"the name of a {name}"),
        prefix=fields.optional_text("prefix", _PREFIX, "a path like team/checkpoints") or "",
        endpoint=fields.optional_text("endpoint", _ENDPOINT, example) if kind == "s3" else None,
        region=fields.optional_text("region", _BUCKET, "a region like eu-central-1"),
        account=fields.text("account", _BUCKET, "a storage account") if kind == "azure" else None,
        secret=secret,
    )


def _directory(fields: Fields) -> ArchiveDirectory:
    given = [key for key in ("claimName", "path") if fields.value(key) is not None]
    if len(given) != 1:
        raise fields.wrong("", f"exactly one of claimName and path is needed, not {len(given)}")
    if given[0] == "claimName":
        return ArchiveDirectory(claim=fields.text("claimName", _NAME, "the name of a claim"))
    return ArchiveDirectory(path=fields.directory("path", example="/mnt/nfs/keepstep"))
