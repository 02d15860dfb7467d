"""What a pod gets for peers, an archive, and the nodes that hold its shards."""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.spans import LONGEST, format_spans, is_in_spans
from keepstep_operator.injection import NearNode, inject
from tests.operator.injection.pod_security import restricted_violations
from tests.operator.injection.pods import (
    ALL,
    DEFAULTS,
    EMPTY_DIR,
    EPHEMERAL,
    HOST_PATH,
    bare_pod,
    environment_of,
    policy,
    pytorch_job,
    sidecar_of,
)

Body = dict[str, Any]
S3 = {
    "s3": {
        "bucket": "ckpt",
        "prefix": "team/x",
        "endpoint": "http://10.0.0.1:7070",
        "region": "eu-1",
        "credentialsSecretRef": {"name": "s3-keys"},
    },
    "every": 500,
}


def _given(**spec: Any) -> dict[str, Any]:
    return environment_of(sidecar_of(inject(pytorch_job(), policy(**spec), DEFAULTS)))


def test_the_archive_url_of_the_sidecar_contains_the_namespace_of_the_pod() -> None:
    found = _given(archive=S3, retention={"archive": {"last": 5, "every": "6h"}})
    variables = {
        name: value for name, value in found.items() if name.startswith("KEEPSTEP_ARCHIVE")
    }
    assert variables == {
        "KEEPSTEP_ARCHIVE": "s3://ckpt/team/x/team-a",
        "KEEPSTEP_ARCHIVE_EVERY": "500",
        "KEEPSTEP_ARCHIVE_KEEP": "5",
        "KEEPSTEP_ARCHIVE_KEEP_EVERY": "21600s",
        "KEEPSTEP_ARCHIVE_ENDPOINT": "http://10.0.0.1:7070",
        "KEEPSTEP_ARCHIVE_REGION": "eu-1",
    }


@pytest.mark.parametrize(
    ("archive", "keys"),
    [
        (S3, {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}),
        (
            {"gcs": {"bucket": "b", "credentialsSecretRef": {"name": "s3-keys"}}},
            {"GOOGLE_SERVICE_ACCOUNT_KEY"},
        ),
        (
            {
                "azure": {
                    "container": "b",
                    "account": "us",
                    "credentialsSecretRef": {"name": "s3-keys"},
                }
            },
            {"AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"},
        ),
    ],
    ids=["s3", "gcs", "azure"],
)
def test_credentials_come_from_a_secret_into_the_sidecar_alone_and_may_be_missing(
    archive: Body, keys: set[str]
) -> None:
    spec = inject(pytorch_job(), policy(HOST_PATH, archive=archive), DEFAULTS)["spec"]
    for container in [*spec["initContainers"], *spec["containers"]]:
        named = {
            variable["name"]: variable["valueFrom"]["secretKeyRef"]
            for variable in container.get("env", [])
            if "s3-keys" in str(variable)
        }
        expected = keys if container["name"] == "keepstep-sidecar" else set()
        assert set(named) == expected, container["name"]
        assert all(value["optional"] and value["key"] == key for key, value in named.items())
    assert "s3-keys" not in str(spec["volumes"])


def test_an_azure_archive_passes_the_account_and_an_az_url_to_the_sidecar() -> None:
    found = _given(archive={"azure": {"container": "ckpt", "account": "us"}})
    assert found["KEEPSTEP_ARCHIVE"] == "az://ckpt/team-a"
    assert found["AZURE_STORAGE_ACCOUNT_NAME"] == "us"


def test_a_shared_claim_is_mounted_in_the_sidecar_alone() -> None:
    rules = policy(archive={"directory": {"claimName": "shared"}})
    spec = inject(pytorch_job(), rules, DEFAULTS)["spec"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "keepstep-archive"]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    mount = {"name": "keepstep-archive", "mountPath": "/keepstep/archive"}
    sidecar, *others = spec["initContainers"]
    assert mount in sidecar["volumeMounts"]
    assert "keepstep-archive" not in str([*others, *spec["containers"]])
    assert environment_of(sidecar)["KEEPSTEP_ARCHIVE"] == "/keepstep/archive"


def test_a_host_path_archive_is_prepared_and_mounted_only_for_its_namespace() -> None:
    rules = policy(archive={"directory": {"path": "/mnt/nvme0/archive"}})
    prepare, sidecar = inject(bare_pod(), rules, DEFAULTS)["spec"]["initContainers"]
    assert prepare["command"] == ["keepstep-sidecar", "prepare", "/host-archive/team-a"]
    assert prepare["volumeMounts"] == [{"name": "keepstep-archive", "mountPath": "/host-archive"}]
    assert {
        "name": "keepstep-archive",
        "mountPath": "/keepstep/archive",
        "subPath": "team-a",
    } in sidecar["volumeMounts"]


def test_a_variable_is_defined_before_the_variables_that_refer_to_it() -> None:
    sidecar = sidecar_of(inject(pytorch_job(), policy(peers={}), DEFAULTS))
    order = [variable["name"] for variable in sidecar["env"]]
    assert order.index("KEEPSTEP_POD_IP") < order.index("KEEPSTEP_PEER_ADVERTISE")


