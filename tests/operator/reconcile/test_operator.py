"""A whole reconciler before a small API server: kopf's handlers, reports, writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.steps import Tier
from keepstep.wire.run_reports import Advisory, AdvisoryKind, KeptStep, LeaderRecord
from keepstep_operator.kube.resources import CHECKPOINTS, EVENTS, RUNS, SERVICES
from keepstep_operator.reconcile import periodic_checks, run_registry, writers
from tests.harness import until
from tests.operator.apiserver import ApiServer, Body, bound_to, put_policy
from tests.operator.injection.pods import policy_body
from tests.operator.reconcile.samples import KEY, node, pod_body, pod_path, report, step
from tests.operator.reconcile.serving import Served, serving

JOBS = f"/apis/kubeflow.org/v1/namespaces/{KEY.namespace}/pytorchjobs"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (periodic_checks, "CHECK_S", 0.2),
        (periodic_checks, "TICK_S", 0.2),
        (periodic_checks, "JOB_S", 0.2),
        (periodic_checks, "LATE_S", 0.2),
        (periodic_checks, "SWEEP_S", 0.5),
        (writers, "_REPAIR_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)


def cluster() -> ApiServer:
    """Two pods with their sidecars, their policy, and tokens of both."""
    made = ApiServer(
        tokens={"good": bound_to("team", "gpt-worker-0", "pod-0"),
                "other": bound_to("team", "gpt-worker-1", "pod-1")}
    )  # fmt: skip
    put_policy(made, {**policy_body(), "metadata": {"name": "default", "namespace": "team"}})
    for rank in (0, 1):
        made.objects[pod_path(f"gpt-worker-{rank}")] = pod_body(rank)
    return made


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Served]:
    async with serving(options.pop("made", None) or cluster(), directory, **options) as served:
        await until(lambda: served.condition("FullyInjected"))
        yield served


def events(served: Served, reason: str) -> list[Body]:
    at = EVENTS.path(namespace=KEY.namespace)
    objects = served.cluster.objects.items()
    return [event for path, event in objects if path.startswith(at) and event["reason"] == reason]


async def test_a_report_becomes_a_status_events_checkpoints_and_a_service(tmp_path: Path) -> None:
    async with running(tmp_path) as served:
        await until(lambda: served.condition("Committing") == ("Unknown", "NoReports"))
        run_report = report(
            kept=(KeptStep(step=str(step(90)), ranks=2, tiers=(Tier.ARCHIVE,)),), certain=True
        )
        await served.report(run_report)
        await until(lambda: served.condition("Protected") == ("True", "Protected"))
        assert served.status()["committed"]["step"] == 100
        path = SERVICES.path(f"keepstep-{KEY.name}", namespace=KEY.namespace)
        service = await until(lambda: served.cluster.objects.get(path))
        assert service["metadata"]["ownerReferences"][0]["kind"] == "CheckpointRun"
        path = CHECKPOINTS.path(f"{KEY.name}-{step(90)}", namespace=KEY.namespace)
        await until(lambda: served.cluster.objects.get(path, {}).get("status"))
        assert served.cluster.objects[path]["status"]["tiers"] == ["archive"]
        committed = await until(lambda: events(served, "Committed"))
        assert {event["regarding"]["kind"] for event in committed} <= {
            "PyTorchJob",
            "CheckpointRun",
        }
        await served.report(replace(run_report, sequence=3, kept=()))
        await until(lambda: path not in served.cluster.objects, what="a deleted Checkpoint")


async def test_a_changed_condition_is_written_at_once_and_numbers_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_registry, "LEAST_S", 3600.0)
    async with running(tmp_path) as served:
        await served.report(report(100))
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
        await served.report(report(200, sequence=3))
        stalled = Advisory(kind=AdvisoryKind.COMMIT_STALLED, text="none for long")
        await served.report(report(200, sequence=4, doubts=(stalled,)))
        await until(lambda: served.condition("Protected") == ("False", "CommitStalled"))
        assert served.status()["committed"]["step"] == 200


async def test_a_restarted_reconciler_continues_from_the_stored_status(tmp_path: Path) -> None:
    made = cluster()
    async with running(tmp_path, made=made) as served:
        await served.report(report(record=LeaderRecord(restarts=3, lost_steps=40)))
        await until(lambda: served.status().get("restarts") == 3)
    async with serving(made, tmp_path) as served:
        answer = await served.report(report(sequence=1, leader="leader-2"))
        assert answer["record"]["restarts"] == 3
        assert answer["complete"]


async def test_pods_that_admission_did_not_process_are_found(tmp_path: Path) -> None:
    made = cluster()
    made.objects[pod_path("gpt-worker-1")] = pod_body(1, injected=False)
    async with running(tmp_path, made=made) as served:
        await until(lambda: served.condition("FullyInjected") == ("False", "NotInjected"))
        (event, *_) = await until(lambda: events(served, "NotInjected"))
        assert "gpt-worker-1" in event["note"]
        again = pod_body(1)
        again["metadata"]["uid"] = "pod-1-again"
        made.remove(pod_path("gpt-worker-1"))
        made.add(pod_path("gpt-worker-1"), again)
        await until(lambda: served.condition("FullyInjected") == ("True", "AllInjected"))


async def test_a_missed_deletion_of_a_pod_is_detected_at_the_next_resync(tmp_path: Path) -> None:
    async with running(tmp_path) as served:
        with served.cluster.unseen():
            served.cluster.remove(pod_path("gpt-worker-1"))
        await until(lambda: served.status().get("nodes") == 1)


async def test_a_run_finishes_with_its_job_and_is_deleted_after_its_ttl(tmp_path: Path) -> None:
    made = cluster()
    made.add(f"{JOBS}/gpt", {"metadata": {"name": "gpt", "uid": "1a2b3c4d-0000"}, "status": {}})
    async with running(tmp_path, made=made) as served:
        await served.report(report())
        for rank in (0, 1):
            made.remove(pod_path(f"gpt-worker-{rank}"))
        failed = {"conditions": [{"type": "Failed", "status": "True"}]}
        job = {"metadata": {"name": "gpt", "uid": "1a2b3c4d-0000"}, "status": failed}
        made.add(f"{JOBS}/gpt", job)
        await until(lambda: served.status().get("phase") == "Finished")
        run = served.parts.registry.runs[KEY]
        served.parts.registry.runs[KEY] = replace(run, finished_at=1.0)
        path = RUNS.path(KEY.name, namespace=KEY.namespace)
        await until(lambda: path not in made.objects)


async def test_a_run_object_that_is_deleted_while_its_pods_run_is_recreated(tmp_path: Path) -> None:
    async with running(tmp_path) as served:
        await served.report(report())
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
        served.cluster.delete(RUNS, KEY.name, namespace=KEY.namespace)
        await until(lambda: served.condition("Committing") == ("True", "Committing"))


async def test_a_status_that_another_client_wrote_is_overwritten(tmp_path: Path) -> None:
    async with running(tmp_path) as served:
        await served.report(report())
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
        body = served.cluster.take(RUNS, KEY.name, namespace=KEY.namespace)

        def wrong() -> bool:
            served.cluster.put(RUNS, {**body, "status": {"phase": "Finished"}})
            return True

        await until(wrong)
        await until(lambda: served.status().get("phase") == "Running")


async def test_an_acknowledgement_of_the_newest_start_is_resolved_to_its_epoch(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as served:
        await served.report(report())
        body = await until(
            lambda: served.cluster.objects.get(RUNS.path(KEY.name, namespace=KEY.namespace))
        )
        body["metadata"]["annotations"] = {"keepstep.dev/fresh-start": "newest"}
        served.cluster.put(RUNS, body)

        async def acknowledged() -> bool:
            answer = await served.report(report(sequence=next(numbers)))
            return bool(answer["fresh_start"] == "newest")

        numbers = iter(range(3, 1000))
        await until(acknowledged)
        await served.report(report(sequence=1000, acknowledged="0001.aaaaaaaa"))

        def annotation() -> str:
            body = served.cluster.take(RUNS, KEY.name, namespace=KEY.namespace)
            return str(body["metadata"]["annotations"]["keepstep.dev/fresh-start"])

        await until(lambda: annotation() == "0001.aaaaaaaa")


async def test_failed_writes_are_retried(tmp_path: Path) -> None:
    made = cluster()
    made.broken, made.broken_part = 3, "/status"
    async with running(tmp_path, made=made) as served:
        await served.report(report(nodes=(node(0, warnings=("slow",)),)))
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
        assert made.broken == 0


async def test_nodes_are_watched_only_if_permitted(tmp_path: Path) -> None:
    made = cluster()
    made.add(
        "/api/v1/nodes/node-0", {"metadata": {"name": "node-0"}, "spec": {"unschedulable": True}}
    )
    async with running(tmp_path, made=made, watch_nodes=True) as served:
        await until(lambda: "node-0" in served.parts.registry.cluster.nodes)
        assert served.parts.registry.cluster.nodes["node-0"].cordoned
    async with running(tmp_path) as served:
        assert not served.cluster.asked("GET", "/nodes")


async def test_a_run_whose_pods_ended_while_the_reconciler_was_down_is_finished(
    tmp_path: Path,
) -> None:
    made = cluster()
    made.add(f"{JOBS}/gpt", {"metadata": {"name": "gpt", "uid": "1a2b3c4d-0000"}, "status": {}})
    async with running(tmp_path, made=made) as served:
        await served.report(report())
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
    for rank in (0, 1):
        made.remove(pod_path(f"gpt-worker-{rank}"))
    made.remove(f"{JOBS}/gpt")
    async with serving(made, tmp_path) as served:
        await until(lambda: served.status().get("phase") == "Finished")
