"""What injection promises for every pod and policy."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import assume, given, settings
from jsonpatch import apply_patch, make_patch

from keepstep_operator.api.pod import PodRefusedError, injected_of, parse_pod, training_container
from keepstep_operator.api.policy import Accounting, Policy
from keepstep_operator.api.quantities import parse_bytes, parse_millicores
from keepstep_operator.injection import annotate_skip, inject
from tests.operator.injection.pod_security import baseline_violations, restricted_violations
from tests.operator.injection.pods import (
    ALL,
    DEFAULTS,
    EMPTY_DIR,
    EPHEMERAL,
    HOST_PATH,
    bare_pod,
    environment_of,
    indexed_job,
    job_set,
    named,
    policy,
    pytorch_job,
    sidecar_of,
)
from tests.operator.injection.strategies import pods, policies

Body = dict[str, Any]


def _inject(pod: Body, policy: Policy) -> Body:
    """Refusals that have a reason (an ephemeral volume without an fsGroup) are not our case."""
    try:
        return inject(pod, policy, DEFAULTS)
    except PodRefusedError as error:
        assume(error.reason != "NoFsGroup")
        raise


def _lost(old: Any, new: Any, path: str = "") -> list[str]:
    """Where something of `old` is not in `new`: keys, and list elements in their order."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            lost
            for name, value in old.items()
            for lost in (_lost(value, new[name], f"{path}/{name}") if name in new else [path])
        ]
    if isinstance(old, list) and isinstance(new, list):
        return _lost_of_list(old, new, path)
    return [] if old == new or old is None else [f"{path}: {old!r} became {new!r}"]


def _lost_of_list(old: list[Any], new: list[Any], path: str) -> list[str]:
    rest = iter(new)
    for container in old:
        if not any(not _lost(container, candidate) for candidate in rest):
            return [f"{path}: {container!r}"]
    return []


@given(pod=pods(), policy=policies())
@settings(max_examples=300)
def test_a_second_injection_changes_nothing(pod: Body, policy: Policy) -> None:
    once = _inject(pod, policy)
    assert inject(once, policy, DEFAULTS) == once


@given(pod=pods(), policy=policies())
@settings(max_examples=300)
def test_injection_removes_nothing_from_the_pod(pod: Body, policy: Policy) -> None:
    before = deepcopy(pod)
    injected = _inject(pod, policy)
    assert pod == before, "the argument was changed"
    pod["spec"].pop("terminationGracePeriodSeconds", None)  # see the next test
    if policy.accounting is Accounting.CARVE_OUT:
        name = training_container(parse_pod(pod)).name
        del named(pod["spec"]["containers"], name)["resources"]
    assert _lost(pod, injected) == []


@given(pod=pods(), policy=policies())
def test_the_grace_period_is_raised_to_a_flush_and_never_lowered(pod: Body, policy: Policy) -> None:
    own = pod["spec"].get("terminationGracePeriodSeconds", 30)
    grace = _inject(pod, policy)["spec"]["terminationGracePeriodSeconds"]
    assert grace >= own
    assert grace >= min(policy.flush_timeout_s + 10, 120)
    assert grace in (own, min(policy.flush_timeout_s + 10, 120))


@given(pod=pods(), policy=policies())
@settings(max_examples=200)
def test_applying_the_patch_gives_the_injected_pod(pod: Body, policy: Policy) -> None:
    injected = _inject(pod, policy)
    patch = list(make_patch(pod, injected))
    assert apply_patch(pod, patch) == injected
    touched = {operation["path"] for operation in patch if operation["op"] != "add"}
    assert not {path for path in touched if path.endswith(("/name", "/image"))}, "added, not mixed"


