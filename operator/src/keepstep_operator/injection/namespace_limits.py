"""What the LimitRanges, the ResourceQuotas and the Pod Security of a namespace leave for the
sidecar, by the API server's own rules.

A pod that breaks one of them is not created, and the error names neither keepstep nor the way out.
So the sidecar is made to fit LimitRanges before (`injection.resources`), and the whole pod is
checked afterwards (`NamespaceLimits.objection`). What does not fit goes without a sidecar, and says
why.

A quota has to hold all pods of a job, and nobody knows how many are still to come. If the sidecars
of the first pods took from it, the last ones would not be created. So a pod with its sidecar must
not ask for more of what a quota counts than it does without: its resources are carved out of the
training container.

The rules are those of the admission plugins LimitRanger and ResourceQuota of Kubernetes 1.34.
LimitRanger gives its defaults to the pod's own containers before injection, and to the injected
ones afterwards. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from keepstep_operator.api.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_millicores,
)
from keepstep_operator.object_body import Body

Amounts = Mapping[str, int]
"""Amounts by resource: CPU in millicores, all else in bytes or pieces."""

REQUESTS: Final = "requests"
LIMITS: Final = "limits"
CLAIMS: Final = "claims"
"""What the claims of a pod's generic ephemeral volumes ask for."""
_NO_HOST_PATH: Final = ("baseline", "restricted")
_COMPUTE: Final = ("cpu", "memory")


@dataclass(frozen=True, kw_only=True)
class LimitRangeItem:
    """One item of a LimitRange. `kind`: Container, Pod or PersistentVolumeClaim. `ratio`: the
    largest limit for a request, in thousandths. `default`, `default_request`: what LimitRanger
    writes into a container that names none."""

    name: str
    kind: str
    least: Amounts = field(default_factory=dict)
    most: Amounts = field(default_factory=dict)
    ratio: Amounts = field(default_factory=dict)
    default: Amounts = field(default_factory=dict)
    default_request: Amounts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NamespaceQuota:
    """A ResourceQuota. `hard`, `used`: by (requests, limits or claims; resource). Scopes are not
    looked at: it may count any pod."""

    name: str
    hard: Mapping[tuple[str, str], int]
    used: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NamespaceLimits:
    """The rules of one namespace. `pod_security`: the level that it enforces; '' for none."""

    ranges: tuple[LimitRangeItem, ...] = ()
    quotas: tuple[NamespaceQuota, ...] = ()
    pod_security: str = ""

    # --- what a container may have -------------------------------------------------------

    def container_minimum(self, resource: str) -> int:
        return max((bounds.least.get(resource, 0) for bounds in self._of("Container")), default=0)

    def container_maximum(self, resource: str) -> int | None:
        return smallest(bounds.most.get(resource) for bounds in self._of("Container"))

    def ratio(self, resource: str) -> int | None:
        return smallest(bounds.ratio.get(resource) for bounds in self._of("Container"))

    def is_limited(self, resource: str) -> bool:
        """Whether a LimitRange gives or asks for a limit of every container."""
        found = self._of("Container")
        return any(resource in (*bounds.most, *bounds.ratio, *bounds.default) for bounds in found)

    # --- whether the API server will accept the pod ---------------------------------------

    def forbids_host_path(self, spec: Body) -> bool:
        """Whether Pod Security refuses a hostPath. A pod that has one of its own is exempted from
        it, by a rule that nobody can read."""
        return self.pod_security in _NO_HOST_PATH and not any(
            "hostPath" in volume for volume in spec.get("volumes") or ()
        )

    def objection(self, before: Body, after: Body) -> str:
        """What keeps the injected pod from being created; '' if nothing does, or if the pod would
        not be created without the sidecar either. `before`, `after`: specs."""
        for bounds in self.ranges:
            breach = _breach(bounds, self.ranges, after)
            if breach and not _breach(bounds, self.ranges, before):
                return breach
        return next(filter(None, (_grown(quota, before, after) for quota in self.quotas)), "")

    def _of(self, kind: str) -> Iterator[LimitRangeItem]:
        return (bounds for bounds in self.ranges if bounds.kind == kind)


# --- parsing -------------------------------------------------------------------------------------


