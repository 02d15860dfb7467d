"""A CheckpointPolicy as values: parsed once on arrival, checked again, and with defaults filled in
again.

The CRD's schema has the same rules (crds/keepstep.dev_checkpointpolicies.yaml). They are repeated
here because an object may be older than a default or a rule of the schema, and because admission
and reconcile must agree on what a policy means. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar

from keepstep.core.retention import Retention
from keepstep_operator.api.fields import Fields, PolicyError
from keepstep_operator.api.run_status import PolicyStatus
from keepstep_operator.api.tiers import (
    Archive,
    PeerSpec,
    parse_archive,
    parse_peers,
    parse_retention,
)
from keepstep_operator.names import SIDECAR_METRICS_PORT, SIDECAR_PEER_PORT
from keepstep_operator.object_body import Body

_VOLUME_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_WRITES_PER_DAY = re.compile(r"^(0\.[0-9]*[1-9][0-9]*|[1-9][0-9]*(\.[0-9]+)?)$")
_SOURCES = ("emptyDir", "hostPath", "ephemeral")
_MOST_VOLUMES = 8
_LONGEST_FLUSH_S = 120
_HUGE_PAGE_BYTES = 2 << 20
_FULL_BEFORE_EVICTION = 0.95
"""The part of an emptyDir's sizeLimit that keepstep uses. The kubelet evicts the pod when it uses
more than the limit, and checks this only now and then."""


class VolumeKind(enum.StrEnum):
    """The kind of a policy's volume. It decides what the shards on it outlive."""

    EMPTY_DIR = "emptyDir"
    HOST_PATH = "hostPath"
    EPHEMERAL = "ephemeral"


class IntervalMode(str, enum.Enum):
    """Which steps are staged, or become durable: as many as their cost allows, or every N-th."""

    AUTO = "Auto"
    FIXED = "Fixed"


class Accounting(str, enum.Enum):
    """How the sidecar's requests are counted: added to the pod's, or carved out of the training
    container's."""

    ADD = "Add"
    CARVE_OUT = "CarveOut"


class SlotPageSize(str, enum.Enum):
    """The pages of slots: small ones, or huge pages of 2 MiB. A pod that requests more huge pages
    than any node has is never scheduled."""

    NONE = "None"
    TWO_MIB = "2Mi"


class OnLoss(str, enum.Enum):
    """What a run does when a part of every step is gone for good: begin again, or wait for a
    person."""

    RESTART = "Restart"
    WAIT = "Wait"


@dataclass(frozen=True, kw_only=True)
class EmptyDir:
    """The node's own disk, for the life of the pod."""

    kind: ClassVar = VolumeKind.EMPTY_DIR
    size_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostPath:
    """A directory of the node; it outlives the pod. `path`: absolute, in normal form."""

    kind: ClassVar = VolumeKind.HOST_PATH
    path: str


