"""What the sidecar gets for the tiers beyond its pod: peers and an archive.

Credentials go from a Secret to the sidecar alone; a training container never sees them. A missing
Secret, or a missing key, does not keep a pod from starting: the sidecar says what it lacks.
"""

from __future__ import annotations

from typing import Final

from keepstep_operator.api.policy import Policy
from keepstep_operator.api.tiers import CREDENTIALS, ArchiveBucket, ArchiveDirectory
from keepstep_operator.injection.ports import Ports
from keepstep_operator.names import ARCHIVE_PATH, ARCHIVE_VOLUME
from keepstep_operator.object_body import Body

HOST_ROOT: Final = "/host"
"""The directory below which the init container mounts each whole hostPath."""
HOST_ARCHIVE: Final = "/host-archive"
"""Where it mounts an archive that is a directory of the nodes. Not below `HOST_ROOT`, where the
policy chooses the names."""

POD_IP: Final = "KEEPSTEP_POD_IP"

Settings = dict[str, str | int | None]


def make_environment(settings: Settings) -> list[Body]:
    """The variables with these values. Those that are None are left out."""
    given = {name: str(value) for name, value in settings.items() if value is not None}
    return [{"name": name, "value": value} for name, value in given.items()]


def environment_of(policy: Policy, ports: Ports) -> list[Body]:
    """The sidecar's variables for the archive and for peers."""
    return [*_of_archive(policy), *_of_peers(policy, ports)]


def tier_volumes(policy: Policy) -> list[Body]:
    """The pod's volume for an archive that is a directory."""
    directory = _directory(policy)
    if directory is None:
        return []
    if directory.claim is not None:
        source: Body = {"persistentVolumeClaim": {"claimName": directory.claim}}
    else:
        source = {"hostPath": {"path": directory.path, "type": "DirectoryOrCreate"}}
    return [{"name": ARCHIVE_VOLUME, **source}]


def tier_mounts(policy: Policy) -> list[Body]:
    """The sidecar's mount of it. Namespaces share a directory of the nodes, so each has its own
    subdirectory."""
    directory = _directory(policy)
    if directory is None:
        return []
    mount: Body = {"name": ARCHIVE_VOLUME, "mountPath": ARCHIVE_PATH}
    return [mount if directory.claim is not None else {**mount, "subPath": policy.namespace}]


def find_host_archive_directory(policy: Policy) -> str | None:
    """The namespace's directory of the archive, at the path where the init container makes it; None
    unless the archive is a directory of the nodes."""
    directory = _directory(policy)
    if directory is None or directory.path is None:
        return None
    return f"{HOST_ARCHIVE}/{policy.namespace}"


def _directory(policy: Policy) -> ArchiveDirectory | None:
    return policy.archive.directory if policy.archive is not None else None


def _of_archive(policy: Policy) -> list[Body]:
    if (archive := policy.archive) is None:
        return []
    bucket = archive.bucket
    settings: Settings = {
        "KEEPSTEP_ARCHIVE": ARCHIVE_PATH if bucket is None else bucket.url(policy.namespace),
        "KEEPSTEP_ARCHIVE_EVERY": archive.every,
        "KEEPSTEP_ARCHIVE_KEEP": archive.kept.last,
        "KEEPSTEP_ARCHIVE_KEEP_EVERY": archive.kept.kept_interval_text,
        "KEEPSTEP_ARCHIVE_ENDPOINT": bucket.endpoint if bucket else None,
        "KEEPSTEP_ARCHIVE_REGION": bucket.region if bucket else None,
        "AZURE_STORAGE_ACCOUNT_NAME": bucket.account if bucket else None,
    }
    return [*make_environment(settings), *(_credentials(bucket) if bucket is not None else ())]


def _credentials(bucket: ArchiveBucket) -> list[Body]:
    if bucket.secret is None:
        return []
    return [
        {
            "name": key,
            "valueFrom": {"secretKeyRef": {"name": bucket.secret, "key": key, "optional": True}},
        }
        for key in CREDENTIALS[bucket.kind]
    ]


def _of_peers(policy: Policy, ports: Ports) -> list[Body]:
    """The sidecar's variables for the other pods of the run. All pods serve: node rank 0 leads, and
    a pod that moved fetches from the others what it left. The pod's address comes before the
    variables that refer to it; otherwise `$(...)` would not be replaced."""
    peers = policy.peers
    settings: Settings = {
        "KEEPSTEP_PEER_LISTEN": f":{ports.peer}",
        "KEEPSTEP_PEER_ADVERTISE": f"$({POD_IP}):{ports.peer}",
        "KEEPSTEP_PEER_REPLICAS": peers.replicas if peers is not None else 0,
        "KEEPSTEP_PEER_BYTES_PER_SECOND": peers.bytes_per_second if peers is not None else None,
    }
    return [pod_address(), *make_environment(settings)]


def pod_address() -> Body:
    """The variable `POD_IP`."""
    return {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