def parse_ranges(body: Body) -> tuple[LimitRangeItem, ...]:
    """The items of a LimitRange. Amounts that cannot be read are left out."""
    name = str((body.get("metadata") or {}).get("name") or "")
    return tuple(_range(name, limit) for limit in (body.get("spec") or {}).get("limits") or ())


def _range(name: str, item: Body) -> LimitRangeItem:
    least, most = _amounts(item.get("min")), _amounts(item.get("max"))
    default, request = _amounts(item.get("default")), _amounts(item.get("defaultRequest"))
    if item.get("type") == "Container":  # as the API server completes it
        default = {**most, **default}
        request = {**least, **default, **request}
    ratios = (item.get("maxLimitRequestRatio") or {}).items()
    return LimitRangeItem(
        name=name,
        kind=str(item.get("type") or ""),
        least=least,
        most=most,
        ratio={resource: parse_millicores(ratio) for resource, ratio in ratios},
        default=default,
        default_request=request,
    )


def parse_quota(body: Body) -> NamespaceQuota:
    """A ResourceQuota, without what pods of ours do not add to (objects, extended resources)."""
    status = body.get("status") or {}
    hard = status.get("hard") or (body.get("spec") or {}).get("hard") or {}
    return NamespaceQuota(
        name=str((body.get("metadata") or {}).get("name") or ""),
        hard=_counted(hard),
        used=_counted(status.get("used") or {}),
    )


def _counted(written: Body) -> dict[tuple[str, str], int]:
    """The amounts that a pod counts for. If one is written twice (`cpu`, `requests.cpu`), both are
    the same number of the quota's use, and the smaller `hard` holds."""
    found: dict[tuple[str, str], int] = {}
    for name, text in written.items():
        if (what := _what(name)) is not None:
            amount = _amount(what[1], text)
            found[what] = min(found.get(what, amount), amount)
    return found


def _what(name: str) -> tuple[str, str] | None:
    """What a name under a quota's `hard` counts; None for what injection never changes."""
    if name in ("requests.storage", "persistentvolumeclaims", "count/persistentvolumeclaims"):
        return CLAIMS, name.rpartition("/")[2]
    kind, dot, resource = name.partition(".")
    if not (dot and kind in (REQUESTS, LIMITS)):
        kind, resource = REQUESTS, name
    known = resource in (*_COMPUTE, "ephemeral-storage") or resource.startswith("hugepages-")
    return (kind, resource) if known else None


def _amounts(written: object) -> dict[str, int]:
    given = written if isinstance(written, dict) else {}
    return {str(name): _amount(name, text) for name, text in given.items()}


def _amount(resource: str, text: str | int | float) -> int:
    return parse_millicores(text) if resource == "cpu" else parse_bytes(text)


def _written(resource: str, amount: int) -> str:
    return format_millicores(amount) if resource == "cpu" else format_bytes(amount)


# --- what a pod asks for -------------------------------------------------------------------------


def sum_resources(spec: Body, kind: str) -> dict[str, int]:
    """The requests or limits of a pod as the scheduler and quotas count them, or what its claims
    ask for."""
    if kind == CLAIMS:
        sizes = list(_claims(spec))
        return {"requests.storage": sum(sizes), "persistentvolumeclaims": len(sizes)}
    total: dict[str, int] = {}
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("containers") or ():
        _add(total, container_amounts(container, kind))
    for container in spec.get("initContainers") or ():
        own = container_amounts(container, kind)
        if container.get("restartPolicy") == "Always":
            _add(total, own)
            _add(running, own)
            own = {}
        for name in {*own, *running}:
            peak[name] = max(peak.get(name, 0), own.get(name, 0) + running.get(name, 0))
    found = {name: max(total.get(name, 0), peak.get(name, 0)) for name in {*total, *peak}}
    for name, text in (spec.get("overhead") or {}).items():
        if kind == REQUESTS or name in found:
            found[name] = found.get(name, 0) + _amount(name, text)
    return found


def container_amounts(container: Body, kind: str) -> dict[str, int]:
    """The requests or limits of a container; a missing request is the limit."""
    resources = container.get("resources") or {}
    limits = _amounts(resources.get(LIMITS))
    return limits if kind == LIMITS else {**limits, **_amounts(resources.get(REQUESTS))}


def _add(sums: dict[str, int], amounts: Amounts) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + amount