@dataclass(frozen=True, kw_only=True)
class Ephemeral:
    """A claim that is created and deleted with the pod. `storage_class`: None is the cluster's
    default."""

    kind: ClassVar = VolumeKind.EPHEMERAL
    size_bytes: int
    storage_class: str | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyVolume:
    """One local drive of each pod. `capacity_bytes`: how much of it the policy allows keepstep to
    use."""

    name: str
    source: EmptyDir | HostPath | Ephemeral
    capacity_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """The capacity, or less if filling it would get the pod evicted; None: no limit."""
        limits = [self.capacity_bytes]
        if isinstance(self.source, EmptyDir) and self.source.size_limit_bytes:
            limits.append(int(self.source.size_limit_bytes * _FULL_BEFORE_EVICTION))
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a CheckpointPolicy asks for. Times in seconds, sizes in bytes, CPU in millicores.

    `memory_limit_bytes`: for the slots of all ranks of one pod. `slots`: None for as many as the
    sidecar finds needed. The sidecar gets `overhead_bytes`
    in addition. `cpu_limit_millicores`: None for no limit. `stage_every`,
    `persist_every`: None with mode Auto.
    `drive_writes_per_day`: a number, as it is written. `keep`: the committed steps that stay on
    volumes. `compile_cache_bytes`: 0 keeps none. `spec`: as in the object, for snapshots; no code
    reads fields from it.
    """

    namespace: str
    name: str
    generation: int
    memory_limit_bytes: int
    volumes: tuple[PolicyVolume, ...]
    slots: int | None = None
    huge_pages: SlotPageSize = SlotPageSize.NONE
    stage_every: int | None = 1
    persist_every: int | None = None
    drive_writes_per_day: str | None = None
    accounting: Accounting = Accounting.ADD
    keep: Retention = field(default_factory=Retention)
    restore_timeout_s: int = 600
    cpu_millicores: int = 100
    cpu_limit_millicores: int | None = None
    overhead_bytes: int = 256 << 20
    metrics_port: int = SIDECAR_METRICS_PORT
    peer_port: int = SIDECAR_PEER_PORT
    io_threads: int = 16
    bytes_per_second: int | None = None
    flush_timeout_s: int = 60
    on_loss: OnLoss = OnLoss.RESTART
    run_ttl_s: int = 168 * 3600
    compile_cache_bytes: int = 4 << 30
    peers: PeerSpec | None = None
    archive: Archive | None = None
    spec: Mapping[str, Any]

    @property
    def huge_bytes(self) -> int:
        """The bytes of huge pages for each pod; 0 if the policy asks for none."""
        if self.huge_pages is not SlotPageSize.TWO_MIB:
            return 0
        return -(-self.memory_limit_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES

    @property
    def added_bytes(self) -> int:
        """How much a pod's memory request grows; 0 if it is carved out of the trainer's."""
        slots = 0 if self.huge_bytes else self.memory_limit_bytes
        added = slots + self.overhead_bytes
        return added if self.accounting is Accounting.ADD else 0

    @property
    def host_paths(self) -> tuple[str, ...]:
        """Every directory of the node that the policy uses."""
        local = [
            volume.source.path for volume in self.volumes if isinstance(volume.source, HostPath)
        ]
        shared = self.archive.directory.path if self.archive and self.archive.directory else None
        return (*local, *([shared] if shared else []))

    @property
    def compile_cache_volume(self) -> PolicyVolume | None:
        """Where the trainers' compile caches lie: on none whose sizeLimit they could exceed, since
        the kubelet would evict the pod."""
        fit = (
            volume
            for volume in self.volumes
            if not (isinstance(volume.source, EmptyDir) and volume.source.size_limit_bytes)
        )
        return next(fit, None) if self.compile_cache_bytes else None

    @property
    def starts_fresh_after_loss(self) -> bool:
        """Whether a run begins again when a part of every step is gone: only where each volume goes
        with its pod, so that nothing can come back."""
        fleeting = all(volume.source.kind is not VolumeKind.HOST_PATH for volume in self.volumes)
        return fleeting and self.on_loss is OnLoss.RESTART

    @property
    def volume_limit_bytes(self) -> int | None:
        """The limit for each volume: the smallest of all, since the sidecar has one setting for
        all. None: no limit."""
        return min(
            (volume.usable_bytes for volume in self.volumes if volume.usable_bytes), default=None
        )


def parse_policy(body: Body) -> Policy:
    """Parse a CheckpointPolicy object. Raises a PolicyError that names the first wrong field."""
    metadata = body.get("metadata") or {}
    spec = Fields("", body.get("spec") or {})
    persist, memory, restore = spec.child("persist"), spec.child("memory"), spec.child("restore")
    sidecar = spec.child("sidecar")
    resources = sidecar.child("resources")
    cpu = resources.millicores("cpu", "100m")
    metrics_port, peer_port = _ports(sidecar.child("ports"))
    stage_every = _stage(spec.child("stage"))
    volumes, archive = _volumes(spec.value("volumes")), parse_archive(spec)
    _check_apart(volumes, archive)
    return Policy(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        generation=int(metadata.get("generation") or 0),
        memory_limit_bytes=memory.size("limit", reason="InvalidMemory"),
        volumes=volumes,
        slots=memory.optional_number("slots", least=1, most=16),
        huge_pages=memory.choice("hugePages", SlotPageSize.NONE),
        stage_every=stage_every,
        persist_every=_persist(persist, stage_every),
        drive_writes_per_day=_drive_writes_per_day(persist),
        accounting=spec.choice("accounting", Accounting.ADD),
        keep=parse_retention(spec.child("retention").child("local"), 2, most=1000),
        restore_timeout_s=restore.duration("timeout", "10m", least=1, most=24 * 3600),
        cpu_millicores=cpu,
        cpu_limit_millicores=_cpu_limit(resources, cpu),
        metrics_port=metrics_port,
        peer_port=peer_port,
        overhead_bytes=resources.size("memory", "256Mi", reason="InvalidMemory"),
        io_threads=sidecar.number("ioThreadsPerVolume", 16, least=1, most=64),
        bytes_per_second=sidecar.optional_size("bytesPerSecondLimit"),
        flush_timeout_s=spec.duration("flushTimeout", "60s", least=1, most=_LONGEST_FLUSH_S),
        on_loss=spec.choice("onLoss", OnLoss.RESTART),
        run_ttl_s=spec.duration("runTTL", "168h", least=60, most=8760 * 3600),
        compile_cache_bytes=_compile_cache(spec.child("compileCache")),
        peers=parse_peers(spec),
        archive=archive,
        spec=spec.fields,
    )


def parse_status_policy(written: PolicyStatus | None, namespace: str) -> Policy | None:
    """The policy in a run's status; None if there is none, or if a release with other rules wrote
    it. Its directories are not checked again: they were allowed when it was written."""
    if written is None:
        return None
    metadata = {"namespace": namespace, "name": written.name, "generation": written.generation}
    try:
        return parse_policy({"metadata": metadata, "spec": dict(written.spec)})
    except PolicyError:
        return None


def require_allowed(policy: Policy, allowed: Iterable[str]) -> None:
    """Raises PolicyError (HostPathNotAllowed) if a hostPath lies below no allowed prefix."""
    allowed = tuple(allowed)
    for path in policy.host_paths:
        if any(PurePosixPath(path).is_relative_to(prefix) for prefix in allowed):
            continue
        places = ", ".join(allowed) or "none"
        shared = policy.archive.directory if policy.archive else None
        raise PolicyError(
            "archive.directory" if shared and shared.path == path else "volumes",
            f"hostPath {path} is not allowed by the administrator (allowed: {places}); use an"
            " allowed path, emptyDir or ephemeral, or have the chart value hostPaths extended",
            reason="HostPathNotAllowed",
        )


def _cpu_limit(fields: Fields, cpu: int) -> int | None:
    if fields.value("cpuLimit") is None:
        return None
    limit = fields.millicores("cpuLimit", "")
    if limit < cpu:
        raise fields.wrong("cpuLimit", f"{limit}m is less than cpu, which is {cpu}m")
    return limit


def _ports(fields: Fields) -> tuple[int, int]:
    """The ports for metrics and for peers."""
    metrics = fields.number("metrics", SIDECAR_METRICS_PORT, least=1024, most=65535)
    peer = fields.number("peer", SIDECAR_PEER_PORT, least=1024, most=65535)
    if metrics == peer:
        raise fields.wrong("peer", f"{peer} is the port for metrics, too; choose another")
    return metrics, peer


def _compile_cache(fields: Fields) -> int:
    return 0 if fields.value("limit") in (0, "0") else fields.size("limit", "4Gi")


def _stage(fields: Fields) -> int | None:
    if fields.choice("mode", IntervalMode.FIXED) is IntervalMode.FIXED:
        return fields.number("every", 1, least=1, most=1_000_000)
    if fields.value("every") is not None:
        raise fields.wrong("every", "has no effect with mode Auto; remove it")
    return None


def _persist(fields: Fields, stage_every: int | None) -> int | None:
    if fields.choice("mode", IntervalMode.AUTO) is IntervalMode.AUTO:
        return None
    if fields.value("every") is None:
        raise PolicyError("persist.every", "mode Fixed needs a number of steps, like 100")
    every = fields.number("every", 1, least=1, most=1_000_000)
    if every % (stage_every or 1):
        raise PolicyError("persist.every", f"{every} is no multiple of stage.every {stage_every}")
    return every


def _drive_writes_per_day(fields: Fields) -> str | None:
    number = fields.optional_text("driveWritesPerDay", _WRITES_PER_DAY, 'a number like "0.3"')
    if number is not None and fields.choice("mode", IntervalMode.AUTO) is IntervalMode.FIXED:
        raise fields.wrong("driveWritesPerDay", "has no effect with mode Fixed; remove it")
    return number


def _volumes(listed: object) -> tuple[PolicyVolume, ...]:
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MOST_VOLUMES:
        raise PolicyError("volumes", f"a list of 1 to {_MOST_VOLUMES} volumes is needed")
    volumes = tuple(_volume(Fields(f"volumes[{i}]", volume)) for i, volume in enumerate(listed))
    names = [volume.name for volume in volumes]
    if len(set(names)) < len(names):
        raise PolicyError("volumes", f"names must differ: {', '.join(names)}")
    return volumes


def _check_apart(volumes: Iterable[PolicyVolume], archive: Archive | None) -> None:
    shared = archive.directory.path if archive and archive.directory else None
    for volume in volumes:
        if shared is None or not isinstance(volume.source, HostPath):
            continue
        path, other = PurePosixPath(volume.source.path), PurePosixPath(shared)
        if path.is_relative_to(other) or other.is_relative_to(path):
            raise PolicyError(
                "archive.directory",
                f"path {shared} and the volume {volume.name} ({path}) are one place, or one lies in"
                " the other: the archive is to outlive the volume; name a directory apart from it",
            )


def _volume(fields: Fields) -> PolicyVolume:
    name = fields.value("name")
    if not isinstance(name, str) or not _VOLUME_NAME.fullmatch(name):
        raise fields.wrong("name", f"{name!r} is not a DNS label of at most 40 characters")
    given = [source for source in _SOURCES if fields.value(source) is not None]
    if len(given) != 1:
        raise fields.wrong("", f"exactly one of {', '.join(_SOURCES)} is needed, not {len(given)}")
    return PolicyVolume(
        name=name,
        source=_source(given[0], fields.child(given[0])),
        capacity_bytes=fields.optional_size("capacity"),
    )


def _source(kind: str, fields: Fields) -> EmptyDir | HostPath | Ephemeral:
    if kind == "emptyDir":
        return EmptyDir(size_limit_bytes=fields.optional_size("sizeLimit"))
    if kind == "ephemeral":
        storage_class = fields.value("storageClassName")
        return Ephemeral(
            size_bytes=fields.size("size"),
            storage_class=None if storage_class is None else str(storage_class),
        )
    return HostPath(path=fields.directory("path", example="/mnt/nvme0/keepstep"))
