"""The rendered chart over a matrix of values: valid, restricted, consistent in itself."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import yaml

from tests.chart.charts import CHART, KUBERNETES, NAMESPACE, ROOT, Chart, Object, of_kind, pod_specs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kubernetes_validate  # type: ignore[import-untyped]
    from kubernetes_validate import utils  # type: ignore[import-untyped]

utils.schema_contents = functools.cache(utils.schema_contents)  # megabytes, read for each object

EVERYTHING: Object = {
    "hostPaths": ["/mnt/nvme0/keepstep", "/var/lib/keepstep"],
    "networkPolicy": {
        "enabled": True,
        "egress": {"enabled": True, "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
        "training": {"namespaces": ["ml", "vision"], "egress": True},
    },
    "logLevel": "debug",
    "agent": {
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"accelerator": "yes"},
        "cleanAfterSeconds": 3600,
    },
    "certificates": {"serviceAccount": {"create": False, "name": "ours"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafanaDashboard": {"enabled": True, "labels": {"team": "ml"}},
    "images": {
        "registry": "registry.example:5000/mirror",
        "pullSecrets": ["registry"],
        "operator": {"digest": "sha256:" + "a" * 64},
    },
    "admission": {
        "failurePolicy": "Fail",
        "replicas": 3,
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "infra", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"example.com/note": "yes"},
        "podLabels": {"team": "ml"},
        "serviceAccount": {"annotations": {"example.com/role": "injects"}},
        "extraArgs": ["--drain=10"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    },
}
MATRIX: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "one replica": {"admission": {"replicas": 1, "podDisruptionBudget": {"enabled": False}}},
    "no CRDs, no roles": {"crds": {"install": False}, "rbac": {"aggregate": False}},
    "another name": {"fullnameOverride": "steps"},
    "metrics from one namespace": {
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        }
    },
}
OURS = {
    "CheckpointPolicy", "ServiceMonitor", "PodMonitor", "PrometheusRule", "Issuer", "Certificate",
}  # fmt: skip
"""Kinds that Kubernetes' own schemas do not know."""


@pytest.fixture(params=sorted(MATRIX))
def rendered(chart: Chart, request: pytest.FixtureRequest) -> list[Object]:
    """The chart with each row of the matrix."""
    return chart.render(MATRIX[request.param])


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_helm_lint_finds_nothing(chart: Chart, name: str) -> None:
    chart.lint(MATRIX[name])


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_rendered_object_is_valid_for_the_kubernetes_schema(
    rendered: list[Object], version: str
) -> None:
    for body in rendered:
        if body["kind"] not in OURS | {"CustomResourceDefinition"}:
            kubernetes_validate.validate(body, version, strict=True)


def test_every_object_is_labelled_and_namespaced_objects_name_their_namespace(
    rendered: list[Object],
) -> None:
    for body in rendered:
        labels = body["metadata"].get("labels", {})
        if body["kind"] == "CustomResourceDefinition":
            continue
        assert labels["app.kubernetes.io/name"] == "keepstep"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert ("namespace" in body["metadata"]) == (not _cluster_wide(body))


