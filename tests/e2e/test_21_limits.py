"""No pod is kept from existing: limits, quotas, ports, and a burst. Most pods here only have to be
created: they ask for a node that is not there."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object

_NOWHERE: Object = {"nodeSelector": {"keepstep.test/nowhere": "yes"}}
_HALF = {
    "requests": {"cpu": "200m", "memory": "768Mi"},
    "limits": {"cpu": "500m", "memory": "768Mi"},
}
_JOBS = 60


def _policy(**spec: Any) -> Object:
    sidecar = {"resources": {"cpu": "100m", "memory": "128Mi"}, **spec.pop("sidecar", {})}
    spec = {"memory": {"limit": "128Mi"}, "flushTimeout": "1s"} | spec
    return jobs.policy(sidecar=sidecar, **spec)


def _job(name: str = "gpt", *, pods: int = 1, spec: Object = _NOWHERE, **container: Any) -> Object:
    container = {"command": ["sleep", "600"], "args": [], "resources": _HALF} | container
    return jobs.indexed_job(name, pods=pods, spec=spec, **container)


def _limits(*items: Object) -> Object:
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "limits"},
            "spec": {"limits": list(items)}}  # fmt: skip


def _quota(**hard: str) -> Object:
    named = {name.replace("_", "."): amount for name, amount in hard.items()}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"},
            "spec": {"hard": named}}  # fmt: skip


_CONTAINER = {"type": "Container"}
_FIT: dict[str, tuple[Object, Object, Object]] = {
    "max": (_limits(_CONTAINER | {"max": {"cpu": "1", "memory": "2Gi"}}), _policy(), _job(pods=2)),
    "ratio": (
        _limits(_CONTAINER | {"maxLimitRequestRatio": {"cpu": "4"}}),
        _policy(volumes=[{"name": "disk", "hostPath": {"path": "/var/lib/keepstep"}}]),
        _job(pods=2),
    ),
    "min": (
        _limits(_CONTAINER | {"min": {"cpu": "150m", "memory": "200Mi"}, "default": {"cpu": "1"}}),
        _policy(volumes=[{"name": "disk", "hostPath": {"path": "/var/lib/keepstep"}}]),
        _job(pods=2),
    ),
    "pod": (
        _limits({"type": "Pod", "max": {"cpu": "700m", "memory": "1100Mi"}}),
        _policy(),
        _job(pods=2),
    ),
    "carve": (
        _quota(limits_cpu="1", requests_cpu="400m", limits_memory="1536Mi", memory="1536Mi"),
        _policy(accounting="CarveOut"),
        _job(pods=2),
    ),
}
"""Rules, a policy, a job: every pod of it has its sidecar."""
_TOO_SMALL: dict[str, tuple[Object, Object, Object]] = {
    "cpu": (_quota(limits_cpu="2"), _policy(), _job(pods=4)),
    "memory": (_quota(requests_memory="8Gi", limits_memory="8Gi"), _policy(), _job(pods=2)),
    "large": (_limits(_CONTAINER | {"max": {"memory": "800Mi"}}),
              _policy(memory={"limit": "4Gi"}), _job(pods=2)),
}  # fmt: skip
"""The same, but none of its pods has, and each says why."""
_FORBIDDEN: dict[str, tuple[Object, Object, Object]] = {
    "secure": (
        _limits(_CONTAINER | {"min": {"cpu": "10m"}}),
        _policy(volumes=[{"name": "disk", "hostPath": {"path": "/var/lib/keepstep"}}]),
        _job(pods=2),
    ),
}
"""In a namespace that enforces Pod Security."""
_BY_REASON = {"": _FIT, "NoRoom": _TOO_SMALL, "PodSecurity": _FORBIDDEN}


def test_limit_ranges_and_quotas_do_not_prevent_the_creation_of_injected_pods(
    cluster: Cluster,
) -> None:
    cases = {name: case for found in _BY_REASON.values() for name, case in found.items()}
    with _namespaces(cluster, [*cases]) as places:
        for name in _FORBIDDEN:
            label = "pod-security.kubernetes.io/enforce=restricted"
            cluster.kubectl("label", "namespace", places[name].namespace, label)
        for name, (rules, policy, _) in cases.items():
            places[name].apply(rules, policy)
        for place in places.values():
            _counted(place)
        for name, (_, _, job) in cases.items():
            places[name].apply(job)
        for reason, found in _BY_REASON.items():
            for name, (_, _, job) in found.items():
                pods = _made(places[name], job["spec"]["completions"])
                statuses = [pod["metadata"]["annotations"]["keepstep.dev/status"] for pod in pods]
                reasons = {json.loads(line).get("reason", "") for line in statuses}
                assert reasons == {reason}, (name, statuses)
        for name in _TOO_SMALL:
            _is_reported(places[name])


def _is_reported(kubectl: Kubectl) -> None:
    (event, *_) = kubectl.eventually(lambda: kubectl.events("NotInjected"), what="an event")
    assert "accounting: CarveOut" in event["message"]
    runs.becomes(kubectl, "FullyInjected", "False", words="The pod starts without keepstep")


def _counted(kubectl: Kubectl) -> None:
    """Wait until the quota's use is known; no pod is created before."""
    kubectl.eventually(
        lambda: all(quota["status"].get("hard") for quota in kubectl.list("resourcequotas")),
        what="the quota counts",
    )