@given(pod=pods(), policy=policies())
def test_carved_out_resources_leave_the_total_requests_of_the_pod_unchanged(
    pod: Body, policy: Policy
) -> None:
    injected = _inject(pod, policy)
    name = training_container(parse_pod(pod)).name
    before = named(pod["spec"]["containers"], name).get("resources", {})
    after = named(injected["spec"]["containers"], name).get("resources", {})
    if before == after:
        return
    injected_ = injected_of(parse_pod(injected))
    assert injected_ is not None
    assert not any("CarveOut" in warning for warning in injected_.warnings)
    sidecar = sidecar_of(injected)["resources"]
    for kind, amounts in before.items():
        for resource, read in (("cpu", parse_millicores), ("memory", parse_bytes)):
            if resource in amounts:
                left = read(after[kind][resource])
                assert left > 0
                own = sidecar.get(
                    kind if resource == "cpu" else "requests", {}
                )  # not the spare memory
                share = own.get(resource, sidecar["requests"][resource])
                assert left + read(share) == read(amounts[resource])


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("volume", [EMPTY_DIR, EPHEMERAL], ids=["emptyDir", "ephemeral"])
def test_a_restricted_pod_still_meets_the_restricted_standard_after_injection(
    make: Any, volume: Body
) -> None:
    pod = make()
    assert restricted_violations(pod) == []
    assert restricted_violations(inject(pod, policy(volume), DEFAULTS)) == []


def test_a_host_path_causes_only_the_unavoidable_pod_security_violations() -> None:
    injected = inject(pytorch_job(), policy(HOST_PATH), DEFAULTS)
    assert baseline_violations(injected) == ["hostPath keepstep-volume-nvme0"]
    root = [
        violation
        for violation in restricted_violations(injected)
        if "keepstep-sidecar" in violation
    ]
    assert root == [], "the sidecar itself needs no root"


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_the_sidecar_starts_before_everything_else(make: Any) -> None:
    first = inject(make(), policy(), DEFAULTS)["spec"]["initContainers"][0]
    assert first["name"] == "keepstep-sidecar"
    assert first["restartPolicy"] == "Always"
    wait = ["keepstep-sidecar", "probe", "--started", "--timeout", "120s"]
    assert first["lifecycle"]["postStart"]["exec"]["command"] == wait
    assert "startupProbe" not in first, "it would look once a second only"
    assert first["lifecycle"]["preStop"]["exec"]["command"] == ["keepstep-sidecar", "flush"]
    assert "readinessProbe" not in first
    assert "args" not in first


def test_the_sidecar_receives_all_settings_as_environment_variables() -> None:
    rules = policy(
        EMPTY_DIR,
        {**EPHEMERAL, "capacity": "50Gi"},
        stage={"every": 5},
        persist={"mode": "Fixed", "every": 100},
        retention={"local": {"last": 3}},
        sidecar={"ioThreadsPerVolume": 2, "bytesPerSecondLimit": "1Gi"},
        flushTimeout="1m",
    )
    environment = environment_of(sidecar_of(inject(pytorch_job(rank=1), rules, DEFAULTS)))
    assert environment == {
        "KEEPSTEP_RUN": "gpt-3f6a1f0e",
        "KEEPSTEP_NODE_RANK": "1",
        "KEEPSTEP_NODE": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "KEEPSTEP_POD": {"fieldRef": {"fieldPath": "metadata.uid"}},
        "KEEPSTEP_LEADER": "keepstep-gpt-3f6a1f0e.team-a.svc:26741",
        "KEEPSTEP_POD_IP": {"fieldRef": {"fieldPath": "status.podIP"}},
        "KEEPSTEP_PEER_LISTEN": ":26741",
        "KEEPSTEP_PEER_ADVERTISE": "$(KEEPSTEP_POD_IP):26741",
        "KEEPSTEP_PEER_REPLICAS": "0",
        "KEEPSTEP_MEMORY_DIR": "/run/keepstep",
        "KEEPSTEP_VOLUMES": "/keepstep/volumes/scratch /keepstep/volumes/claim",
        "KEEPSTEP_SLOTS": "4",
        "KEEPSTEP_MEMORY_LIMIT": str(2 << 30),
        "KEEPSTEP_STAGE_EVERY": "5",
        "KEEPSTEP_PERSIST_EVERY": "100",
        "KEEPSTEP_KEEP": "3",
        "KEEPSTEP_CAPACITY": str(50 << 30),
        "KEEPSTEP_IO_THREADS": "2",
        "KEEPSTEP_BYTES_PER_SECOND": str(1 << 30),
        "KEEPSTEP_FLUSH_TIMEOUT": "60",
        "KEEPSTEP_ON_LOSS": "restart",
        "KEEPSTEP_REPORT_URL": f"{DEFAULTS.reports_url}/v1/runs",
        "KEEPSTEP_REPORT_CA": DEFAULTS.reports_ca,
        "KEEPSTEP_REPORT_CA_FILE": "/keepstep/trust/ca.crt",
        "KEEPSTEP_REPORT_TOKEN_FILE": "/var/run/secrets/keepstep.dev/token/token",
        "KEEPSTEP_METRICS_PORT": "26740",
        "KEEPSTEP_UI_PORT": "26742",
        "KEEPSTEP_UI_SECRET": {"fieldRef": {"fieldPath": "metadata.uid"}},
        "WORLD_SIZE": "2",
        "RANK": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
    }


