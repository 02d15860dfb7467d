"""The specs of helper pods. Each is for one node and one run, and ends after a while. Pure.

Helper pods run in their own namespace, with a service account without rights, from the sidecar's
image. A serving pod is confined like a sidecar. It mounts its run's directories read-only, each as
a subPath, which the kubelet resolves without leaving the volume. A cleaning pod is root, because
the directories on the way belong to root, and has DAC_OVERRIDE as its only capability.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from keepstep.wire import reports
from keepstep_operator import names
from keepstep_operator.api.model import PodRecord, RunKey
from keepstep_operator.bodies import Body
from keepstep_operator.injection.containers import confined
from keepstep_operator.injection.tiers import POD_IP, pod_address
from keepstep_operator.injection.volumes import token_volume
from keepstep_operator.reconcile.helpers.cleanup import Cleaning
from keepstep_operator.reconcile.state.helper_plan import Helper, number_of

LABEL: Final = "keepstep.dev/helper"
SERVES: Final = "relay"
CLEANS: Final = "clean"
_ABOUT: Final = "keepstep.dev/about"
"""Annotation with the run and the node as JSON. A label would be too short for a namespace and a
name."""
_PROGRAM: Final = "keepstep-sidecar"
_SERVES_S: Final = 6 * 3600
_CLEANS_S: Final = 1800
_LEFT: Final = "/left"
_HOST: Final = "/host"


@dataclass(frozen=True, kw_only=True)
class HelperDefaults:
    """The settings that the chart fixes. `reports_ca`: returns the PEM of the authorities by which
    helper pods recognize the reports API. `resources`: of the container of each helper pod; None
    for the default of its kind."""

    image: str
    namespace: str
    account: str
    reports_url: str
    reports_ca: Callable[[], str]
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    priority_class: str = ""
    resources: Body | None = None


def serving(helper: Helper, defaults: HelperDefaults) -> Body:
    """The pod that serves the shards that a run's pods left on a node."""
    where = [
        (f"{_LEFT}/{number}/{rank}", f"volume-{number}", f"{_below(helper.run)}/{rank}")
        for number in range(len(helper.paths))
        for rank in helper.node_ranks
    ]
    container = {
        **_container(SERVES, [at for at, _, _ in where], defaults, memory="192Mi"),
        "env": _environment(helper, defaults),
        "ports": [{"name": "keepstep-peer", "containerPort": names.SIDECAR_PEER_PORT}],
        "volumeMounts": [
            {"name": "token", "mountPath": names.TOKEN_PATH, "readOnly": True},
            *(
                {"name": name, "mountPath": at, "subPath": below, "readOnly": True}
                for at, name, below in where
            ),
        ],
        "securityContext": confined(user=names.USER_ID, group=names.GROUP_ID),
    }
    volumes = [token_volume("token"), *_host_volumes(helper.paths)]
    return _pod(
        helper.name, SERVES, helper.run, helper.node, container, volumes, defaults, _SERVES_S
    )


def cleaning(one: Cleaning, defaults: HelperDefaults) -> Body:
    """The pod that removes a gone run's directories from a node."""
    where = [f"{_HOST}/{number}/{_below(one.run)}" for number in range(len(one.paths))]
    security = confined(user=0, group=0)
    security["capabilities"]["add"] = ["DAC_OVERRIDE"]
    since = ("--gone-since", f"{one.gone_since:.0f}")
    container = {
        **_container(CLEANS, (*since, *where), defaults, memory="64Mi"),
        "volumeMounts": [
            {"name": f"volume-{number}", "mountPath": f"{_HOST}/{number}"}
            for number in range(len(one.paths))
        ],
        "securityContext": security,
    }
    volumes = _host_volumes(one.paths)
    return _pod(one.name, CLEANS, one.run, one.node, container, volumes, defaults, _CLEANS_S)