def test_every_container_meets_the_restricted_pod_security_standard(rendered: list[Object]) -> None:
    specs = dict(pod_specs(rendered))
    assert len(specs) == 4
    for spec in specs.values():
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["runAsGroup"]) == (True, 65532, 65532)
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all({"secret", "configMap"} & volume.keys() for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_every_selector_matches_exactly_its_own_pods(rendered: list[Object]) -> None:
    deployments = of_kind(rendered, "Deployment")
    for body in (*deployments.values(), *of_kind(rendered, "DaemonSet").values()):
        chosen = body["spec"]["selector"]["matchLabels"]
        assert chosen.items() <= body["spec"]["template"]["metadata"]["labels"].items()
    for value in of_kind(rendered, "Service").values():
        behind = [d for d in deployments.values() if _selects(value["spec"]["selector"], d)]
        assert behind
        for port in value["spec"]["ports"]:
            assert all(port["targetPort"] in _port_names(d) for d in behind)


def test_no_secret_is_rendered_and_no_ca_bundle(rendered: list[Object]) -> None:
    assert not of_kind(rendered, "Secret")
    (configuration,) = of_kind(rendered, "MutatingWebhookConfiguration").values()
    (webhook,) = configuration["webhooks"]
    assert webhook["clientConfig"].keys() == {"service"}
    assert "path" not in webhook["clientConfig"]["service"]
    templates = [path.read_text() for path in (CHART / "templates").rglob("*.yaml")]
    assert not any("(lookup " in text or "{{ lookup" in text for text in templates)


def test_rendered_names_match_the_names_in_the_code(plain: list[Object]) -> None:
    assert of_kind(plain, "Service").keys() == {"keepstep-admission", "keepstep-reports"}
    assert of_kind(plain, "Deployment").keys() == {
        "keepstep-admission",
        "keepstep-reconcile",
        "keepstep-certificates",
    }
    assert of_kind(plain, "MutatingWebhookConfiguration").keys() == {"keepstep"}
    secrets = [
        volume["secret"]["secretName"]
        for _, spec in pod_specs(plain)
        for volume in spec.get("volumes", ())
        if "secret" in volume
    ]
    expected = ["keepstep-admission-tls", "keepstep-peers-ca", "keepstep-peers-ca"]
    assert sorted(secrets) == expected
    admission = dict(pod_specs(plain))["keepstep-admission"]["volumes"]
    (reports,) = [volume["secret"] for volume in admission if volume["name"] == "reports"]
    assert reports["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "no key of the authority"


def test_the_webhook_matches_only_annotated_pods_and_fails_open(plain: list[Object]) -> None:
    (webhook,) = of_kind(plain, "MutatingWebhookConfiguration")["keepstep"]["webhooks"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] == 10
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["sideEffects"] == "None"
    assert webhook["rules"] == [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "resources": ["pods"],
            "operations": ["CREATE"],
            "scope": "Namespaced",
        }
    ]
    (condition,) = webhook["matchConditions"]
    assert "'keepstep.dev/policy' in object.metadata.annotations" in condition["expression"]
    assert "injected" not in condition["expression"], "an injected pod is looked at again"
    assert _left_out(webhook) == {"kube-system", NAMESPACE}


def test_the_configured_webhook_timeout_is_passed_to_the_admission_process(
    chart: Chart,
) -> None:
    objects = chart.render({"admission": {"failurePolicy": "Fail", "timeoutSeconds": 7}})
    (webhook,) = of_kind(objects, "MutatingWebhookConfiguration")["keepstep"]["webhooks"]
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Fail", 7)
    spec = of_kind(objects, "Deployment")["keepstep-admission"]["spec"]["template"]["spec"]
    assert "--timeout=7" in spec["containers"][0]["args"]


def test_admission_is_spread_and_survives_a_drain(plain: list[Object]) -> None:
    spec = of_kind(plain, "Deployment")["keepstep-admission"]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = of_kind(plain, "PodDisruptionBudget")["keepstep-admission"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"] == spec["selector"]["matchLabels"]


@pytest.mark.parametrize("component", ["certificates", "reconcile"])
def test_singleton_components_have_one_replica_and_the_recreate_strategy(
    component: str, plain: list[Object]
) -> None:
    spec = of_kind(plain, "Deployment")[f"keepstep-{component}"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_serving_agent_mounts_volumes_read_only_and_the_cleaning_agent_opens_no_port(
    chart: Chart,
) -> None:
    objects = chart.render(EVERYTHING)
    agent = of_kind(objects, "DaemonSet")["keepstep-agent"]["spec"]["template"]["spec"]
    serve, clean = agent["containers"]
    assert serve["command"] == ["keepstep-sidecar", "agent", "serve"]
    assert serve["securityContext"]["runAsUser"] == 65532
    assert serve["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all(mount["readOnly"] for mount in serve["volumeMounts"])
    assert "api" not in {mount["name"] for mount in serve["volumeMounts"]}
    assert clean["command"] == ["keepstep-sidecar", "agent", "clean"]
    assert "ports" not in clean
    assert clean["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
    for container in agent["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert [at for at in container["args"] if at.startswith("/")] == ["/host/0", "/host/1"]
    assert "--after=3600" in clean["args"]
    paths = [volume["hostPath"]["path"] for volume in agent["volumes"] if "hostPath" in volume]
    assert paths == EVERYTHING["hostPaths"]
    assert (agent["priorityClassName"], agent["nodeSelector"]) == (
        "system-node-critical",
        {"accelerator": "yes"},
    )
    assert not agent["automountServiceAccountToken"]
    assert not of_kind(chart.render(), "DaemonSet")


def test_egress_is_limited_to_the_api_server_and_dns(chart: Chart) -> None:
    objects = chart.render({"networkPolicy": {"egress": {"enabled": True}}})
    policies = of_kind(objects, "NetworkPolicy")
    assert len(policies) == 3
    for policy in policies.values():
        assert policy["spec"]["policyTypes"] == ["Egress"]
        ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
        assert ports == [443, 6443, 53, 53]
    (narrow, _) = of_kind(chart.render(EVERYTHING), "NetworkPolicy")["keepstep-admission"]["spec"][
        "egress"
    ]
    assert narrow["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]


def test_the_training_network_policy_admits_only_peers_and_metrics_scrapes(chart: Chart) -> None:
    values = {"networkPolicy": {"training": {"namespaces": ["ml"]}}}
    (policy,) = of_kind(chart.render(values), "NetworkPolicy").values()
    assert policy["metadata"]["namespace"] == "ml"
    assert policy["spec"]["podSelector"] == {"matchLabels": {"keepstep.dev/injected": "true"}}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == [26741, 26740]
    out = [
        value["spec"]["egress"]
        for value in of_kind(chart.render(EVERYTHING), "NetworkPolicy").values()
        if value["metadata"]["namespace"] in ("ml", "vision")
    ]
    assert [rule["ports"][0]["port"] for rule in out[0]] == [26741, 9444, 53]


def test_the_crds_of_the_release_are_those_of_the_repository(plain: list[Object]) -> None:
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
    assert of_kind(plain, "CustomResourceDefinition") == {
        file["metadata"]["name"]: file for file in files
    }


def test_optional_objects_are_rendered_only_when_enabled(chart: Chart, plain: list[Object]) -> None:
    options = {"NetworkPolicy", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not options & {body["kind"] for body in plain}
    assert options <= {body["kind"] for body in chart.render(EVERYTHING)}


def _left_out(webhook: Object) -> set[str]:
    (expression,) = webhook["namespaceSelector"]["matchExpressions"]
    assert (expression["key"], expression["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
    return set(expression["values"])


def _selects(selector: dict[str, str], deployment: Object) -> bool:
    labels: dict[str, Any] = deployment["spec"]["template"]["metadata"]["labels"]
    return selector.items() <= labels.items()


def _port_names(deployment: Object) -> set[str]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {port["name"] for port in container["ports"]}


def _cluster_wide(body: Object) -> bool:
    return body["kind"] in {
        "ClusterRole",
        "ClusterRoleBinding",
        "MutatingWebhookConfiguration",
        "Namespace",
    }


def test_the_reconciler_is_evicted_from_a_lost_node_within_half_a_minute(
    plain: list[Object],
) -> None:
    spec = of_kind(plain, "Deployment")["keepstep-reconcile"]["spec"]["template"]["spec"]
    left_after_s = {
        toleration["key"]: toleration["tolerationSeconds"] for toleration in spec["tolerations"]
    }
    assert left_after_s == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
    }
