"""Reviews over TLS: what a pod becomes, and that no trouble keeps it from starting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from keepstep_operator.admission import server as admission_server
from keepstep_operator.api.pod import injected_of, parse_pod
from keepstep_operator.kube.resources import QUOTAS, RUNS
from tests.harness import until
from tests.operator.admission.conftest import Running, Start
from tests.operator.admission.reviews import review_of
from tests.operator.apiserver import put_policy
from tests.operator.injection.pods import (
    DEFAULTS,
    HOST_PATH,
    NAMESPACE,
    bare_pod,
    policy_body,
    pytorch_job,
)


def _reason(pod: dict[str, Any]) -> str:
    injected = injected_of(parse_pod(pod))
    return injected.reason if injected else "nothing was said"


async def test_a_pod_without_the_policy_annotation_is_not_changed(started: Start) -> None:
    async with started() as running:
        pod = bare_pod()
        pod["metadata"]["annotations"] = {}
        assert await running.webhook.create(pod) == (pod, [])
        assert running.count("skipped", "NotAsked") == 1


async def test_a_pod_that_joins_a_run_gets_the_settings_of_the_other_pods(started: Start) -> None:
    """The policy is deleted by then, the chart has another image; root's is the chart's."""
    async with started() as running:
        _put_start(running, image="sidecar:0", version="0")
        created, warnings = await running.webhook.create(pytorch_job())
    sidecar = _sidecar(created)
    assert (sidecar["image"], warnings) == ("sidecar:0", [])
    assert _sidecar(created, "keepstep-volumes")["image"] == DEFAULTS.sidecar_image
    assert {"name": "KEEPSTEP_SLOTS", "value": "7"} in sidecar["env"]
    injected = injected_of(parse_pod(created))
    assert injected is not None
    assert (injected.image, injected.version, injected.generation) == ("sidecar:0", "0", 3)


def _sidecar(pod: dict[str, Any], name: str = "keepstep-sidecar") -> dict[str, Any]:
    (found,) = [
        container for container in pod["spec"]["initContainers"] if container["name"] == name
    ]
    return found


def _put_start(running: Running, **start: Any) -> None:
    """A run that goes by generation 3 of a policy that asks for seven slots."""
    spec = policy_body(HOST_PATH, memory={"limit": "1Gi", "slots": 7})["spec"]
    status = {"policy": {"name": "default", "generation": 3, "spec": spec}, "start": start}
    metadata = {"name": "gpt-3f6a1f0e", "namespace": NAMESPACE}
    running.server.put(RUNS, {"metadata": metadata, "status": status})


async def test_a_policy_that_is_created_after_its_job_is_waited_for(started: Start) -> None:
    async with started() as running:
        review = asyncio.create_task(running.webhook.create(pytorch_job()))
        await until(lambda: running.server.asked("GET", "checkpointpolicies") != [])
        put_policy(running.server, policy_body())
        created, _ = await review
        assert parse_pod(created).has_sidecar


async def test_a_failed_request_to_the_api_server_is_retried(started: Start) -> None:
    async with started() as running:
        put_policy(running.server, policy_body())
        running.server.broken, running.server.broken_part = 3, "/resourcequotas"
        created, warnings = await running.webhook.create(pytorch_job())
        assert (parse_pod(created).has_sidecar, warnings) == (True, [])


async def test_an_edited_policy_and_a_new_quota_take_effect_after_a_second(started: Start) -> None:
    async with started() as running:
        put_policy(running.server, policy_body())
        await running.webhook.create(pytorch_job())
        quota = {"metadata": {"name": "q", "namespace": NAMESPACE}, "spec": {"hard": {"cpu": "1"}}}
        running.server.put(QUOTAS, quota)
        put_policy(running.server, policy_body(memory={"limit": "12"}))
        await asyncio.sleep(1.1)
        running.server.requests.clear()
        created, _ = await running.webhook.create(pytorch_job())
        assert _reason(created) == "InvalidMemory"
        put_policy(running.server, policy_body())
        await asyncio.sleep(1.1)
        created, _ = await running.webhook.create(pytorch_job())
        assert _reason(created) == "NoRoom"


async def test_a_pod_with_an_invalid_policy_is_admitted_uninjected_with_a_warning(
    started: Start,
) -> None:
    async with started() as running:
        put_policy(running.server, policy_body(memory={"limit": "12"}))
        created, warnings = await running.webhook.create(pytorch_job())
        assert _reason(created) == "InvalidMemory"
        assert warnings == [
            "keepstep: not injected (InvalidMemory): policy default: spec.memory.limit: 12 is less"
            " than 1Mi; write a unit"
        ]


async def test_a_slow_api_server_does_not_use_up_the_webhooks_timeout(started: Start) -> None:
    async with started(deadline_s=0.3) as running:
        running.server.delay_s = 30
        begun = time.monotonic()
        created, _ = await running.webhook.create(pytorch_job())
        assert time.monotonic() - begun < 5
        assert _reason(created) == "Timeout"


async def test_an_internal_error_admits_the_pod_uninjected(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(admission_server, "decide_review", broken)
    async with started() as running:
        put_policy(running.server, policy_body())
        created, warnings = await running.webhook.create(pytorch_job())
        assert _reason(created) == "Internal"
        assert "RuntimeError: a bug" in warnings[0]
        assert running.count("failed", "Internal") == 1


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"request": {}}', b'{"request": {"uid": "1", "object": 5}}']
)
async def test_an_invalid_admission_review_is_refused_and_logged(
    started: Start, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with started() as running:
        status, text = await running.webhook.raw(data)
        assert status == 400
        assert "AdmissionReview" in text
    assert caplog.messages.count("admission.request_refused") == 1


@pytest.mark.parametrize(
    "path", ["/", "/inject", "/inject-", "/inject-5ec", "/inject-5ecret/", "/%69"]
)
async def test_every_path_but_the_secret_one_returns_404(
    started: Start, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(path="/inject-5ecret") as running:
        put_policy(running.server, policy_body())
        running.server.requests.clear()
        status, text = await running.webhook.raw(b"x" * 100_000, path=path)
        assert (status, text) == (404, "404: Not Found")
        assert running.server.asked("GET", "checkpointruns") == []
        assert caplog.messages == [] or "admission.request_refused" not in caplog.messages
        status, text = await running.webhook.raw(b"{", path="/inject-5ecret?timeout=10s")
        assert status == 400


async def test_log_messages_about_a_pod_are_short_and_printable(
    started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with started() as running:
        pod = bare_pod("n" * 5000)
        pod["metadata"]["annotations"]["keepstep.dev/policy"] = "\x1b]0;pwned\x07" + "p" * 60_000
        await running.webhook.create(pod)
    (record,) = [record for record in caplog.records if record.message == "admission.pod_reviewed"]
    assert len(str(vars(record))) < 4000
    assert "\x1b" not in str([*vars(record).values()])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", None),
        ("metadata", {"annotations": {"keepstep.dev/policy": "default"}, "name": 5}),
        ("spec", None),
        ("spec", {"containers": None}),
        ("spec", {"containers": [{}]}),
        ("spec", {"containers": [{"name": "a", "env": [{}]}]}),
    ],
)
async def test_a_malformed_pod_is_passed_on_to_the_validation_of_the_api_server(
    started: Start, field: str, value: Any
) -> None:
    async with started() as running:
        put_policy(running.server, policy_body())
        pod = bare_pod()
        await running.webhook.post({**review_of(pod), "request": _request(pod, field, value)})


def _request(pod: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    request: dict[str, Any] = review_of(pod)["request"]
    request["object"] = {**pod, field: value}
    return request
