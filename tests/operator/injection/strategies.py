"""Pods as users and other webhooks may have made them, and policies, for Hypothesis."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from keepstep_operator.api.policy import Policy
from tests.operator.injection.pods import ALL, EMPTY_DIR, EPHEMERAL, HOST_PATH, policy

_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
_SIZES = st.sampled_from(["64Mi", "2Gi", "1500M", "3221225472", "16Gi"])
_CPUS = st.sampled_from(["50m", "100m", "1", "2.5", "8"])


@st.composite
def resources(draw: st.DrawFn) -> dict[str, Any]:
    amounts = st.fixed_dictionaries({}, optional={"cpu": _CPUS, "memory": _SIZES})
    return draw(st.fixed_dictionaries({}, optional={"requests": amounts, "limits": amounts}))


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """A job's pod, with more of everything."""
    pod = deepcopy(ALL[draw(st.sampled_from(sorted(ALL)))]())
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"].update(draw(st.dictionaries(_NAMES, _NAMES, max_size=3)))
    metadata["annotations"].update(draw(st.dictionaries(_NAMES, st.text(max_size=9), max_size=3)))
    spec["containers"] += [
        {"name": f"more-{index}", "image": "x", "resources": amounts}
        for index, amounts in enumerate(draw(st.lists(resources(), max_size=2)))
    ]
    for container in spec["containers"]:
        container["resources"] = draw(resources())
    if draw(st.booleans()):
        spec["initContainers"] = [
            {"name": "istio-proxy", "image": "x", "restartPolicy": "Always"},
            *spec.get("initContainers", []),
        ]
    _vary(draw, spec)
    return pod


def _vary(draw: st.DrawFn, spec: dict[str, Any]) -> None:
    """Fields that may be missing, empty, null or set."""
    grace = draw(st.sampled_from(["absent", 0, 5, 30, 71, 119, 600]))
    spec.pop("terminationGracePeriodSeconds")
    if grace != "absent":
        spec["terminationGracePeriodSeconds"] = grace
    spec["securityContext"] = draw(
        st.sampled_from(
            [None, {}, {"fsGroup": 2000}, {"supplementalGroups": [4]},
             {"supplementalGroups": [65532], "runAsUser": 1000}]
        )
    )  # fmt: skip
    if draw(st.booleans()):
        del spec["volumes"]
        for container in spec["containers"]:
            container.pop("volumeMounts", None)
    else:
        data = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        spec["volumes"] += draw(st.sampled_from([[], [data]]))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    kinds = draw(
        st.lists(st.sampled_from([EMPTY_DIR, HOST_PATH, EPHEMERAL]), min_size=1, max_size=3)
    )
    volumes = [{**kind, "name": f"v{index}"} for index, kind in enumerate(kinds)]
    fixed = {"mode": "Fixed", "every": draw(st.integers(1, 1000))}
    return policy(
        *volumes,
        memory={
            "limit": draw(_SIZES),
            "slots": draw(st.integers(2, 16)),
            "hugePages": draw(st.sampled_from(["None", "2Mi"])),
        },
        accounting=draw(st.sampled_from(["Add", "CarveOut"])),
        persist=draw(st.sampled_from([{"mode": "Auto"}, fixed])),
        flushTimeout=f"{draw(st.integers(1, 120))}s",
    )