def test_archive_retention_by_steps_is_passed_to_the_sidecar() -> None:
    found = _given(archive=S3, retention={"archive": {"everySteps": 9}})
    assert (found["KEEPSTEP_ARCHIVE_KEEP"], found["KEEPSTEP_ARCHIVE_KEEP_EVERY"]) == ("3", "9")
    assert "KEEPSTEP_KEEP_EVERY" not in found
    found = _given(retention={"local": {"last": 1, "everySteps": 9}})
    assert (found["KEEPSTEP_KEEP"], found["KEEPSTEP_KEEP_EVERY"]) == ("1", "9")


def test_the_restore_timeout_is_passed_to_the_trainer_unless_it_sets_one_itself() -> None:
    rules = policy(restore={"timeout": "90s"})
    training = inject(bare_pod(), rules, DEFAULTS)["spec"]["containers"][0]
    assert environment_of(training)["KEEPSTEP_RESTORE_TIMEOUT"] == "90"
    pod = bare_pod()
    own = {"name": "KEEPSTEP_RESTORE_TIMEOUT", "value": "7"}
    pod["spec"]["containers"][0]["env"] = [own]
    found = inject(pod, rules, DEFAULTS)["spec"]["containers"][0]["env"]
    assert [variable for variable in found if variable["name"] == own["name"]] == [own]


def test_nodes_that_hold_shards_are_preferred_and_never_required() -> None:
    pod = bare_pod()
    theirs = {"weight": 7, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
    pod["spec"]["affinity"] = {
        "podAffinity": {},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [theirs]},
    }
    near = (NearNode("node-1", 100), NearNode("node-2", 50))
    found = inject(pod, policy(HOST_PATH), DEFAULTS, near=near)["spec"]["affinity"]
    assert found["podAffinity"] == {}
    assert set(found["nodeAffinity"]) == {"preferredDuringSchedulingIgnoredDuringExecution"}
    first, *ours = found["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert first == theirs
    assert [(term["weight"], term["preference"]) for term in ours] == [
        (
            weight,
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
        )
        for node, weight in (("node-1", 100), ("node-2", 50))
    ]


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_a_pod_with_all_options_is_valid_and_meets_the_restricted_standard(make: Any) -> None:
    far = {"peers": {"replicas": 2}, "archive": S3}
    near = (NearNode("node-1", 100),)
    pod = inject(make(), policy(EMPTY_DIR, HOST_PATH, EPHEMERAL, **far), DEFAULTS, near=near)
    kubernetes_validate.validate(pod, "1.31", strict=True)
    pod = inject(make(), policy(**far), DEFAULTS, near=near)
    assert restricted_violations(pod) == []
    claimed = policy(archive={"directory": {"claimName": "shared"}})
    assert restricted_violations(inject(make(), claimed, DEFAULTS)) == []


@given(numbers=st.sets(st.integers(0, 5000), max_size=300), other=st.integers(0, 5000))
def test_an_encoded_set_of_numbers_survives_a_round_trip(numbers: set[int], other: int) -> None:
    text = format_spans(numbers)
    assert all(is_in_spans(text, number) for number in numbers)
    assert is_in_spans(text, other) == (other in numbers)


def test_encoded_sets_that_are_too_long_or_invalid_contain_no_wrong_number() -> None:
    text = format_spans(range(0, 20_000, 2))
    assert len(text) <= LONGEST
    assert is_in_spans(text, 0)
    assert not is_in_spans(text, 1)
    for wrong in ("", "a", "1-", "-1", "1-b", "3-1"):
        assert not is_in_spans(wrong, 2), wrong


# --- forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("gpt-1a2b3c4d/1200", "gpt-1a2b3c4d/1200"),
        ("gpt-1a2b3c4d/latest", "gpt-1a2b3c4d/latest"),
        ("1200", "./1200"),
        ("$(HOME)/1", "$$(HOME)/1"),
    ],
)
def test_restore_from_is_passed_to_the_sidecar_and_an_invalid_value_names_no_run(
    asked: str, expected: str
) -> None:
    job = pytorch_job()
    job["metadata"].setdefault("annotations", {})["keepstep.dev/restore-from"] = asked
    made = environment_of(sidecar_of(inject(job, policy(archive=S3), DEFAULTS)))
    assert made["KEEPSTEP_RESTORE_FROM"] == expected
    assert "KEEPSTEP_RESTORE_FROM" not in _given(archive=S3)


def test_restore_from_with_the_key_of_the_same_run_is_not_treated_as_a_fork() -> None:
    job = pytorch_job()
    key = inject(job, policy(), DEFAULTS)["metadata"]["labels"]["keepstep.dev/run-key"]
    job["metadata"].setdefault("annotations", {})["keepstep.dev/restore-from"] = f"{key}/1200"
    made = environment_of(sidecar_of(inject(job, policy(archive=S3), DEFAULTS)))
    assert made["KEEPSTEP_RESTORE_FROM"] == "./1200"
