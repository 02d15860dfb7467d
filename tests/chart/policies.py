"""CheckpointPolicies that the API server must take, and that it must refuse, with its words."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.chart.charts import Object

_EMPTY: Object = {"name": "scratch", "emptyDir": {}}


@dataclass(frozen=True)
class Case:
    """`spec` is the whole spec; `told` is part of what the refusal says, '' when it is taken."""

    name: str
    spec: Object
    told: str = ""


def spec(**fields: Any) -> Object:
    """The least spec, with some fields set."""
    return {"memory": {"limit": "1Gi"}, "volumes": [copy.deepcopy(_EMPTY)], **fields}


def volume(**fields: Any) -> Object:
    """A spec with one volume that has these fields beside its name."""
    return spec(volumes=[{"name": "v", **fields}])


def archive(*, retention: Object | None = None, **fields: Any) -> Object:
    """A spec with an archive of these fields."""
    kept = {} if retention is None else {"retention": retention}
    return spec(archive=fields, **kept)


TAKEN = [
    Case("the least", spec()),
    Case("numbers are bytes", spec(memory={"limit": 1 << 30, "slots": 2})),
    Case("fixed", spec(persist={"mode": "Fixed", "every": 100}, stage={"every": 5})),
    Case("half a drive a day", spec(persist={"driveWritesPerDay": "0.5"})),
    Case("a host path", volume(hostPath={"path": "/mnt/nvme0/keep..step"}, capacity="400Gi")),
    Case("a claim", volume(ephemeral={"size": "200Gi", "storageClassName": "local"})),
    Case("a limited directory", volume(emptyDir={"sizeLimit": "100Gi"})),
    Case("the longest flush", spec(flushTimeout="1m60s", runTTL="8760h")),
    Case("whole CPUs", spec(sidecar={"resources": {"cpu": 2, "memory": "1Gi"}})),
    Case("scientific", spec(sidecar={"bytesPerSecondLimit": "1e9"})),
    Case("a limit of CPU", spec(sidecar={"resources": {"cpu": "100m", "cpuLimit": 1}})),
    Case("as much as asked for", spec(sidecar={"resources": {"cpu": 2, "cpuLimit": "2000m"}})),
    Case("other ports", spec(sidecar={"ports": {"metrics": 9464, "peer": 65535}})),
    Case("one other port", spec(sidecar={"ports": {"peer": 26742}})),
    Case("peers", spec(peers={})),
    Case(
        "peers in other zones",
        spec(peers={"replicas": 2, "topologyKey": "topology.kubernetes.io/zone",
                    "bytesPerSecondLimit": "500Mi"}),
    ),
    Case("an archive", archive(s3={"bucket": "ckpt"})),
    Case(
        "an archive of one's own",
        archive(
            retention={"archive": {"last": 3, "every": "6h"}},
            s3={"bucket": "ckpt", "prefix": "a/b", "endpoint": "http://10.0.0.1:7070",
                "region": "eu-1", "credentialsSecretRef": {"name": "s3"}},
            every=100,
        ),
    ),
    Case("Google's", archive(gcs={"bucket": "ckpt", "credentialsSecretRef": {"name": "gcs"}})),
    Case("Azure's", archive(azure={"container": "ckpt", "account": "us"})),
    Case("a shared claim", archive(directory={"claimName": "archive"})),
    Case("a shared directory", archive(directory={"path": "/mnt/nfs/keepstep"})),
]  # fmt: skip

REFUSED = [
    Case("two sources", volume(emptyDir={}, hostPath={"path": "/mnt/a"}), "exactly one of"),
    Case("no source", volume(capacity="1Gi"), "exactly one of"),
    Case("dots", volume(hostPath={"path": "/mnt/../etc"}), "must not contain '..'"),
    Case("dots at the end", volume(hostPath={"path": "/mnt/.."}), "must not contain '..'"),
    Case("relative", volume(hostPath={"path": "mnt/nvme0"}), "must be absolute"),
    Case("root", volume(hostPath={"path": "//"}), "must not be the root"),
    Case("fixed without every", spec(persist={"mode": "Fixed"}), "needs persist.every"),
    Case("every without fixed", spec(persist={"every": 100}), "no effect with persist.mode Auto"),
    Case("no writes at all", spec(persist={"driveWritesPerDay": "0.0"}), "should match"),
    Case(
        "wear without auto",
        spec(persist={"mode": "Fixed", "every": 9, "driveWritesPerDay": "1"}),
        "no effect with persist.mode Fixed",
    ),
    Case(
        "off the grid",
        spec(persist={"mode": "Fixed", "every": 7}, stage={"every": 5}),
        "multiple of stage.every",
    ),
    Case("same names", spec(volumes=[_EMPTY, _EMPTY]), "Duplicate value"),
    Case("no volumes", spec(volumes=[]), "at least 1 items"),
    Case("one slot", spec(memory={"limit": "1Gi", "slots": 1}), "greater than or equal to 2"),
    Case("no limit", spec(memory={}), "limit: Required value"),
    Case("no unit", spec(memory={"limit": 32}), "write a unit"),
    Case("no unit in a string", spec(memory={"limit": "32"}), "write a unit"),
    Case("no quantity", spec(memory={"limit": "32 Gi"}), "should match"),
    Case("negative", spec(memory={"limit": "-1Gi"}), "should match"),
    Case("too long a flush", spec(flushTimeout="121s"), "from 1s to 120s"),
    Case("no duration", spec(flushTimeout="1 minute"), "should match"),
    Case("no time at all", spec(restore={"timeout": "0s"}), "from 1s to 24h"),
    Case("a short memory of runs", spec(runTTL="59s"), "from 1m to 8760h"),
    Case("too little CPU", spec(sidecar={"resources": {"cpu": "1m"}}), "from 10m to 1024"),
    Case(
        "a limit below the request",
        spec(sidecar={"resources": {"cpu": "1", "cpuLimit": "500m"}}),
        "must be at least sidecar.resources.cpu",
    ),
    Case(
        "a limit below the default request",
        spec(sidecar={"resources": {"cpuLimit": "50m"}}),
        "must be at least sidecar.resources.cpu",
    ),
    Case("a port of the system", spec(sidecar={"ports": {"metrics": 443}}), "greater than or"),
    Case("one port for two", spec(sidecar={"ports": {"peer": 26740}}), "must differ"),
    Case("too little memory", spec(sidecar={"resources": {"memory": "1Mi"}}), "at least 64Mi"),
    Case("an unknown word", spec(restore={"verify": "None"}), "Unsupported value"),
    Case("no peers", spec(peers={"replicas": 0}), "greater than or equal to 1"),
    Case("no label", spec(peers={"topologyKey": "a/b/c"}), "should match"),
    Case("nowhere", archive(every=100), "exactly one of s3, gcs, azure and directory"),
    Case(
        "two places",
        archive(s3={"bucket": "a"}, directory={"claimName": "a"}),
        "exactly one of s3, gcs, azure and directory",
    ),
    Case("no bucket", archive(s3={}), "bucket: Required value"),
    Case("a way out", archive(s3={"bucket": "a", "prefix": "../b"}), "should match"),
    Case("no URL", archive(s3={"bucket": "a", "endpoint": "s3.example"}), "should match"),
    Case("no account", archive(azure={"container": "a"}), "account: Required value"),
    Case("no directory", archive(directory={}), "exactly one of claimName and path"),
    Case(
        "two directories",
        archive(directory={"claimName": "a", "path": "/a"}),
        "exactly one of claimName and path",
    ),
    Case("dots in an archive", archive(directory={"path": "/a/.."}), "must not contain '..'"),
    Case(
        "what is kept nowhere",
        spec(retention={"archive": {"last": 3}}),
        "no effect without archive",
    ),
    Case(
        "kept twice",
        archive(retention={"archive": {"every": "6h", "everySteps": 9}}, s3={"bucket": "a"}),
        "everySteps or every, not both",
    ),
    Case(
        "kept twice on the volumes",
        spec(retention={"local": {"every": "6h", "everySteps": 9}}),
        "retention.local takes everySteps or every, not both",
    ),
    Case(
        "kept for too long on the volumes",
        spec(retention={"local": {"last": 1, "every": "9000h"}}),
        "retention.local.every must be from 1m to 8760h",
    ),
    Case(
        "kept for a moment",
        archive(retention={"archive": {"every": "1s"}}, s3={"bucket": "a"}),
        "from 1m to 8760h",
    ),
]
