"""The pod's volumes that injection adds, and where the sidecar mounts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from keepstep.compile_cache import POD_NAME
from keepstep.wire.member_reports import AUDIENCE
from keepstep_operator.api.pod import Placement, PodRefusedError
from keepstep_operator.api.policy import EmptyDir, Ephemeral, HostPath, Policy, PolicyVolume
from keepstep_operator.api.quantities import format_bytes
from keepstep_operator.injection.remote_tiers import (
    HOST_ARCHIVE,
    HOST_ROOT,
    find_host_archive_directory,
    tier_mounts,
    tier_volumes,
)
from keepstep_operator.names import (
    ARCHIVE_VOLUME,
    COMPILE_CACHE_PATH,
    GROUP_ID,
    HUGE_PATH,
    HUGE_VOLUME,
    MEMORY_PATH,
    MEMORY_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
    TRUST_PATH,
    TRUST_VOLUME,
    VOLUME_PREFIX,
    VOLUMES_PATH,
)
from keepstep_operator.object_body import Body

_BESIDE_SLOTS_BYTES: Final = 16 << 20
"""For the socket, records, and the slots' own pages of metadata."""
_TOKEN_S: Final = 6 * 3600
"""The life of a token. The kubelet renews it after four fifths of it, so it lasts for an hour when
the API server is away."""
_READABLE: Final = 0o444
"""The kubelet narrows this mode to 0600 or 0640 if the pod has one user, or an fsGroup."""
_OWNED_BY_FS_GROUP: Final = ("persistentVolumeClaim", "ephemeral", "csi")