def test_rank_variables_with_field_references_are_copied_to_the_sidecar_and_secrets_are_not() -> (
    None
):
    pod = indexed_job()
    container = pod["spec"]["containers"][0]
    container["env"] += [
        {"name": "RANK", "value": "$(JOB_COMPLETION_INDEX)"},
        {"name": "NODE_RANK", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    environment = environment_of(sidecar_of(inject(pod, policy(), DEFAULTS)))
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert environment["JOB_COMPLETION_INDEX"] == {"fieldRef": {"fieldPath": field}}
    assert not {"RANK", "NODE_RANK"} & set(environment)


def test_only_the_training_container_gets_shared_memory_and_only_the_sidecar_gets_the_token() -> (
    None
):
    spec = inject(pytorch_job(), policy(), DEFAULTS)["spec"]
    everyone = [*spec["initContainers"], *spec["containers"]]

    def who(volume: str) -> list[str]:
        return [
            container["name"]
            for container in everyone
            if any(mount["name"] == volume for mount in container.get("volumeMounts", []))
        ]

    assert who("keepstep-memory") == ["keepstep-sidecar", "pytorch"]
    assert who("keepstep-token") == ["keepstep-sidecar"]
    assert who("keepstep-volume-scratch") == ["keepstep-sidecar"]
    trainer = environment_of(named(spec["containers"], "pytorch"))
    assert trainer["KEEPSTEP_SOCKET"] == "/run/keepstep/sidecar.sock"
    assert spec["securityContext"]["supplementalGroups"] == [65532]


def test_shared_memory_is_sized_for_the_slots_and_charged_to_the_sidecar() -> None:
    spec = inject(bare_pod(), policy(memory={"limit": "2Gi"}), DEFAULTS)["spec"]
    memory = named(spec["volumes"], "keepstep-memory")["emptyDir"]
    assert memory == {"medium": "Memory", "sizeLimit": "2064Mi"}
    resources = sidecar_of({"spec": spec})["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "2304Mi"


def test_huge_pages_are_a_resource_of_the_sidecar_and_mounted_in_both_containers() -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1", "memory": "4Gi"}}
    pod = inject(pod, policy(memory={"limit": "2049Mi", "hugePages": "2Mi"}), DEFAULTS)
    spec, sidecar = pod["spec"], sidecar_of(pod)
    assert named(spec["volumes"], "keepstep-hugepages")["emptyDir"] == {"medium": "HugePages-2Mi"}
    mount = {"name": "keepstep-hugepages", "mountPath": "/keepstep/hugepages"}
    assert mount in sidecar["volumeMounts"]
    assert mount in spec["containers"][0]["volumeMounts"]
    assert environment_of(sidecar)["KEEPSTEP_HUGE_PAGES_DIR"] == "/keepstep/hugepages"
    requests, limits = sidecar["resources"]["requests"], sidecar["resources"]["limits"]
    assert requests["hugepages-2Mi"] == limits["hugepages-2Mi"] == "2050Mi"
    assert requests["memory"] == "256Mi", "its slots are counted as huge pages"
    assert limits["memory"] == "2305Mi", "small images are on small pages all the same"
    assert spec["securityContext"]["fsGroup"] == 65532


def test_a_pod_with_its_own_huge_pages_of_unspecified_size_is_not_injected() -> None:
    """The kubelet mounts such a volume only while the pod asks for pages of one size."""
    pod = bare_pod()
    pod["spec"]["volumes"].append({"name": "own", "emptyDir": {"medium": "HugePages"}})
    with pytest.raises(PodRefusedError, match="medium: HugePages-2Mi"):
        inject(pod, policy(memory={"limit": "2Gi", "hugePages": "2Mi"}), DEFAULTS)
    inject(pod, policy(memory={"limit": "2Gi"}), DEFAULTS)


def test_huge_pages_are_requested_only_if_the_policy_enables_them() -> None:
    pod = inject(bare_pod(), policy(memory={"limit": "2Gi", "hugePages": "None"}), DEFAULTS)
    assert "huge" not in json.dumps(pod)
    assert "fsGroup" not in pod["spec"]["securityContext"]


def test_a_trainer_with_a_mount_at_the_huge_pages_path_is_not_injected() -> None:
    pod = bare_pod()
    mounts = pod["spec"]["containers"][0].setdefault("volumeMounts", [])
    mounts.append({"name": "data", "mountPath": "/keepstep/hugepages/own"})
    with pytest.raises(PodRefusedError, match="mounts /keepstep/hugepages/own"):
        inject(pod, policy(memory={"limit": "2Gi", "hugePages": "2Mi"}), DEFAULTS)


@pytest.mark.parametrize(
    ("training", "requests", "limits"),
    [
        ({"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}, "100m", None),
        ({}, "100m", None),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "3", "memory": "4Gi"}}, "100m", None),
        ({"limits": {"cpu": "3", "memory": "4Gi"}}, "500m", "500m"),
    ],
    ids=["no limit", "nothing", "Burstable", "Guaranteed"],
)
def test_the_sidecar_is_limited_in_cpu_only_in_a_guaranteed_pod(
    training: dict[str, Any], requests: str, limits: str | None
) -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["resources"] = training
    resources = sidecar_of(inject(pod, policy(), DEFAULTS))["resources"]
    assert resources["requests"]["cpu"] == requests
    assert resources["limits"].get("cpu") == limits


def test_the_token_is_for_the_reports_api_alone() -> None:
    spec = inject(bare_pod(), policy(), DEFAULTS)["spec"]
    token = named(spec["volumes"], "keepstep-token")["projected"]
    assert token["defaultMode"] == 0o444
    assert token["sources"] == [
        {
            "serviceAccountToken": {
                "audience": "reports.keepstep.dev",
                "expirationSeconds": 21600,
                "path": "token",
            }
        }
    ]


def test_a_host_path_is_prepared_by_an_init_container_and_mounted_below_the_run() -> None:
    spec = inject(job_set(job=2, index=1), policy(HOST_PATH), DEFAULTS)["spec"]
    prepare, sidecar = spec["initContainers"][:2]
    below = "team-a/llama-aa11bb22/20001"
    assert prepare["name"] == "keepstep-volumes"
    assert prepare["command"][:3] == ["keepstep-sidecar", "prepare", f"/host/nvme0/{below}"]
    assert prepare["image"] == sidecar["image"] == DEFAULTS.sidecar_image
    security = prepare["securityContext"]
    assert security["runAsUser"] == 0
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
    volume = named(spec["volumes"], "keepstep-volume-nvme0")
    assert volume["hostPath"] == {"path": "/mnt/nvme0/keepstep", "type": "DirectoryOrCreate"}
    assert {
        "name": "keepstep-volume-nvme0",
        "mountPath": "/keepstep/volumes/nvme0",
        "subPath": below,
    } in sidecar["volumeMounts"]


def test_an_ephemeral_claim_is_made_writable_for_the_sidecar() -> None:
    spec = inject(bare_pod(), policy(EPHEMERAL), DEFAULTS)["spec"]
    assert spec["securityContext"]["fsGroup"] == 65532
    claim = named(spec["volumes"], "keepstep-volume-claim")["ephemeral"]["volumeClaimTemplate"]
    assert claim["spec"]["storageClassName"] == "local"
    assert claim["spec"]["resources"] == {"requests": {"storage": "200Gi"}}


def test_injection_never_changes_the_group_of_the_users_own_claims() -> None:
    pod = bare_pod()
    pod["spec"]["volumes"].append({"name": "d", "persistentVolumeClaim": {"claimName": "d"}})
    with pytest.raises(PodRefusedError, match="set fsGroup in the pod template"):
        inject(pod, policy(EPHEMERAL), DEFAULTS)
    pod["spec"]["securityContext"] = {"fsGroup": 3000}
    assert inject(pod, policy(EPHEMERAL), DEFAULTS)["spec"]["securityContext"]["fsGroup"] == 3000


def test_an_impossible_carve_out_adds_resources_with_a_warning() -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "1Gi"}}
    injected = inject(pod, policy(accounting="CarveOut"), DEFAULTS)
    injected_ = injected_of(parse_pod(injected))
    assert injected_ is not None
    assert "the sidecar needs 2304Mi of memory" in injected_.warnings[0]
    assert injected["spec"]["containers"][0]["resources"] == {"limits": {"memory": "1Gi"}}


