"""The Pod Security Standard "restricted" as a checker, rule by rule.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ (v1.31). Controls that our pods
cannot meet by accident (AppArmor, SELinux types, sysctls, HostProcess) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
    "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip


def restricted_violations(pod: dict[str, Any]) -> list[str]:
    """What Pod Security admission at level "restricted" would say; empty when it admits the pod."""
    spec = pod["spec"]
    found = [*_of_pod(spec)]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        name = container["name"]
        found += [f"{name}: {violation}" for violation in _of_container(container, spec)]
    return found


def baseline_violations(pod: dict[str, Any]) -> list[str]:
    """The same for level "baseline"."""
    spec = pod["spec"]
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [
        f"hostPath {volume['name']}" for volume in spec.get("volumes", []) if "hostPath" in volume
    ]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        security = container.get("securityContext", {})
        added = set(security.get("capabilities", {}).get("add", []))
        if security.get("privileged") or added - _BASELINE_CAPABILITIES:
            found.append(f"{container['name']}: privileged, or added {added}")
        found += [f"{container['name']}: host port" for port in _ports(container) if port]
    return found


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            yield f"volume {volume['name']} is {kinds}"
    if spec.get("securityContext", {}).get("runAsUser") == 0:
        yield "runAsUser 0"


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    security, pod = container.get("securityContext", {}), spec.get("securityContext", {})
    capabilities = security.get("capabilities", {})
    if security.get("privileged"):
        yield "privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation must be false"
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities must drop ALL"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"capabilities {capabilities['add']} added"
    if not security.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot must be true"
    if security.get("runAsUser") == 0:
        yield "runAsUser 0"
    profile = security.get("seccompProfile", pod.get("seccompProfile", {}))
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile must be RuntimeDefault or Localhost"
    if any(_ports(container)):
        yield "host port"


def _ports(container: dict[str, Any]) -> list[int]:
    return [port.get("hostPort", 0) for port in container.get("ports", [])]
