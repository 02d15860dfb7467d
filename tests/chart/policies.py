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


TAKEN = [
    Case("the least", spec()),
    Case("numbers are bytes", spec(memory={"limit": 1 << 30, "slots": 2})),
    Case("fixed", spec(persist={"mode": "Fixed", "every": 100}, stage={"every": 5})),
    Case("a host path", volume(hostPath={"path": "/mnt/nvme0/keep..step"}, capacity="400Gi")),
    Case("a claim", volume(ephemeral={"size": "200Gi", "storageClassName": "local"})),
    Case("a limited directory", volume(emptyDir={"sizeLimit": "100Gi"})),
    Case("the longest flush", spec(flushTimeout="1m60s", runTTL="8760h")),
    Case("whole CPUs", spec(sidecar={"resources": {"cpu": 2, "memory": "1Gi"}})),
    Case("scientific", spec(sidecar={"bytesPerSecondLimit": "1e9"})),
]

REFUSED = [
    Case("two sources", volume(emptyDir={}, hostPath={"path": "/mnt/a"}), "exactly one of"),
    Case("no source", volume(capacity="1Gi"), "exactly one of"),
    Case("dots", volume(hostPath={"path": "/mnt/../etc"}), "must not contain '..'"),
    Case("dots at the end", volume(hostPath={"path": "/mnt/.."}), "must not contain '..'"),
    Case("relative", volume(hostPath={"path": "mnt/nvme0"}), "must be absolute"),
    Case("root", volume(hostPath={"path": "//"}), "must not be the root"),
    Case("fixed without every", spec(persist={"mode": "Fixed"}), "needs persist.every"),
    Case("every without fixed", spec(persist={"every": 100}), "no effect with persist.mode Auto"),
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
    Case("too little memory", spec(sidecar={"resources": {"memory": "1Mi"}}), "at least 64Mi"),
    Case("an unknown word", spec(restore={"verify": "None"}), "Unsupported value"),
]
