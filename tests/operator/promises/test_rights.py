"""Nothing that reconcile may do reaches a key; nothing it does waits for one node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chart.charts import NAMESPACE, Chart, Library, Object, of_kind

HOST_PATHS = {"hostPaths": ["/mnt/nvme0"]}


@pytest.fixture(scope="module")
def chart() -> Chart:
    return Chart(Library())


def _may_create_pods(objects: list[Object], account: str) -> Iterator[str]:
    """Namespaces, `*` for all, in which the service account may make pods."""
    for kind, role_kind in (("RoleBinding", "Role"), ("ClusterRoleBinding", "ClusterRole")):
        for one in (found for found in objects if found["kind"] == kind):
            if account not in {subject["name"] for subject in one["subjects"]}:
                continue
            rules = of_kind(objects, role_kind)[one["roleRef"]["name"]]["rules"]
            if any("pods" in rule["resources"] and "create" in rule["verbs"] for rule in rules):
                yield one["metadata"].get("namespace", "*")


def test_with_host_paths_reconcile_creates_pods_only_where_no_key_lies(chart: Chart) -> None:
    namespaces = set(_may_create_pods(chart.render(HOST_PATHS), "keepstep-reconcile"))
    assert namespaces
    assert namespaces.isdisjoint({NAMESPACE, "*"}), f"it may create pods in {namespaces}"


def test_with_host_paths_a_policy_bounds_the_pods_that_reconcile_creates(chart: Chart) -> None:
    bounds = of_kind(chart.render(HOST_PATHS), "ValidatingAdmissionPolicy").values()
    bounded = [rule for one in bounds for rule in one["spec"]["matchConstraints"]["resourceRules"]]
    assert any("pods" in rule["resources"] for rule in bounded)