def about(body: Body) -> tuple[str, RunKey, str] | None:
    """(kind, run, node) of a helper pod, the kind being `SERVES` or `CLEANS`; None for a pod that
    is not ours."""
    metadata = body.get("metadata") or {}
    try:
        told: dict[str, Any] = json.loads((metadata.get("annotations") or {})[_ABOUT])
        key = RunKey(str(told["namespace"]), str(told["run"]))
        return str((metadata.get("labels") or {}).get(LABEL, "")), key, str(told["node"])
    except (KeyError, TypeError, ValueError):
        return None


def record(body: Body) -> PodRecord | None:
    """A serving pod as the sender of reports of its run, with its number instead of a node rank.
    None for any other pod, and for one that has ended."""
    told, metadata = about(body), body.get("metadata") or {}
    phase = str((body.get("status") or {}).get("phase") or "Pending")
    if told is None or told[0] != SERVES or phase in ("Succeeded", "Failed"):
        return None
    _, run, node = told
    return PodRecord(
        uid=str(metadata.get("uid") or ""),
        namespace=run.namespace,
        name=str(metadata.get("name") or ""),
        injected=True,
        run=run,
        node_rank=number_of(node),
        node=node,
        phase=phase,
        created_at=str(metadata.get("creationTimestamp") or ""),
    )


def _below(run: RunKey) -> str:
    """The run's directory below a hostPath, as in `injection.volumes`. Its parts are DNS labels, so
    the path cannot leave the volume."""
    return f"{run.namespace}/{run.name}"


def _pod(
    name: str,
    does: str,
    run: RunKey,
    node: str,
    container: Body,
    volumes: Sequence[Body],
    defaults: HelperDefaults,
    longest_s: int,
) -> Body:
    said = {"namespace": run.namespace, "run": run.name, "node": node}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": defaults.namespace,
            "labels": {LABEL: does, "app.kubernetes.io/name": "keepstep-helper"},
            "annotations": {_ABOUT: json.dumps(said, separators=(",", ":"))},
        },
        "spec": {
            "affinity": _on(node),
            # also on a cordoned node, which may be the one that is drained
            "tolerations": [{"operator": "Exists"}],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": longest_s,
            "terminationGracePeriodSeconds": 5,
            "serviceAccountName": defaults.account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": one} for one in defaults.pull_secrets],
            **({"priorityClassName": defaults.priority_class} if defaults.priority_class else {}),
            "containers": [container],
            "volumes": list(volumes),
        },
    }


def _on(node: str) -> Body:
    """Affinity to this node alone. The scheduler places the pod, so that its resources are
    counted."""
    name = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [name]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _container(does: str, where: Sequence[str], defaults: HelperDefaults, *, memory: str) -> Body:
    needed = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": memory}}
    return {
        "name": does,
        "image": defaults.image,
        "imagePullPolicy": defaults.pull_policy,
        "command": [_PROGRAM, does, *where],
        "resources": defaults.resources or needed,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(helper: Helper, defaults: HelperDefaults) -> list[Body]:
    """The container's environment. The pod's address comes before the variables that refer to it;
    otherwise `$(...)` would not be replaced."""
    plain = {
        "KEEPSTEP_RUN": helper.run.name,
        "KEEPSTEP_REPORT_CA": defaults.reports_ca(),
        "KEEPSTEP_REPORT_URL": f"{defaults.reports_url}{reports.PATH}",
        "KEEPSTEP_REPORT_TOKEN_FILE": f"{names.TOKEN_PATH}/token",
        "KEEPSTEP_PEER_LISTEN": f":{names.SIDECAR_PEER_PORT}",
        "KEEPSTEP_PEER_ADVERTISE": f"$({POD_IP}):{names.SIDECAR_PEER_PORT}",
    }
    return [
        pod_address(),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def _host_volumes(paths: Sequence[str]) -> list[Body]:
    """The directories as volumes. They are never created: if a drive is not mounted, no empty
    directory must take its place."""
    return [
        {"name": f"volume-{number}", "hostPath": {"path": path, "type": "Directory"}}
        for number, path in enumerate(paths)
    ]
