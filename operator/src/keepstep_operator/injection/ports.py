"""The ports that the sidecar opens. All containers of a pod share one network, so a port that the
pod's own containers use is never the sidecar's: the trainer would die of it.

What counts is what the pod says: ports that containers declare or that probes ask, and variables
like `METRICS_PORT`. A port that nothing mentions is not seen here. So the defaults collide with
nothing known: they lie outside the ports of Prometheus exporters (9100 to 9999, where 9464 is
OpenTelemetry's), of NodePorts (30000 to 32767) and of outgoing connections (32768 and more), and
no tool of training uses them by default. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from keepstep_operator.api.policy import Policy
from keepstep_operator.names import SIDECAR_UI_PORT
from keepstep_operator.object_body import Body

_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_HANDLERS: Final = ("httpGet", "tcpSocket", "grpc")
_LARGEST: Final = 65535


@dataclass(frozen=True, kw_only=True)
class Ports:
    """`metrics`, `ui` (the page, on loopback): None for none. `peer`: of the run's other pods.
    `warnings`: what is otherwise than the policy asks."""

    metrics: int | None
    peer: int
    ui: int | None
    warnings: tuple[str, ...] = ()


def ports_of(policy: Policy, spec: Body) -> Ports:
    """The sidecar's ports in a pod with this spec."""
    taken, messages = dict(_taken(spec)), []
    metrics: int | None = policy.metrics_port
    peer = policy.peer_port
    if (user := taken.get(policy.metrics_port)) is not None:
        metrics = None
        messages.append(
            f"the sidecar serves no metrics, since container {user} uses port"
            f" {policy.metrics_port}: give the policy another sidecar.ports.metrics"
        )
    if (user := taken.get(peer)) is not None:
        peer = _next_free(peer, {*taken, policy.metrics_port, SIDECAR_UI_PORT})
        messages.append(
            f"peers connect to port {peer}, since container {user} uses port {policy.peer_port}:"
            " NetworkPolicies must allow it, or give the policy another sidecar.ports.peer"
        )
    ui = None if SIDECAR_UI_PORT in {*taken, metrics, peer} else SIDECAR_UI_PORT
    return Ports(metrics=metrics, peer=peer, ui=ui, warnings=tuple(messages))


def _next_free(port: int, taken: set[int]) -> int:
    """The next port that is free; below it, where none is left above."""
    above = (candidate for candidate in range(port + 1, _LARGEST + 1) if candidate not in taken)
    below = (candidate for candidate in range(port - 1, 0, -1) if candidate not in taken)
    return next(above, None) or next(below)


def _taken(spec: Body) -> Iterator[tuple[int, str]]:
    """The TCP ports that the pod mentions, with the container."""
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        name = str(container.get("name") or "")
        for port in _of_container(container):
            yield port, name


def _of_container(container: Body) -> Iterator[int]:
    for declared in container.get("ports") or ():
        if declared.get("protocol", "TCP") == "TCP":
            yield from (
                port for key in ("containerPort", "hostPort") if (port := declared.get(key))
            )
    for probe in (container.get(name) or {} for name in _PROBES):
        for handler in _HANDLERS:
            if isinstance(port := (probe.get(handler) or {}).get("port"), int):
                yield port
    for variable in container.get("env") or ():
        value = str(variable.get("value") or "")
        if str(variable.get("name")).endswith("PORT") and value.isascii() and value.isdigit():
            yield int(value)