def test_the_ephemeral_storage_limit_of_a_pod_includes_the_volumes_of_the_sidecar() -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"] = "10Gi"
    limits = sidecar_of(inject(pod, policy(EMPTY_DIR), DEFAULTS))["resources"]["limits"]
    assert parse_bytes(limits["ephemeral-storage"]) > 95 << 30
    unlimited = inject(pod, policy({"name": "a", "emptyDir": {}}), DEFAULTS)
    injected = injected_of(parse_pod(unlimited))
    assert injected is not None
    assert "the kubelet may evict the pod; set capacity" in injected.warnings[0]


def test_a_pod_on_the_hosts_network_declares_no_port() -> None:
    pod = bare_pod()
    assert sidecar_of(inject(pod, policy(), DEFAULTS))["ports"][0]["containerPort"] == 26740
    pod["spec"]["hostNetwork"] = True
    assert "ports" not in sidecar_of(inject(pod, policy(), DEFAULTS))


def _warnings(pod: Body) -> tuple[str, ...]:
    injected = injected_of(parse_pod(pod))
    assert injected is not None
    return injected.warnings


@pytest.mark.parametrize(
    "change",
    [
        {"ports": [{"containerPort": 26740}]},
        {"ports": [{"containerPort": 8000, "hostPort": 26740, "protocol": "TCP"}]},
        {"livenessProbe": {"httpGet": {"port": 26740}}},
        {"startupProbe": {"tcpSocket": {"port": 26740}}},
        {"env": [{"name": "OTEL_EXPORTER_PROMETHEUS_PORT", "value": "26740"}]},
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_the_sidecar_does_not_use_a_metrics_port_that_the_pod_uses(change: Body, kind: str) -> None:
    pod = bare_pod()
    pod["spec"][kind] = [*pod["spec"].get(kind, []), {"name": "more", "image": "x", **change}]
    injected = inject(pod, policy(), DEFAULTS)
    assert [port["name"] for port in sidecar_of(injected)["ports"]] == ["keepstep-peer"]
    assert "KEEPSTEP_METRICS_PORT" not in environment_of(sidecar_of(injected))
    assert "serves no metrics, since container more uses port 26740" in _warnings(injected)[0]


def test_the_run_page_is_disabled_if_the_pod_uses_its_port() -> None:
    pod = bare_pod()
    assert "KEEPSTEP_UI_PORT" in environment_of(sidecar_of(inject(pod, policy(), DEFAULTS)))
    pod["spec"]["containers"][0]["ports"] = [{"containerPort": 26742}]
    environment = environment_of(sidecar_of(inject(pod, policy(), DEFAULTS)))
    assert not {"KEEPSTEP_UI_PORT", "KEEPSTEP_UI_SECRET"} & environment.keys()


def test_the_sidecar_uses_the_ports_of_the_policy() -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["ports"] = [{"containerPort": 26740}]
    asked = policy(peers={}, sidecar={"ports": {"metrics": 9464, "peer": 9999}})
    ports = [port["containerPort"] for port in sidecar_of(inject(pod, asked, DEFAULTS))["ports"]]
    assert ports == [9464, 9999]


def test_the_peer_port_is_changed_if_the_pod_already_uses_it() -> None:
    pod = bare_pod()
    taken = [{"containerPort": port} for port in (26740, 26741, 26742)]
    pod["spec"]["containers"][0]["ports"] = taken
    injected = inject(pod, policy(peers={}), DEFAULTS)
    environment = environment_of(sidecar_of(injected))
    assert environment["KEEPSTEP_PEER_LISTEN"] == ":26743"
    assert environment["KEEPSTEP_PEER_ADVERTISE"] == "$(KEEPSTEP_POD_IP):26743"
    assert (
        "peers connect to port 26743, since container main uses port 26741"
        in _warnings(injected)[1]
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, None),
        ({"dnsPolicy": "ClusterFirst"}, None),
        ({"hostNetwork": True}, "Set dnsPolicy: ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, "on the host's network"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Set dnsPolicy: ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, None),
        ({"dnsPolicy": "Default"}, "Set dnsPolicy: ClusterFirst in"),
        ({"dnsPolicy": "None"}, None),
    ],
)
def test_a_pod_that_cannot_resolve_the_operator_name_gets_a_warning(
    spec: Body, words: str | None
) -> None:
    messages = _warnings(inject(_with(bare_pod(), **spec), policy(), DEFAULTS))
    assert any(words in message for message in messages) if words else messages == ()


def test_pods_that_keep_copies_for_each_other_prefer_different_nodes() -> None:
    pod = pytorch_job()
    own = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
    kind, preferred = "podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution"
    pod["spec"]["affinity"] = {kind: {preferred: [own]}, "podAffinity": {"x": "y"}}
    affinity = inject(pod, policy(peers={}), DEFAULTS)["spec"]["affinity"]
    selector = {"matchLabels": {"keepstep.dev/run-key": "gpt-3f6a1f0e"}}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    assert affinity[kind][preferred] == [own, {"weight": 100, "podAffinityTerm": term}]
    assert affinity["podAffinity"] == {"x": "y"}
    assert "affinity" not in inject(pytorch_job(), policy(), DEFAULTS)["spec"]


def test_the_sidecar_image_and_addresses_are_never_taken_from_the_pod() -> None:
    pod = bare_pod()
    pod["metadata"]["annotations"] |= {
        "keepstep.dev/image": "evil",
        "keepstep.dev/reports-url": "https://evil",
    }
    pod["spec"]["containers"][0]["env"] = [
        {"name": "KEEPSTEP_REPORT_URL", "value": "https://evil"},
        {"name": "PET_X", "value": "kept"},
    ]
    sidecar = sidecar_of(inject(pod, policy(), DEFAULTS))
    assert sidecar["image"] == DEFAULTS.sidecar_image
    environment = environment_of(sidecar)
    assert environment["KEEPSTEP_REPORT_URL"] == f"{DEFAULTS.reports_url}/v1/runs"
    assert environment["PET_X"] == "kept"


@pytest.mark.parametrize("name", ["shareProcessNamespace", "hostPID"])
def test_a_shared_process_namespace_causes_a_warning(name: str) -> None:
    pod = bare_pod()
    pod["spec"][name] = True
    annotation = inject(pod, policy(), DEFAULTS)["metadata"]["annotations"]["keepstep.dev/status"]
    assert any(name in warning for warning in json.loads(annotation)["warnings"])


@pytest.mark.parametrize("volume", ["keepstep-token", "keepstep-volume-scratch"])
def test_the_trainer_does_not_get_the_sidecars_volumes_by_naming_them(volume: str) -> None:
    pod = bare_pod()
    mount = {"name": volume, "mountPath": "/mine"}
    pod["spec"]["containers"][0].setdefault("volumeMounts", []).append(mount)
    with pytest.raises(PodRefusedError) as caught:
        inject(pod, policy(), DEFAULTS)
    assert caught.value.reason == "Conflict"


def test_a_host_path_that_the_chart_does_not_allow_is_refused() -> None:
    elsewhere = {"name": "a", "hostPath": {"path": "/mnt/nvme0-other"}}
    with pytest.raises(Exception, match=r"/mnt/nvme0-other is not allowed .* /mnt/nvme0, /var"):
        inject(bare_pod(), policy(elsewhere), DEFAULTS)


def _with(pod: Body, **spec: Any) -> Body:
    return {**pod, "spec": {**pod["spec"], **spec}}


def _mounting(path: str) -> Body:
    pod = bare_pod()
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "x", "mountPath": path}]
    return pod


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (_with(bare_pod(), os={"name": "windows"}), "Windows"),
        (_with(bare_pod(), resources={"limits": {"memory": "1Gi"}}), "PodResources"),
        (_with(bare_pod(), volumes=[{"name": "keepstep-token", "emptyDir": {}}]), "Conflict"),
        (_with(bare_pod(), initContainers=[{"name": "keepstep-sidecar"}]), "Conflict"),
        (_mounting("/run/keepstep/mine"), "Conflict"),
        (_with(bare_pod(), containers=[]), "NoContainer"),
    ],
)
def test_a_pod_that_cannot_be_injected_is_refused_with_the_reason(pod: Body, reason: str) -> None:
    with pytest.raises(PodRefusedError) as caught:
        inject(pod, policy(), DEFAULTS)
    assert caught.value.reason == reason


