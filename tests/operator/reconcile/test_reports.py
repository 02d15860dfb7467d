"""The API for sidecars over real HTTPS: who may report, what is refused, who is signed for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cachetools import TTLCache

from keepstep.steps import StepId, Tier
from keepstep.wire import run_reports as wire
from keepstep.wire.member_reports import CERTIFICATES_PATH
from keepstep.wire.run_reports import (
    Advisory,
    AdvisoryKind,
    KeptStep,
    LeaderRecord,
    LossOutcome,
    NodeHoldings,
    ReportedAlarm,
    ReportedDrive,
    RunEvent,
)
from keepstep_operator.reconcile.reports_api import check_bounds
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.reconcile.samples import (
    KEY,
    node,
    pod_body,
    pod_path,
    report,
)
from tests.operator.reconcile.serving import Served, serving

RIVAL = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "name": "again",
    "uid": "job-2",
    "controller": True,
}


@asynccontextmanager
async def api(directory: Path, **objects: Any) -> AsyncIterator[Served]:
    """The API alone."""
    cluster = ApiServer(
        tokens={
            f"of-{rank}": bound_to("team", f"gpt-worker-{rank}", f"pod-{rank}") for rank in (0, 1)
        }
    )
    for rank in (0, 1):
        cluster.objects[pod_path(f"gpt-worker-{rank}")] = pod_body(rank)
    cluster.objects |= objects
    async with serving(cluster, directory, watching=False) as served:
        yield served


async def test_the_reply_to_a_leader_lists_the_pods_of_its_run(tmp_path: Path) -> None:
    async with api(tmp_path) as served:
        answer = await served.report(report(sequence=1), token="of-0")
        assert [(member["pod"], member["address"]) for member in answer["members"]] == [
            ("pod-0", "10.0.0.1"),
            ("pod-1", "10.0.0.2"),
        ]
        assert answer["complete"] is True
        assert answer["record"]["restarts"] == 0
        assert answer["authorities"] == (tmp_path / "ca.crt").read_text()
        assert served.parts.registry.runs[KEY].report is not None


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        ("", 401, "no-token"),
        ("wrong", 401, "bad-token"),
        ("of-1", 409, "not-the-leader"),
        ("of-a-stranger", 404, "unknown-pod"),
        ("of-an-earlier-pod", 403, "other-pod"),
        ("of-no-pod", 403, "no-pod"),
    ],
)
async def test_a_report_from_a_pod_that_is_not_the_leader_is_refused(
    token: str, status: int, code: str, tmp_path: Path
) -> None:
    async with api(tmp_path) as served:
        served.cluster.tokens |= {
            "of-a-stranger": bound_to("team", "nobody", "uid-x"),
            "of-an-earlier-pod": bound_to("team", "gpt-worker-0", "uid-y"),
            "of-no-pod": {**bound_to("team", "a", "b"), "user": {"username": "jane"}},
        }
        found, problem = await served.post(msgspec.json.encode(report()), token=token)
        assert (found, problem["code"]) == (status, code)


async def test_a_pod_without_our_sidecar_is_refused(tmp_path: Path) -> None:
    async with api(tmp_path) as served:
        served.cluster.objects[pod_path("plain")] = {
            **pod_body(5, injected=False),
            "metadata": {**pod_body(5, injected=False)["metadata"], "name": "plain"},
        }
        served.cluster.tokens["plain"] = bound_to("team", "plain", "pod-5")
        status, problem = await served.post(msgspec.json.encode(report()), token="plain")
        assert (status, problem["code"]) == (403, "not-injected")


async def test_a_pod_of_another_job_with_the_run_label_is_refused_and_gets_no_certificate(
    tmp_path: Path,
) -> None:
    bodies = [pod_body(0), pod_body(0)]
    for body in bodies:
        body["metadata"]["labels"]["keepstep.dev/run"] = KEY.name
    rival = bodies[1]
    rival["metadata"] |= {
        "uid": "rival",
        "name": "rival",
        "creationTimestamp": "2026-11-22T07:00:00Z",
        "ownerReferences": [RIVAL],
    }
    rival["metadata"]["annotations"].pop("keepstep.dev/status")
    objects = {pod_path("gpt-worker-0"): bodies[0], pod_path("rival"): rival}
    async with api(tmp_path, **objects) as served:
        served.cluster.tokens["rival"] = bound_to("team", "rival", "rival")
        for path in (wire.PATH, CERTIFICATES_PATH):
            status, problem = await served.post(b"{}", token="rival", path=path)
            assert (status, problem["code"]) == (403, "run-taken")
        await served.report(report(), token="of-0")


async def test_a_pod_reports_once_a_second_at_most(tmp_path: Path) -> None:
    async with api(tmp_path) as served:
        served.parts.reports._lately = TTLCache(10, 3600)  # an hour, for a slow machine
        bodies = [msgspec.json.encode(report(sequence=number)) for number in range(1, 6)]
        found = [(await served.post(body, token="of-0"))[0] for body in bodies]
        assert found == [200, 429, 429, 429, 429]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"leader": 7}', b'{"leader": "a", "sequence": 1, "step": "x"}', b"\xff"],
)
async def test_an_invalid_report_is_refused_and_does_not_stop_the_server(
    body: bytes, tmp_path: Path
) -> None:
    async with api(tmp_path) as served:
        status, problem = await served.post(body, token="of-0")
        assert (status, problem["code"]) == (400, "bad-report")


async def test_reports_are_refused_until_all_runs_are_loaded(tmp_path: Path) -> None:
    async with api(tmp_path) as served:
        cluster = served.parts.registry.cluster
        served.parts.registry.cluster = replace(cluster, complete=False)
        status, problem = await served.post(msgspec.json.encode(report()), token="of-0")
        assert (status, problem["code"]) == (503, "starting")


async def test_token_reviews_are_cached_for_valid_and_invalid_tokens(tmp_path: Path) -> None:
    async with api(tmp_path) as served:
        for token in ("of-0", "wrong"):
            served.cluster.requests.clear()
            await asyncio.gather(*(served.post(b"{}", token=token) for _ in range(50)))
            asked = len(served.cluster.asked("POST", "/tokenreviews"))
            assert 1 <= asked <= 8, "what is asked about at a time"


# --- the bound of a report -----------------------------------------------------------------------


def largest() -> wire.RunReport:
    """A report in which every list and text is as long as it may be."""
    long, text = "w" * wire.LONGEST_WARNING, "t" * wire.LONGEST_TEXT
    name = "n" * 63
    step_id = StepId.parse(f"999999999.aaaaaaaa-{10**15}")
    return replace(
        report(),
        committed=step_id,
        nodes=tuple(
            node(rank, node=name, pod="u" * 36, ranks="0-7", buddies="1,2",
                 warnings=(long,) * wire.MOST_NODE_WARNINGS)
            for rank in range(wire.MOST_NODES)
        ),
        kept=(KeptStep(step=str(step_id), ranks=16384, tiers=tuple(Tier)),) * wire.MOST_KEPT,
        safe=LossOutcome(restart=step_id, node=step_id, pod=step_id, archived=step_id,
                  sole=(name,) * wire.MOST_SOLE),
        alarms=(ReportedAlarm(kind="WorldChanged", text=text),) * wire.MOST_MESSAGES,
        doubts=(Advisory(kind=AdvisoryKind.COMMIT_STALLED, text=text),) * wire.MOST_MESSAGES,
        recent=(RunEvent(time="2026-11-27T10:00:00Z", type="FreshStart", message=text),)
        * wire.MOST_RECENT,
        record=LeaderRecord(
            holders=(NodeHoldings(node=name, node_ranks="1234", step=10**15),) * wire.MOST_HOLDERS,
            drives=(ReportedDrive(node_rank=1234, node=name, volume="nvme0", id="u" * 53),)
            * wire.MOST_DRIVES,
        ),
    )  # fmt: skip


def test_a_leader_truncates_a_report_to_the_size_limits() -> None:
    most = largest()
    more = replace(
        most,
        nodes=tuple(
            replace(node_report, warnings=("w" * 1000,) * 9)
            for node_report in (*most.nodes, *most.nodes)
        ),
        kept=most.kept * 2,
        doubts=tuple(replace(doubt, text=doubt.text * 2) for doubt in most.doubts * 2),
        epochs=most.epochs * 99,
        record=replace(most.record, holders=most.record.holders * 2),
    )
    cut = wire.cut_to_bounds(more)
    assert check_bounds(cut) is cut
    assert len(msgspec.json.encode(cut)) <= wire.LARGEST_BYTES
    assert wire.cut_to_bounds(most) == most


async def test_the_largest_valid_report_is_accepted_and_a_larger_one_is_refused(
    tmp_path: Path,
) -> None:
    async with api(tmp_path) as served:
        one_more = replace(largest(), epochs=report().epochs * (wire.MOST_EPOCHS + 1))
        status, problem = await served.post(msgspec.json.encode(one_more), token="of-0")
        assert (status, problem["code"]) == (400, "bad-report")
        served.parts.reports._lately.clear()
        await served.report(largest(), token="of-0")
        served.parts.reports._lately.clear()
        status, _ = await served.post(b" " * (wire.LARGEST_BYTES + 1), token="of-0")
        assert status == 413
