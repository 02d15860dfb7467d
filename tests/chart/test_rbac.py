"""The table in the chart's README is what the chart grants, and it grants no more than that."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from keepstep_operator.api import job_kinds
from tests.chart.charts import CHART, Chart, Object, Refused, is_hook, of_kind, pod_specs

COMPONENTS = ("admission", "reconcile", "certificates")
GRANTED = (*COMPONENTS, "agent")


@dataclass(frozen=True, kw_only=True)
class Grant:
    """One row: who may do what, where."""

    component: str
    scope: str
    resource: str
    names: frozenset[str]
    verbs: frozenset[str]


def test_the_documented_permissions_match_the_rendered_chart(chart: Chart) -> None:
    objects = chart.render({"hostPaths": ["/mnt/nvme0"]})
    rendered = {grant for component in GRANTED for grant in _rendered(objects, component)}
    documented = _documented()
    assert rendered - documented == set(), "granted, but not in the table"
    assert documented - rendered == set(), "in the table, but not granted"


def test_the_reconciler_may_read_every_kind_of_job_that_it_supports(chart: Chart) -> None:
    granted = _rendered(chart.render(), "reconcile")
    readable = {grant.resource for grant in granted if "get" in grant.verbs}
    known = {_named(kind.plural, kind.group) for kind in job_kinds._KINDS}
    assert known - readable == set()


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_has_a_service_account_of_its_own(chart: Chart, component: str) -> None:
    plain, name = chart.render(), f"keepstep-{component}"
    spec = dict(pod_specs(plain))[name]
    assert spec["serviceAccountName"] == name
    assert name in of_kind(plain, "ServiceAccount")
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        for value in of_kind(plain, kind).values():
            if value["metadata"]["name"] == name:
                assert [subject["name"] for subject in value["subjects"]] == [name]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_roles_are_bound_to_an_existing_service_account_if_one_is_given(
    chart: Chart, component: str
) -> None:
    account = {"create": False, "name": "theirs"}
    objects = chart.render(_with_account(component, account))
    assert f"keepstep-{component}" not in of_kind(objects, "ServiceAccount")
    assert "theirs" not in of_kind(objects, "ServiceAccount")
    assert dict(pod_specs(objects))[f"keepstep-{component}"]["serviceAccountName"] == "theirs"
    bindings = [*of_kind(objects, "ClusterRoleBinding").values()]
    bindings += of_kind(objects, "RoleBinding").values()
    bound = [
        binding for binding in bindings if binding["roleRef"]["name"] == f"keepstep-{component}"
    ]
    assert bound
    assert {subject["name"] for binding in bound for subject in binding["subjects"]} == {"theirs"}
    with pytest.raises(Refused, match=f"{component}.serviceAccount.name"):
        chart.render(_with_account(component, {"create": False}))


def _with_account(component: str, account: Object) -> Object:
    return {component: {"serviceAccount": account}}


def test_nothing_is_granted_by_wildcard(plain: list[Object]) -> None:
    for kind in ("ClusterRole", "Role"):
        for value in of_kind(plain, kind).values():
            for rule in value["rules"]:
                assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}


def test_secrets_are_read_by_name_and_by_the_certificates_component_alone(
    plain: list[Object],
) -> None:
    for component in COMPONENTS:
        for grant in _rendered(plain, component):
            if grant.resource == "secrets":
                assert component == "certificates"
                assert grant.scope == "namespace"
                assert grant.names or grant.verbs == {"create"}


def test_viewers_read_and_editors_write_policies_and_runs(plain: list[Object]) -> None:
    roles = of_kind(plain, "ClusterRole")
    (view,) = roles["keepstep-view"]["rules"]
    assert set(view["verbs"]) == {"get", "list", "watch"}
    assert roles["keepstep-view"]["metadata"]["labels"][
        "rbac.authorization.k8s.io/aggregate-to-view"
    ] == "true"  # fmt: skip
    written = {name for rule in roles["keepstep-edit"]["rules"] for name in rule["resources"]}
    assert written == {"checkpointpolicies", "checkpointruns", "checkpoints"}
    assert not any("status" in name for name in written)


def _rendered(objects: list[Object], component: str) -> set[Grant]:
    name = f"keepstep-{component}"
    grants = set()
    places = (
        ("ClusterRole", name, "cluster"),
        ("Role", name, "namespace"),
    )
    for kind, called, scope in places:
        role = of_kind([body for body in objects if not is_hook(body)], kind).get(called)
        for rule in role["rules"] if role else ():
            (group,) = rule["apiGroups"]
            for resource in rule["resources"]:
                grants.add(
                    Grant(
                        component=component,
                        scope=scope,
                        resource=_named(resource, group),
                        names=frozenset(rule.get("resourceNames", ())),
                        verbs=frozenset(rule["verbs"]),
                    )
                )
    return grants


def _documented() -> set[Grant]:
    text = (CHART / "README.md").read_text().partition("## What it may do")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(tuple(f"| {component} |" for component in GRANTED))
    ]
    return {
        Grant(
            component=row[0],
            scope=row[1],
            resource=resource,
            names=_listed(row[3]),
            verbs=_listed(row[4]),
        )
        for row in rows
        for resource in _listed(row[2])
    }


def _named(resource: str, group: str) -> str:
    """As `kubectl get` takes it: plural, group, and subresource."""
    plural, slash, sub = resource.partition("/")
    return f"{plural}.{group}{slash}{sub}" if group else resource


def _listed(cell: str) -> frozenset[str]:
    return frozenset(word.strip() for word in cell.split(",") if word.strip())


def test_no_role_permits_the_creation_of_pods(chart: Chart) -> None:
    objects = chart.render({"hostPaths": ["/mnt/nvme0"]})
    roles = [*of_kind(objects, "ClusterRole").values(), *of_kind(objects, "Role").values()]
    rules = [rule for role in roles if not is_hook(role) for rule in role["rules"]]
    assert not any("create" in rule["verbs"] and "pods" in rule["resources"] for rule in rules)


def test_agents_are_deployed_only_with_host_paths_and_may_only_get_checkpoint_runs(
    chart: Chart,
) -> None:
    assert _rendered(chart.render(), "agent") == set()
    (grant,) = _rendered(chart.render({"hostPaths": ["/mnt/nvme0"]}), "agent")
    assert (grant.resource, grant.verbs) == ("checkpointruns.keepstep.dev", {"get"})