def test_a_template_that_was_copied_from_another_jobs_pod_is_refused() -> None:
    stale = inject(pytorch_job(), policy(), DEFAULTS)
    stale["metadata"]["ownerReferences"][0]["uid"] = "99999999-0000-4000-8000-000000000000"
    with pytest.raises(PodRefusedError, match="copied from an injected pod"):
        inject(stale, policy(), DEFAULTS)
    refused = annotate_skip(stale, reason="Conflict", message="copied")
    assert refused["metadata"]["labels"]["keepstep.dev/injected"] == "refused"


def test_a_refused_pod_carries_the_reason_and_is_otherwise_as_it_was() -> None:
    pod = pytorch_job()
    refused = annotate_skip(pod, reason="PolicyNotFound", message="there is none")
    injected = injected_of(parse_pod(refused))
    assert injected is not None
    assert (injected.reason, injected.message, injected.policy) == (
        "PolicyNotFound",
        "there is none",
        "default",
    )
    del refused["metadata"]["annotations"]["keepstep.dev/status"]
    assert refused["metadata"]["labels"].pop("keepstep.dev/injected") == "refused"
    assert refused == pod


def test_a_pod_that_was_refused_can_be_injected_later() -> None:
    refused = annotate_skip(pytorch_job(), reason="PolicyNotFound", message="there is none")
    injected = inject(refused, policy(), DEFAULTS)
    assert injected == inject(pytorch_job(), policy(), DEFAULTS)


