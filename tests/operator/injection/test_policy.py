"""A CheckpointPolicy as values: defaults, limits, messages."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.retention import Retention
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.policy import (
    Accounting,
    EmptyDir,
    Ephemeral,
    HostPath,
    PolicyVolume,
    parse_policy,
    require_allowed,
)
from keepstep_operator.api.quantities import (
    format_bytes,
    format_millicores,
    parse_bytes,
    parse_duration,
    parse_millicores,
)
from keepstep_operator.api.tiers import Archive, ArchiveBucket, PeerSpec
from tests.operator.injection.pods import EMPTY_DIR, EPHEMERAL, HOST_PATH, policy, policy_body


def test_a_policy_without_optional_fields_gets_all_defaults() -> None:
    parsed = parse_policy(
        {
            "metadata": {"name": "p", "namespace": "n"},
            "spec": {"memory": {"limit": "1Gi"}, "volumes": [{"name": "a", "emptyDir": {}}]},
        }
    )
    assert parsed.volumes == (PolicyVolume(name="a", source=EmptyDir()),)
    assert (parsed.slots, parsed.stage_every, parsed.keep) == (None, 1, Retention())
    assert (parsed.persist_every, parsed.drive_writes_per_day) == (None, None)
    assert parsed.accounting == Accounting.ADD
    assert (parsed.cpu_millicores, parsed.overhead_bytes, parsed.io_threads) == (100, 256 << 20, 16)
    assert (parsed.restore_timeout_s, parsed.flush_timeout_s) == (600, 60)
    assert (parsed.run_ttl_s, parsed.bytes_per_second) == (604800, None)
    assert parsed.volume_limit_bytes is None


def test_each_volume_source_of_a_policy_is_parsed() -> None:
    parsed = policy(EMPTY_DIR, HOST_PATH, EPHEMERAL)
    assert [volume.source for volume in parsed.volumes] == [
        EmptyDir(size_limit_bytes=100 << 30),
        HostPath(path="/mnt/nvme0/keepstep"),
        Ephemeral(size_bytes=200 << 30, storage_class="local"),
    ]
    assert parsed.volume_limit_bytes == int((100 << 30) * 0.95)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"memory": {}}, r"spec.memory.limit: is needed"),
    ({"memory": {"limit": 32}}, r"spec.memory.limit: 32 is less than 1Mi; write a unit"),
    ({"memory": {"limit": "much"}}, r"spec.memory.limit: 'much' is not a quantity"),
    ({"memory": {"limit": "1Gi", "slots": 0}}, r"spec.memory.slots: 0 .* from 1 to 16"),
    ({"memory": []}, r"spec.memory: an object is needed"),
    ({"stage": {"every": True}}, r"spec.stage.every: True is not a whole number"),
    (
        {"stage": {"mode": "Auto", "every": 2}},
        r"spec.stage.every: has no effect with mode Auto; remove it",
    ),
    ({"persist": {"mode": "Fixed"}}, r"spec.persist.every: mode Fixed needs"),
    ({"persist": {"mode": "Often"}}, r"spec.persist.mode: 'Often' is not Auto or Fixed"),
    (
        {"stage": {"every": 2}, "persist": {"mode": "Fixed", "every": 5}},
        r"5 is no multiple of stage.every 2",
    ),
    (
        {"persist": {"driveWritesPerDay": "0.0"}},
        r"spec.persist.driveWritesPerDay: '0.0' is not a number like \"0.3\"",
    ),
    (
        {"persist": {"mode": "Fixed", "every": 5, "driveWritesPerDay": "1"}},
        r"spec.persist.driveWritesPerDay: has no effect with mode Fixed",
    ),
    ({"volumes": []}, r"spec.volumes: a list of 1 to 8"),
    ({"volumes": [EMPTY_DIR, EMPTY_DIR]}, r"names must differ: scratch, scratch"),
    ({"volumes": [{"name": "a"}]}, r"spec.volumes\[0\]: exactly one of .* not 0"),
    ({"volumes": [{**EMPTY_DIR, **HOST_PATH}]}, r"exactly one of .* not 2"),
    ({"volumes": [{"name": "A", "emptyDir": {}}]}, r"spec.volumes\[0\].name: 'A' is not"),
    (
        {"volumes": [{"name": "a", "hostPath": {"path": "mnt"}}]},
        r"spec.volumes\[0\].hostPath.path: an absolute directory",
    ),
    ({"volumes": [{"name": "a", "hostPath": {"path": "/mnt/../etc"}}]}, r"'\.\.'"),
    ({"volumes": [{"name": "a", "hostPath": {"path": "//"}}]}, r"root of the node"),
    ({"volumes": [{"name": "a", "ephemeral": {}}]}, r"ephemeral.size: is needed"),
    ({"flushTimeout": "121s"}, r"spec.flushTimeout: 121s is not from 1s to 120s"),
    ({"compileCache": {"limit": 4}}, r"compileCache.limit: 4 is less than 1Mi"),
    ({"runTTL": "59s"}, r"spec.runTTL: 59s is not from 60s"),
    ({"restore": {"timeout": "0s"}}, r"spec.restore.timeout: 0s is not from 1s"),
    ({"retention": {"local": {"every": "9000h"}}}, r"local.every: 9000h is not from 60s"),
    ({"archive": {"directory": {"claimName": "a", "path": "/a"}}}, r"exactly one of .* not 2"),
    ({"archive": {"directory": {"path": "/a/.."}}}, r"directory.path: must not contain '\.\.'"),
    ({"flushTimeout": "soon"}, r"spec.flushTimeout: 'soon' is not a duration"),
    ({"restore": {"timeout": 5}}, r"spec.restore.timeout: 5 is not a duration"),
    ({"sidecar": {"resources": {"cpu": "0"}}}, r"resources.cpu: 0 is not a positive"),
    ({"sidecar": {"resources": {"cpuLimit": "50m"}}}, r"cpuLimit: 50m is less than cpu"),
    ({"sidecar": {"ports": {"metrics": 80}}}, r"ports.metrics: 80 is not a whole number"),
    ({"sidecar": {"ports": {"metrics": 26741}}}, r"ports.peer: 26741 is the port for metrics"),
    ({"peers": {"replicas": 0}}, r"spec.peers.replicas: 0 .* from 1 to 8"),
    ({"peers": {"topologyKey": "a/b/c"}}, r"spec.peers.topologyKey: 'a/b/c' is not a label"),
    ({"peers": {"bytesPerSecondLimit": 5}}, r"peers.bytesPerSecondLimit: 5 is less than 1Mi"),
    ({"archive": {}}, r"spec.archive: exactly one of s3, gcs, azure, directory .* not 0"),
    ({"archive": {"s3": {}, "gcs": {}}}, r"spec.archive: exactly one of .* not 2"),
    ({"archive": {"s3": {}}}, r"spec.archive.s3.bucket: None is not the name of a bucket"),
    ({"archive": {"s3": {"bucket": "a\n"}}}, r"spec.archive.s3.bucket: 'a\\n' is not"),
    ({"archive": {"s3": {"bucket": "a", "prefix": "../b"}}}, r"archive.s3.prefix: '../b'"),
    ({"archive": {"s3": {"bucket": "a", "endpoint": "s3:9"}}}, r"s3.endpoint: 's3:9' is not"),
    ({"archive": {"s3": {"bucket": "a"}, "every": 0}}, r"spec.archive.every: 0 is not"),
    (
        {"archive": {"gcs": {"bucket": "a", "credentialsSecretRef": {}}}},
        r"archive.gcs.credentialsSecretRef.name: None is not the name of a Secret",
    ),
    ({"archive": {"azure": {"container": "a"}}}, r"archive.azure.account: None is not"),
    ({"archive": {"directory": {}}}, r"archive.directory: exactly one of claimName and path"),
    *(
        (
            {
                "volumes": [EMPTY_DIR, {"name": "a", "hostPath": {"path": local}}],
                "archive": {"directory": {"path": shared}},
            },
            f"spec.archive.directory: path {shared} and the volume a .* are one place",
        )
        for local, shared in (("/mnt/a", "/mnt/a"), ("/mnt/a", "/mnt/a/b"), ("/mnt/a", "/mnt"))
    ),
    ({"archive": {"directory": {"path": "nfs"}}}, r"directory.path: an absolute directory"),
    (
        {
            "archive": {"s3": {"bucket": "a"}},
            "retention": {"archive": {"every": "6h", "everySteps": 9}},
        },
        r"spec.retention.archive: takes everySteps or every, not both",
    ),
    ({"retention": {"archive": {"last": 3}}}, r"spec.retention.archive: has no effect"),
    (
        {"retention": {"local": {"every": "6h", "everySteps": 9}}},
        r"spec.retention.local: takes everySteps or every, not both",
    ),
    (
        {"archive": {"s3": {"bucket": "a"}}, "retention": {"archive": {"every": "1s"}}},
        r"spec.retention.archive.every: 1s is not from 60s",
    ),
]
"""Changes of a policy that cannot work, and what is said of them; tests/chart/test_rules.py has the
rules of the schema refuse each of them, too."""


@pytest.mark.parametrize(("spec", "message"), WRONG)
def test_a_wrong_policy_names_the_field_and_what_to_write(
    spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy(_with(spec))


def _with(spec: dict[str, Any]) -> dict[str, Any]:
    body = policy_body()
    body["spec"].update(spec)
    return body


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
_PATHS = [
    ("memory",), ("memory", "limit"), ("memory", "slots"), ("stage",), ("persist",),
    ("persist", "mode"), ("persist", "every"),
    ("persist", "driveWritesPerDay"), ("volumes",), ("accounting",), ("retention",),
    ("restore", "timeout"), ("sidecar", "resources"),
    ("sidecar", "resources", "cpu"), ("flushTimeout",), ("runTTL",), ("peers",),
    ("peers", "replicas"), ("peers", "topologyKey"), ("archive",), ("archive", "every"),
    ("archive", "s3"), ("archive", "s3", "bucket"), ("archive", "directory", "claimName"),
    ("archive", "azure", "credentialsSecretRef"), ("retention", "archive"),
]  # fmt: skip


@given(path=st.sampled_from(_PATHS), value=_ANYTHING)
@settings(max_examples=500)
def test_any_invalid_policy_value_raises_at_most_a_policy_error(
    path: tuple[str, ...], value: Any
) -> None:
    """One object that slipped past the schema must not end the cache of all policies."""
    body: dict[str, Any] = policy_body()
    at = body["spec"]
    for name in path[:-1]:
        at = at.setdefault(name, {})
    at[path[-1]] = value
    with suppress(PolicyError):
        parse_policy(body)


@given(value=_ANYTHING, name=st.sampled_from(["name", "emptyDir", "hostPath", "ephemeral"]))
@settings(max_examples=300)
def test_any_invalid_volume_value_raises_at_most_a_policy_error(value: Any, name: str) -> None:
    volume = {"name": "a", **({"emptyDir": {}} if name == "name" else {}), name: value}
    for wrong in (volume, {**volume, name: {"path": value, "size": value, "sizeLimit": value}}):
        with suppress(PolicyError):
            parse_policy(policy_body(wrong))
    with suppress(PolicyError):
        parse_policy(_with({"volumes": [value]}))


def test_peers_and_archive_of_a_policy_are_parsed() -> None:
    parsed = policy(
        peers={"replicas": 2, "topologyKey": "topology.kubernetes.io/zone"},
        archive={"s3": {"bucket": "ckpt", "credentialsSecretRef": {"name": "s3"}}, "every": 500},
        retention={"archive": {"last": 5, "every": "6h"}},
    )
    assert parsed.peers == PeerSpec(replicas=2, topology_key="topology.kubernetes.io/zone")
    assert parsed.archive == Archive(
        store=ArchiveBucket(kind="s3", name="ckpt", secret="s3"),
        every=500,
        kept=Retention(last=5, every_s=6 * 3600),
    )
    assert parsed.keep == Retention(last=2), "of the volumes, as before"


def test_local_retention_of_a_policy_is_parsed() -> None:
    found = policy(retention={"local": {"last": 3, "everySteps": 500}})
    assert found.keep == Retention(last=3, every_steps=500)
    assert policy(retention={"local": {"every": "6h"}}).keep == Retention(last=2, every_s=6 * 3600)


def test_a_policy_has_no_peers_and_no_archive_by_default_and_empty_peers_mean_one_replica() -> None:
    assert (policy().peers, policy().archive) == (None, None)
    assert policy(peers={}).peers == PeerSpec(replicas=1, topology_key="kubernetes.io/hostname")
    kept = policy(archive={"gcs": {"bucket": "b"}}).archive
    assert kept is not None
    assert (kept.every, kept.kept) == (1000, Retention(last=3))


def test_two_namespaces_have_different_prefixes_in_one_bucket() -> None:
    bucket = ArchiveBucket(kind="azure", name="ckpt", prefix="team/x", account="us")
    assert bucket.url("a") == "az://ckpt/team/x/a"
    assert bucket.url("b") != bucket.url("a")


def test_a_host_path_for_the_archive_must_be_allowed_like_a_volume() -> None:
    parsed = policy(archive={"directory": {"path": "/mnt/nfs//keepstep/"}})
    assert parsed.host_paths == ("/mnt/nfs/keepstep",)
    with pytest.raises(PolicyError, match=r"/mnt/nfs/keepstep is not allowed"):
        require_allowed(parsed, ["/mnt/nvme0"])


def test_too_little_memory_is_refused_with_its_own_reason() -> None:
    with pytest.raises(PolicyError) as caught:
        policy(memory={"limit": "1k"})
    assert (caught.value.reason, caught.value.field) == ("InvalidMemory", "memory.limit")


@pytest.mark.parametrize(
    ("path", "allowed", "refused"),
    [
        ("/mnt/nvme0", ["/mnt/nvme0"], False),
        ("/mnt//nvme0/./keepstep/", ["/mnt/nvme0/"], False),
        ("/mnt/nvme01", ["/mnt/nvme0"], True),
        ("/mnt", ["/mnt/nvme0"], True),
        ("/mnt/nvme0", [], True),
        ("/anything", ["/"], False),
    ],
)
def test_a_host_path_outside_the_allowed_prefixes_is_refused(
    path: str, allowed: list[str], refused: bool
) -> None:
    parsed = policy({"name": "a", "hostPath": {"path": path}})
    with pytest.raises(PolicyError) if refused else nullcontext():
        require_allowed(parsed, allowed)


def test_the_refusal_of_a_host_path_lists_the_allowed_prefixes() -> None:
    with pytest.raises(PolicyError, match=r"allowed: none") as caught:
        require_allowed(policy(HOST_PATH), [])
    assert caught.value.reason == "HostPathNotAllowed"


def _schema() -> dict[str, Any]:
    root = Path(__file__).parents[3]
    text = (root / "crds" / "keepstep.dev_checkpointpolicies.yaml").read_text()
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    spec: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def _defaults(schema: dict[str, Any]) -> Any:
    """What the API server fills in for an empty object."""
    if "default" not in schema and "properties" not in schema:
        return None
    value = dict(schema.get("default", {})) if "properties" in schema else schema["default"]
    for name, inner in schema.get("properties", {}).items():
        if name not in value and "default" in inner:
            value[name] = _defaults(inner)
    return value


def test_the_defaults_are_those_of_the_schema() -> None:
    body = policy_body()
    filled = {**_defaults(_schema()), "memory": {"limit": "2Gi"}, "volumes": [EMPTY_DIR]}
    given, bare = ({**body, "spec": spec} for spec in (filled, {**body["spec"]}))
    del bare["spec"]["memory"]["slots"]
    assert replace(parse_policy(given), spec={}) == replace(parse_policy(bare), spec={})


def test_the_memory_that_a_policy_adds_is_its_limit_plus_the_sidecar_overhead() -> None:
    added = parse_policy(policy_body(memory={"limit": "1Gi"}))
    carved = parse_policy(policy_body(memory={"limit": "1Gi"}, accounting="CarveOut"))
    assert added.added_bytes == (1 << 30) + (256 << 20)
    assert carved.added_bytes == 0


# Quantities and durations as Kubernetes reads them.


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("32Gi", 32 << 30),
        ("1.5Ki", 1536),
        (".5Mi", 512 << 10),
        ("10G", 10 * 10**9),
        ("7k", 7000),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("1E", 10**18),
        ("100m", 1),
        ("1500m", 2),
    ],
)
def test_sizes_are_read_as_kubernetes_reads_them(written: str | int, size_bytes: int) -> None:
    assert parse_bytes(written) == size_bytes


@pytest.mark.parametrize(
    ("written", "millicores"), [("100m", 100), (2, 2000), ("0.5", 500), (1.5, 1500), ("100u", 1)]
)
def test_cpu_quantities_are_parsed_to_millicores_and_rounded_up(
    written: str | int | float, millicores: int
) -> None:
    assert parse_millicores(written) == millicores


@pytest.mark.parametrize("written", ["", "Gi", "1KB", "1 Gi", "--1", "1e", "0x1", True, "1ki"])
def test_an_invalid_quantity_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(ValueError, match="512Mi, 32Gi or 10G"):
        parse_bytes(written)


@given(st.integers(0, 1 << 63))
def test_bytes_survive_being_written_and_read(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.integers(0, 10**7))
def test_cpus_survive_being_written_and_read(millicores: int) -> None:
    assert parse_millicores(format_millicores(millicores)) == millicores


def test_amounts_are_written_in_their_canonical_form() -> None:
    assert [format_bytes(size) for size in (0, 1000, 1 << 30, 2304 << 20)] == [
        "0",
        "1000",
        "1Gi",
        "2304Mi",
    ]
    assert [format_millicores(millicores) for millicores in (100, 2000)] == ["100m", "2"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("168h", 604800)])
def test_durations_are_sums_of_parts(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "1.5h", "-1s", "1d", "1 m"])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 15m or 2h"):
        parse_duration(text)