def _claims(spec: Body) -> Iterator[int]:
    for volume in spec.get("volumes") or ():
        template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
        requests = ((template.get("spec") or {}).get("resources") or {}).get(REQUESTS) or {}
        if "storage" in requests:
            yield parse_bytes(requests["storage"])


def smallest(amounts: Iterable[int | None]) -> int | None:
    """The smallest amount that is known; None: none is."""
    return min((amount for amount in amounts if amount is not None), default=None)


# --- LimitRange ----------------------------------------------------------------------------------


def _breach(rule: LimitRangeItem, ranges: tuple[LimitRangeItem, ...], spec: Body) -> str:
    """How the pod breaks the rule; '' if it does not."""
    if rule.kind == "PersistentVolumeClaim":
        for size in _claims(spec):
            if breach := _broken(rule, "a claim", {"storage": size}, {"storage": size}):
                return breach
    if rule.kind == "Pod":
        return _broken(rule, "the pod", sum_resources(spec, REQUESTS), sum_resources(spec, LIMITS))
    if rule.kind == "Container":
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
            requests, limits = _completed(container, ranges)
            if breach := _broken(rule, f"container {container.get('name')}", requests, limits):
                return breach
    return ""


def _completed(container: Body, ranges: tuple[LimitRangeItem, ...]) -> tuple[Amounts, Amounts]:
    """Requests and limits after LimitRanger's defaults."""
    requests: Amounts = container_amounts(container, REQUESTS)
    limits: Amounts = container_amounts(container, LIMITS)
    for bounds in ranges:
        if bounds.kind == "Container":
            limits = {**bounds.default, **limits}
            requests = {**bounds.default_request, **requests}
    return requests, limits


def _broken(rule: LimitRangeItem, what: str, requests: Amounts, limits: Amounts) -> str:
    for resource in {*rule.least, *rule.most, *rule.ratio}:
        request, limit = requests.get(resource), limits.get(resource)
        if breach := _of_resource(rule, resource, request, limit):
            return f"LimitRange {rule.name}: {breach} of {resource} for {what}"
    for resource in {*requests} & {*limits}:
        if requests[resource] > limits[resource]:
            asked, given = (_written(resource, amounts[resource]) for amounts in (requests, limits))
            return (
                f"LimitRange {rule.name} gives {what} a limit of {given} of {resource}, which is"
                f" less than its request of {asked}"
            )
    return ""


def _of_resource(
    rule: LimitRangeItem, resource: str, request: int | None, limit: int | None
) -> str:
    given = [amount for amount in (request, limit) if amount is not None]
    least, most = rule.least.get(resource), rule.most.get(resource)
    if least is not None and (request is None or min(given) < least):
        return f"at least {_written(resource, least)}"
    if most is not None and (limit is None or max(given) > most):
        return f"at most {_written(resource, most)}"
    ratio = rule.ratio.get(resource)
    if ratio is not None and (not request or not limit or limit * 1000 > ratio * request):
        return f"a limit of at most {ratio / 1000:g} times the request"
    return ""


# --- ResourceQuota -------------------------------------------------------------------------------


def _grown(quota: NamespaceQuota, before: Body, after: Body) -> str:
    """What of the quota the sidecar would take; ''. Claims cannot be carved out of a container, so
    they may take what is left."""
    if unnamed := _unnamed(quota, after):
        return f"ResourceQuota {quota.name} asks for {unnamed}"
    for kind, resource in quota.hard:
        own, needs = (
            sum_resources(container, kind).get(resource, 0) for container in (before, after)
        )
        left = quota.hard[kind, resource] - quota.used.get((kind, resource), 0)
        if needs <= own or (kind == CLAIMS and needs <= left):
            continue
        what = resource if kind == CLAIMS else f"{kind}.{resource}"
        unit = resource if resource == "cpu" else "bytes"
        return (
            f"ResourceQuota {quota.name} counts {what}, of which the pod asks for"
            f" {_written(unit, own)}, and with the sidecar {_written(unit, needs)}"
        )
    return ""


def _unnamed(quota: NamespaceQuota, spec: Body) -> str:
    """CPU or memory that some container does not name although the quota counts it; ''."""
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for kind, resource in quota.hard:
            if resource in _COMPUTE and resource not in container_amounts(container, kind):
                return f"{kind}.{resource} of container {container.get('name')}"
    return ""
