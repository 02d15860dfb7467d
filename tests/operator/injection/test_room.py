"""LimitRanges and quotas: the sidecar fits, or the pod goes without it and says why.

Every case asks the API server's rules about the pod before and after injection: `accepted` is
written from the documentation of Kubernetes, not from our code.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep_operator.api.pod import PodRefusedError, injected_of, parse_pod
from keepstep_operator.api.quantities import parse_bytes, parse_millicores
from keepstep_operator.injection import NamespaceLimits, inject
from keepstep_operator.injection.namespace_limits import parse_quota, parse_ranges
from tests.operator.injection.pods import DEFAULTS, EMPTY_DIR, HOST_PATH, bare_pod, policy

Body = dict[str, Any]
_CPU, _MEMORY = "cpu", "memory"


def limit_range(*items: Body) -> Body:
    return {"metadata": {"name": "limits"}, "spec": {"limits": list(items)}}


def quota(hard: Body, used: Body | None = None, **spec: Any) -> Body:
    return {
        "metadata": {"name": "quota"},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def room(*bodies: Body) -> NamespaceLimits:
    ranges = [
        bounds for body in bodies if "limits" in body["spec"] for bounds in parse_ranges(body)
    ]
    quotas = [parse_quota(body) for body in bodies if "hard" in body["spec"]]
    return NamespaceLimits(ranges=tuple(ranges), quotas=tuple(quotas))


def trainer(requests: Body, limits: Body | None = None) -> Body:
    """A pod whose one container asks for this."""
    pod = bare_pod()
    pod["spec"]["containers"][0]["resources"] = {"requests": requests, "limits": limits or {}}
    return pod


def sidecar(pod: Body) -> Body:
    (found,) = [
        container
        for container in pod["spec"]["initContainers"]
        if container["name"] == "keepstep-sidecar"
    ]
    resources: Body = found["resources"]
    return resources


SMALL: Body = {"memory": {"limit": "128Mi"}, "sidecar": {"resources": {"memory": "128Mi"}}}
ONE = {"requests": {"cpu": "200m", "memory": "768Mi"}, "limits": {"cpu": "500m", "memory": "768Mi"}}


def of_one(**resources: Body) -> Body:
    asked = {**ONE, **resources}
    return trainer(asked["requests"], asked["limits"])


# --- the API server's rules, as Kubernetes documents them ----------------------------------------


def _read(resource: str, text: Any) -> int:
    return parse_millicores(text) if resource == _CPU else parse_bytes(text)


def _of(container: Body, kind: str) -> dict[str, int]:
    resources = container.get("resources") or {}
    found = dict(resources.get("limits") or {})
    if kind == "requests":
        found |= resources.get("requests") or {}
    return {name: _read(name, text) for name, text in found.items()}


def _sum(spec: Body, kind: str) -> dict[str, int]:
    """Containers and sidecars together. Init containers that end are smaller in these tests."""
    running = [*spec["containers"]]
    running += [
        container for container in spec.get("initContainers", ()) if container.get("restartPolicy")
    ]
    found: dict[str, int] = {}
    for container in running:
        for name, amount in _of(container, kind).items():
            found[name] = found.get(name, 0) + amount
    return found


def accepted(pod: Body, *bodies: Body) -> bool:
    spec = pod["spec"]
    return all(
        _within(spec, item)
        for body in bodies
        for item in body["spec"].get("limits", ())
    ) and all(_paid(spec, body) for body in bodies if "hard" in body["spec"])  # fmt: skip


def _within(spec: Body, item: Body) -> bool:
    if item["type"] == "Pod":
        return _keeps(item, _sum(spec, "requests"), _sum(spec, "limits"))
    every = [*spec["containers"], *spec.get("initContainers", ())]
    given = {**item.get("max", {}), **item.get("default", {})}
    default = {name: _read(name, text) for name, text in given.items()}
    requested = {**item.get("min", {}), **given, **item.get("defaultRequest", {})}
    request = {name: _read(name, text) for name, text in requested.items()}
    return all(
        _keeps(
            item, {**request, **_of(container, "requests")}, {**default, **_of(container, "limits")}
        )
        for container in every
    )


def _keeps(item: Body, requests: dict[str, int], limits: dict[str, int]) -> bool:
    for name, text in item.get("min", {}).items():
        least = _read(name, text)
        if requests.get(name, -1) < least or limits.get(name, least) < least:
            return False
    for name, text in item.get("max", {}).items():
        most = _read(name, text)
        if name not in limits or max(limits[name], requests.get(name, 0)) > most:
            return False
    for name, text in item.get("maxLimitRequestRatio", {}).items():
        request, limit = requests.get(name, 0), limits.get(name, 0)
        if not request or not limit or Fraction(limit, request) > Fraction(text):
            return False
    return all(requests[name] <= limits[name] for name in requests.keys() & limits.keys())


def _paid(spec: Body, body: Body) -> bool:
    every = [*spec["containers"], *spec.get("initContainers", ())]
    for name, text in body["status"]["hard"].items():
        kind, _, resource = name.rpartition(".")
        kind = kind or "requests"
        if any(resource not in _of(container, kind) for container in every):
            return False
        used = _read(resource, body["status"]["used"].get(name, 0))
        if used + _sum(spec, kind).get(resource, 0) > _read(resource, text):
            return False
    return True


# --- the cases of the review, and their siblings -------------------------------------------------

_CASES: dict[str, tuple[Body, tuple[Body, ...]]] = {
    "max cpu": (
        trainer({"cpu": "50m", "memory": "320Mi"}, {"cpu": "1", "memory": "700Mi"}),
        (limit_range({"type": "Container", "max": {"cpu": "1", "memory": "2Gi"}}),),
    ),
    "max cpu below the request": (
        trainer({"cpu": "20m", "memory": "320Mi"}, {"cpu": "50m", "memory": "700Mi"}),
        (limit_range({"type": "Container", "max": {"cpu": "50m"}}),),
    ),
    "ratio of cpu": (
        of_one(),
        (limit_range({"type": "Container", "maxLimitRequestRatio": {"cpu": "10"}}),),
    ),
    "ratio 1": (
        of_one(requests={"cpu": "500m", "memory": "768Mi"}),
        (limit_range({"type": "Container", "maxLimitRequestRatio": {"cpu": "1", "memory": "1"}}),),
    ),
    "min of both": (
        of_one(),
        (limit_range({"type": "Container", "min": {"cpu": "200m", "memory": "300Mi"}}),),
    ),
    "a default below the request": (
        of_one(),
        (limit_range({"type": "Container", "default": {"cpu": "50m"}}),),
    ),
    "max of a pod": (
        of_one(),
        (limit_range({"type": "Pod", "max": {"cpu": "700m", "memory": "1100Mi"}}),),
    ),
    "several ranges": (
        of_one(),
        (
            limit_range({"type": "Container", "max": {"cpu": "2"}, "min": {"cpu": "150m"}}),
            limit_range({"type": "Container", "maxLimitRequestRatio": {"cpu": "4"}}),
        ),
    ),
}


@pytest.mark.parametrize("accounting", ["Add", "CarveOut"])
@pytest.mark.parametrize("volume", [EMPTY_DIR, HOST_PATH], ids=["emptyDir", "hostPath"])
@pytest.mark.parametrize("case", _CASES)
def test_the_sidecar_resources_are_fitted_to_limit_ranges_and_quotas(
    case: str, accounting: str, volume: Body
) -> None:
    pod, rules = _CASES[case]
    assert accepted(pod, *rules), "the case is about the sidecar"
    rules_ = policy(volume, **SMALL, accounting=accounting)
    injected = inject(pod, rules_, DEFAULTS, room=room(*rules))
    assert accepted(injected, *rules)


_TOO_SMALL: dict[str, tuple[Body, tuple[Body, ...], str]] = {
    "max memory of a container": (
        of_one(),
        (limit_range({"type": "Container", "max": {"memory": "768Mi"}}),),
        "LimitRange limits: at most 768Mi of memory for container keepstep-sidecar",
    ),
    "a quota, however much it leaves": (
        of_one(),
        (quota({"limits.cpu": "200"}),),
        "ResourceQuota quota asks for limits.cpu of container keepstep-sidecar",
    ),
    "a quota of memory": (
        of_one(),
        (quota({"memory": "800Gi"}),),
        "ResourceQuota quota counts requests.memory, of which the pod asks for 768Mi, and with",
    ),
    "a quota of ephemeral storage": (
        trainer({"cpu": "1", "memory": "1Gi"}, {"ephemeral-storage": "1Gi"}),
        (quota({"requests.ephemeral-storage": "10Gi"}),),
        "ResourceQuota quota counts requests.ephemeral-storage, of which",
    ),
}


@pytest.mark.parametrize("case", _TOO_SMALL)
def test_a_pod_whose_sidecar_exceeds_a_quota_is_refused_with_the_fix(case: str) -> None:
    pod, rules, words = _TOO_SMALL[case]
    with pytest.raises(PodRefusedError) as caught:
        inject(pod, policy(memory={"limit": "4Gi"}), DEFAULTS, room=room(*rules))
    assert caught.value.reason == "NoRoom"
    assert words in str(caught.value)
    assert "accounting: CarveOut" in str(caught.value)


@pytest.mark.parametrize("volume", [EMPTY_DIR, HOST_PATH], ids=["emptyDir", "hostPath"])
def test_carved_out_limits_leave_the_total_limits_of_the_pod_unchanged(volume: Body) -> None:
    """So that a quota is met, whatever it leaves, and however many pods are still to come."""
    rules = (
        quota({"limits.cpu": "500m", "requests.cpu": "200m", "limits.memory": "768Mi"}),
        limit_range({"type": "Container", "maxLimitRequestRatio": {"cpu": "3"}}),
    )
    pod, rules_ = of_one(), policy(volume, **SMALL, accounting="CarveOut")
    injected = inject(pod, rules_, DEFAULTS, room=room(*rules))
    assert accepted(injected, *rules)
    for kind in ("requests", "limits"):
        assert _sum(injected["spec"], kind) == _sum(pod["spec"], kind)
    assert sidecar(injected)["limits"]["cpu"] == "250m", "half, as of the request"


@pytest.mark.parametrize("requests", [{}, {"cpu": "2", "memory": "4Gi"}], ids=["limits", "both"])
def test_a_guaranteed_pod_that_is_carved_stays_guaranteed_and_as_large(requests: Body) -> None:
    pod = trainer(requests, {"cpu": "2", "memory": "4Gi"})
    injected = inject(pod, policy(**SMALL, accounting="CarveOut"), DEFAULTS)
    resources = sidecar(injected)
    assert resources["requests"] == resources["limits"]
    assert _sum(injected["spec"], "limits") == _sum(pod["spec"], "limits")


def test_the_sidecar_of_a_small_guaranteed_pod_gets_a_quarter_of_its_cpu() -> None:
    pod = trainer({}, {"cpu": "800m", "memory": "4Gi"})
    injected = inject(pod, policy(**SMALL, accounting="CarveOut"), DEFAULTS)
    assert sidecar(injected)["limits"]["cpu"] == "200m"


def test_add_is_used_where_carving_would_leave_the_trainer_too_little() -> None:
    rules = limit_range({"type": "Container", "min": {"cpu": "150m"}})
    injected = inject(of_one(), policy(**SMALL, accounting="CarveOut"), DEFAULTS, room=room(rules))
    assert injected["spec"]["containers"][0]["resources"] == ONE
    injected_ = injected_of(parse_pod(injected))
    assert injected_ is not None
    assert injected_.warnings == (
        "accounting CarveOut is not possible, Add is used: LimitRange limits: at least 150m of cpu"
        " for container main",
    )


def test_a_policy_may_limit_the_cpu() -> None:
    asked = policy(sidecar={"resources": {"cpu": "50m", "cpuLimit": "300m"}})
    assert sidecar(inject(of_one(), asked, DEFAULTS))["limits"]["cpu"] == "300m"


def test_a_trainer_too_small_for_a_carve_out_is_not_injected_under_a_quota() -> None:
    asked = policy(memory={"limit": "4Gi"}, accounting="CarveOut")
    with pytest.raises(
        PodRefusedError, match="training container's requests are 768Mi; ResourceQuota"
    ):
        inject(of_one(), asked, DEFAULTS, room=room(quota({"memory": "800Gi"})))


def test_storage_quotas_and_limits_also_apply_to_ephemeral_claims() -> None:
    claims = policy({"name": "c", "ephemeral": {"size": "200Gi"}}, **SMALL)
    with pytest.raises(PodRefusedError, match=r"counts requests\.storage, of which"):
        inject(of_one(), claims, DEFAULTS, room=room(quota({"requests.storage": "100Gi"})))
    large = room(quota({"requests.storage": "500Gi"}, {"requests.storage": "300Gi"}))
    assert parse_pod(inject(of_one(), claims, DEFAULTS, room=large)).has_sidecar
    rules = limit_range({"type": "PersistentVolumeClaim", "max": {"storage": "100Gi"}})
    with pytest.raises(PodRefusedError, match="at most 100Gi of storage for a claim"):
        inject(of_one(), claims, DEFAULTS, room=room(rules))


# --- any rules -----------------------------------------------------------------------------------

_CPUS = st.sampled_from(["20m", "50m", "100m", "200m", "500m", "1", "2", "4"])
_SIZES = st.sampled_from(["64Mi", "128Mi", "256Mi", "512Mi", "1Gi", "2Gi", "8Gi"])
_AMOUNTS = st.fixed_dictionaries({}, optional={_CPU: _CPUS, _MEMORY: _SIZES})
_RATIOS = st.fixed_dictionaries({}, optional=dict.fromkeys((_CPU, _MEMORY), st.sampled_from("148")))
_ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["Container", "Pod"])},
    optional={"min": _AMOUNTS, "max": _AMOUNTS, "maxLimitRequestRatio": _RATIOS},
)


def _is_valid(item: Body) -> bool:
    """Whether the API server takes it. It takes one item of a type, too."""
    least, most = (item.get(kind, {}) for kind in ("min", "max"))
    return all(
        read(least[name]) <= read(most[name])
        for name, read in ((_CPU, parse_millicores), (_MEMORY, parse_bytes))
        if name in least and name in most
    )


_HARD = st.fixed_dictionaries(
    {},
    optional={
        "limits.cpu": _CPUS,
        "requests.cpu": _CPUS,
        "limits.memory": _SIZES,
        "requests.memory": _SIZES,
    },
)


@given(
    requests=_AMOUNTS,
    limits=_AMOUNTS,
    items=st.lists(_ITEM.filter(_is_valid), max_size=2, unique_by=lambda item: item["type"]),
    hard=_HARD,
    accounting=st.sampled_from(["Add", "CarveOut"]),
)
@settings(max_examples=2000)
def test_injection_never_makes_a_creatable_pod_exceed_its_quota(
    requests: Body, limits: Body, items: list[Body], hard: Body, accounting: str
) -> None:
    pod = trainer(requests, limits)
    rules = [limit_range(*items), quota(hard)]
    if not accepted(pod, *rules):
        return
    with contextlib.suppress(PodRefusedError):  # then it is created without a sidecar
        injected = inject(pod, policy(**SMALL, accounting=accounting), DEFAULTS, room=room(*rules))
        assert accepted(injected, *rules)