def pod_volumes(policy: Policy) -> list[Body]:
    """The volumes to add to `spec.volumes`."""
    local = ({"name": VOLUME_PREFIX + each.name, **_source(each)} for each in policy.volumes)
    trust = {"name": TRUST_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    return [*_memory(policy), token_volume(TOKEN_VOLUME), trust, *local, *tier_volumes(policy)]


def sidecar_mounts(policy: Policy, placement: Placement) -> list[Body]:
    """The sidecar's mounts."""
    return [
        *memory_mounts(policy),
        {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True},
        {"name": TRUST_VOLUME, "mountPath": TRUST_PATH},
        *(_mount(volume, policy, placement) for volume in policy.volumes),
        *tier_mounts(policy),
    ]


def memory_mounts(policy: Policy) -> list[Body]:
    """The mounts of the shared memory, the same in the sidecar and in the training container."""
    small = {"name": MEMORY_VOLUME, "mountPath": MEMORY_PATH}
    return [small, *([{"name": HUGE_VOLUME, "mountPath": HUGE_PATH}] if policy.huge_bytes else [])]


def compile_cache_mounts(policy: Policy, placement: Placement) -> list[Body]:
    """The training container's mount for compile caches: a directory of this pod's alone."""
    if (volume := policy.compile_cache_volume) is None:
        return []
    on_host = isinstance(volume.source, HostPath)
    path = f"{_below(policy, placement)}/{POD_NAME}" if on_host else POD_NAME
    name = VOLUME_PREFIX + volume.name
    return [{"name": name, "mountPath": COMPILE_CACHE_PATH, "subPath": path}]


def cache_arguments(policy: Policy, placement: Placement) -> list[str]:
    """The init container's arguments for this directory. Elsewhere than on a hostPath the kubelet
    makes it, and it goes with the pod."""
    volume = policy.compile_cache_volume
    if volume is None or not isinstance(volume.source, HostPath):
        return []
    path = f"{HOST_ROOT}/{volume.name}/{_below(policy, placement)}/{POD_NAME}"
    return ["--compile-cache", path, "--compile-cache-limit", str(policy.compile_cache_bytes)]


def paths_of(policy: Policy) -> list[str]:
    """The directories of the policy's volumes, as the sidecar sees them."""
    return [f"{VOLUMES_PATH}/{volume.name}" for volume in policy.volumes]


def host_mounts(policy: Policy) -> list[Body]:
    """The init container's mounts: each whole hostPath."""
    local = [
        {"name": VOLUME_PREFIX + volume.name, "mountPath": f"{HOST_ROOT}/{volume.name}"}
        for volume in _on_host(policy)
    ]
    if find_host_archive_directory(policy) is None:
        return local
    return [*local, {"name": ARCHIVE_VOLUME, "mountPath": HOST_ARCHIVE}]


def prepared_paths(policy: Policy, placement: Placement) -> list[str]:
    """The directories that the init container makes: this pod's below each hostPath, and the
    namespace's in an archive that is a directory of the nodes."""
    below = _below(policy, placement)
    local = [f"{HOST_ROOT}/{volume.name}/{below}" for volume in _on_host(policy)]
    shared = find_host_archive_directory(policy)
    return local if shared is None else [*local, shared]


def file_system_group(policy: Policy, spec: Body) -> int | None:
    """The fsGroup that the pod must get, since an ephemeral claim and huge pages would otherwise
    belong to root. None: do not change it.

    Raises PodRefusedError if an fsGroup would change the owner of the user's own claims.
    """
    ephemeral = any(isinstance(volume.source, Ephemeral) for volume in policy.volumes)
    if not ephemeral and not policy.huge_bytes:
        return None
    if (spec.get("securityContext") or {}).get("fsGroup") is not None:
        return None
    for volume in spec.get("volumes") or []:
        if any(kind in volume for kind in _OWNED_BY_FS_GROUP):
            raise PodRefusedError(
                "NoFsGroup",
                f"the policy's {'ephemeral volume needs' if ephemeral else 'huge pages need'}"
                " spec.securityContext.fsGroup, which would"
                f" also give the files of volume {volume.get('name')!r} to that group; set fsGroup"
                f" in the pod template ({GROUP_ID}, or one of your own)",
            )
    return GROUP_ID


def _memory(policy: Policy) -> Iterator[Body]:
    size = format_bytes(policy.memory_limit_bytes + _BESIDE_SLOTS_BYTES)
    yield {"name": MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    if policy.huge_bytes:
        yield {"name": HUGE_VOLUME, "emptyDir": {"medium": "HugePages-2Mi"}}


def token_volume(name: str) -> Body:
    """The volume with a token of the pod's service account for the reports API."""
    source = {"audience": AUDIENCE, "expirationSeconds": _TOKEN_S, "path": "token"}
    projected = {"defaultMode": _READABLE, "sources": [{"serviceAccountToken": source}]}
    return {"name": name, "projected": projected}


def _source(volume: PolicyVolume) -> Body:
    match volume.source:
        case EmptyDir(size_limit_bytes=limit):
            return {"emptyDir": {} if limit is None else {"sizeLimit": format_bytes(limit)}}
        case HostPath(path=path):
            return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        case Ephemeral(size_bytes=size, storage_class=storage_class):
            return {"ephemeral": {"volumeClaimTemplate": {"spec": _claim(size, storage_class)}}}


def _claim(size_bytes: int, storage_class: str | None) -> Body:
    claim: Body = {
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem",
        "resources": {"requests": {"storage": format_bytes(size_bytes)}},
    }
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    return claim


def _mount(volume: PolicyVolume, policy: Policy, placement: Placement) -> Body:
    mount = {"name": VOLUME_PREFIX + volume.name, "mountPath": f"{VOLUMES_PATH}/{volume.name}"}
    if isinstance(volume.source, HostPath):
        mount["subPath"] = _below(policy, placement)
    return mount


def _below(policy: Policy, placement: Placement) -> str:
    """The pod's directory below a hostPath. All three parts were checked to be DNS labels or a
    number, so the path cannot leave the hostPath."""
    return f"{policy.namespace}/{placement.run_key}/{placement.node_rank}"


def _on_host(policy: Policy) -> Iterator[PolicyVolume]:
    return (volume for volume in policy.volumes if isinstance(volume.source, HostPath))