# --- compile caches ----------------------------------------------------------------------------

_CACHE = "/keepstep/compile-cache"


def _cache_mount(pod: Body) -> Body | None:
    (training,) = (
        container for container in pod["spec"]["containers"] if container["name"] == "pytorch"
    )
    mounts = [mount for mount in training["volumeMounts"] if mount["mountPath"] == _CACHE]
    value = environment_of(training).get("KEEPSTEP_COMPILE_CACHE_DIR")
    assert value == (_CACHE if mounts else None)
    return mounts[0] if mounts else None


def test_compile_caches_are_mounted_beside_the_run_directory_of_the_pod() -> None:
    made = inject(pytorch_job(), policy(HOST_PATH, compileCache={"limit": "1Gi"}), DEFAULTS)
    own = "team-a/gpt-3f6a1f0e/1/.compile-cache"
    name = "keepstep-volume-nvme0"
    assert _cache_mount(made) == {"name": name, "mountPath": _CACHE, "subPath": own}
    limited = ["--compile-cache", f"/host/nvme0/{own}", "--compile-cache-limit", str(1 << 30)]
    assert made["spec"]["initContainers"][0]["command"][-4:] == limited


def test_compile_caches_never_use_a_volume_whose_size_limit_could_evict_the_pod() -> None:
    bounded = {"name": "scratch", "emptyDir": {"sizeLimit": "10Gi"}}
    assert _cache_mount(inject(pytorch_job(), policy(bounded), DEFAULTS)) is None
    mount = _cache_mount(inject(pytorch_job(), policy(bounded, HOST_PATH), DEFAULTS))
    assert mount is not None
    assert mount["name"] == "keepstep-volume-nvme0"


@pytest.mark.parametrize("limit", [0, "0"])
def test_a_policy_can_disable_compile_caches(limit: object) -> None:
    made = inject(pytorch_job(), policy(HOST_PATH, compileCache={"limit": limit}), DEFAULTS)
    assert _cache_mount(made) is None
    assert "--compile-cache" not in made["spec"]["initContainers"][0]["command"]