def _made(kubectl: Kubectl, count: int) -> list[Object]:
    pods: list[Object] = kubectl.eventually(
        lambda: len(found := kubectl.list("pods")) == count and found,
        what=f"{count} pods in {kubectl.namespace}",
    )
    return pods


@contextmanager
def _namespaces(cluster: Cluster, names: list[str]) -> Iterator[dict[str, Kubectl]]:
    """Several namespaces at once, since limits are of a namespace."""
    mark = secrets.token_hex(3)
    made = {name: cluster.kubectl.namespaced(f"limits-{name}-{mark}") for name in names}
    try:
        for kubectl in made.values():
            cluster.kubectl("create", "namespace", kubectl.namespace)
        yield made
    finally:
        spaces = [kubectl.namespace for kubectl in made.values()]
        cluster.kubectl("delete", "namespace", *spaces, "--wait=false", "--ignore-not-found")


_SERVES = """
import http.server as h, threading
ports = {ports}
servers = [h.ThreadingHTTPServer(("0.0.0.0", port), h.BaseHTTPRequestHandler) for port in ports]
[threading.Thread(target=one.serve_forever, daemon=True).start() for one in servers[1:]]
servers[0].serve_forever()
"""


def _serving(name: str, *ports: int, declared: bool = True, **spec: Any) -> Object:
    """A trainer that serves these ports; it ends at once where one is taken."""
    script = _SERVES.format(ports=[*ports])
    listed = {"ports": [{"containerPort": port} for port in ports]} if declared else {}
    small = {"requests": {"cpu": "20m", "memory": "64Mi"}}
    command = ["python3", "-c", script]
    return _job(name, spec=spec, command=command, resources=small, **listed)


def test_the_sidecar_does_not_take_ports_that_the_trainer_uses(namespace: Kubectl) -> None:
    """9464 is OpenTelemetry's; 26740 to 26742 are keepstep's own."""
    namespace.apply(
        _policy(peers={}),
        _serving("otel", 9464, 9465, declared=False),
        _serving("ours", 26740, 26741),
        _serving("host", 18734, hostNetwork=True),
    )
    for job in ("otel", "ours", "host"):
        (pod,) = namespace.eventually(
            lambda job=job: [pod for pod in namespace.list("pods", f"job-name={job}")
                             if pod["status"]["phase"] == "Running"],
            what=f"{job} runs",
        )  # fmt: skip
        assert pod["metadata"]["labels"]["keepstep.dev/injected"] == "true"
    time.sleep(5)  # a server whose port is taken ends in its first second
    for pod in namespace.list("pods"):
        (trainer,) = pod["status"]["containerStatuses"]
        assert (trainer["restartCount"], "running" in trainer["state"]) == (0, True), trainer
    _warns(namespace, "ours", "serves no metrics", "peers connect to port 26743")
    _warns(namespace, "host", "Set dnsPolicy: ClusterFirstWithHostNet")
    assert not runs.status(namespace, "otel").get("warnings")


def _warns(kubectl: Kubectl, job: str, *words: str) -> None:
    kubectl.eventually(
        lambda: all(
            any(word in text for text in runs.status(kubectl, job)["warnings"]) for word in words
        ),
        what=f"warnings of {job}: {words}",
    )


def test_sixty_jobs_at_once_have_all_their_pods_and_each_its_sidecar(namespace: Kubectl) -> None:
    namespace.apply(_policy())
    namespace.apply(*(_job(f"job-{number}") for number in range(_JOBS)))
    pods = _made(namespace, _JOBS)
    without = [
        pod["metadata"]["annotations"].get("keepstep.dev/status", "nothing was said")
        for pod in pods
        if pod["metadata"]["labels"].get("keepstep.dev/injected") != "true"
    ]
    assert without == []
