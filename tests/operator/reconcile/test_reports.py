"""The reports API over real TLS: who is heard, who is refused, and what comes of it."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from keepstep.core.suspicion import Failure
from keepstep.steps import Answer, StepId
from keepstep.wire.reports import CERTIFICATES_PATH, PATH, Report, ReportReply
from keepstep_operator.api.model import Job, JobState, RunKey
from keepstep_operator.kube import Client
from keepstep_operator.reconcile import reports_api, watch
from keepstep_operator.reconcile import turns as turns_module
from keepstep_operator.reconcile.errands import asked
from keepstep_operator.reconcile.reports_api import LARGEST_REPORT_BYTES
from keepstep_operator.reconcile.state.actions import AskJob, DeleteRun
from keepstep_operator.reconcile.writers import mends
from tests.harness import until
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.reconcile.pod_bodies import pod_body, pod_path
from tests.operator.reconcile.samples import Sidecar, later, step
from tests.operator.reconcile.serving import Served, make_certificate, serving, trusting

GOOD = "good-token"
RUN = "/apis/keepstep.dev/v1alpha1/namespaces/team/checkpointruns/gpt-1a2b3c4d"

POLICY = {
    "metadata": {
        "name": "default",
        "namespace": "team",
        "uid": "policy-1",
        "generation": 1,
        "resourceVersion": "1",
    },
    "spec": {
        "memory": {"limit": "1Gi"},
        "volumes": [{"name": "nvme0", "hostPath": {"path": "/mnt/nvme0"}}],
    },
}
POLICY_PATH = "/apis/keepstep.dev/v1alpha1/namespaces/team/checkpointpolicies/default"


def cluster() -> ApiServer:
    """One injected pod and its token."""
    made = ApiServer(tokens={GOOD: bound_to("team", "gpt-worker-0", "pod-0")})
    made.objects[pod_path("gpt-worker-0")] = pod_body(0)
    return made


def play(
    tmp_path: Path, scene: Callable[[Served], Awaitable[None]], at: ApiServer | None = None
) -> None:
    async def run() -> None:
        async with serving(at or cluster(), tmp_path) as served:
            await until(lambda: not served.parts.ready(), what="policies and runs are listed")
            await scene(served)

    asyncio.run(run())


def whole(rank: int = 0, world: int = 1) -> bytes:
    return msgspec.json.encode(Sidecar(rank=rank, world=world).staged(5).durable(5).report())


def test_a_report_is_answered_and_seen_in_the_status_of_a_run_that_is_made_for_it(
    tmp_path: Path,
) -> None:
    async def scene(served: Served) -> None:
        status, body = await served.post(whole(), token=GOOD)
        assert status == 200
        reply = msgspec.convert(body, ReportReply)
        assert reply.committed["local"] == step(5)
        assert reply.plan == step(5)
        written = await until(
            lambda: (
                (told := served.cluster.objects.get(RUN, {}).get("status"))
                and "committed" in told
                and told
            )
        )
        assert written["committed"]["step"] == 5
        assert written["jobName"] == "gpt"
        event, *_ = await until(lambda: served.cluster.asked("POST", "/events"))
        assert event.body["reason"] == "Committed"
        assert event.body["regarding"]["kind"] == "PyTorchJob"

    play(tmp_path, scene)


def test_of_many_reports_that_came_together_each_turn_of_the_loop_works_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for health waits for one report, not for all of them."""
    count = 20
    turns, worked = 0, list[int]()

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def scene(served: Served) -> None:
        registry = served.parts.registry
        reported = registry.reported

        def noted(*told: Any, **more: Any) -> Any:
            worked.append(turns)
            return reported(*told, **more)

        monkeypatch.setattr(registry, "reported", noted)
        monkeypatch.setattr(turns_module, "SLICE_S", 0.0)
        turning = asyncio.create_task(turn())
        assert await _together(served, count, monkeypatch) == [200] * count
        turning.cancel()
        assert len(set(worked)) == count

    play(tmp_path, scene, _pods(count))


@pytest.mark.parametrize("path", [PATH, CERTIFICATES_PATH])
def test_of_a_namespace_only_so_many_bodies_are_waited_for_and_others_are_taken(
    tmp_path: Path, path: str
) -> None:
    """A tenant whose pods send theirs a byte at a time takes no places from others."""
    slow = reports_api.MOST_READ
    at = _pods(slow + 1)
    at.tokens["other"] = bound_to("more", "gpt-worker-0", "other-0")
    other = pod_body(0)
    other["metadata"] |= {"namespace": "more", "uid": "other-0"}
    at.objects[pod_path("gpt-worker-0", "more")] = other

    async def scene(served: Served) -> None:
        trust = trusting((tmp_path / "tls.crt").read_bytes())
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
        held = []
        for rank in range(slow):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                served.port,
                ssl=trust,
                local_addr=(f"127.0.1.{rank}", 0),
            )
            writer.write(f"{head}Authorization: Bearer token-{rank}\r\n\r\n{{".encode())
            held.append((reader, writer))
        api = served.parts.reports
        await until(lambda: api._reading["team"] == slow, what="all are waited for")
        status, body = await served.post(whole(slow, slow + 1), token=f"token-{slow}")
        assert (status, body["code"]) == (429, "busy")
        status, _ = await served.post(whole(), token="other")
        assert status == 200
        for _, writer in held:
            writer.close()
        await until(lambda: not api._reading, what="nothing is remembered of them")

    play(tmp_path, scene, at)


def test_of_a_body_that_a_client_leaves_off_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor until the garbage collector comes, which here it seldom does."""
    sent = b" " * (3 << 20)

    def held_bytes() -> int:
        return tracemalloc.get_traced_memory()[0]

    async def scene(served: Served) -> None:
        trust = trusting((tmp_path / "tls.crt").read_bytes())
        await served.post(whole(), token=GOOD)
        tracemalloc.start()
        gc.disable()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trust)
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGEST_REPORT_BYTES}\r\n"
            writer.write(f"{head}Authorization: Bearer {GOOD}\r\n\r\n".encode() + sent)
            await until(lambda: held_bytes() > len(sent), what="most of it")
            writer.transport.abort()
            await until(lambda: not served.parts.reports._reading, what="the end")
            await asyncio.sleep(0)
            assert held_bytes() < len(sent) // 3
            assert not [one for one in caplog.records if one.exc_info], "no failure of ours"
        finally:
            gc.enable()
            tracemalloc.stop()

    play(tmp_path, scene)


def _pods(count: int) -> ApiServer:
    """So many injected pods and their tokens."""
    made = ApiServer()
    for rank in range(count):
        made.tokens[f"token-{rank}"] = bound_to("team", f"gpt-worker-{rank}", f"pod-{rank}")
        made.objects[pod_path(f"gpt-worker-{rank}")] = pod_body(rank)
    return made


async def _together(served: Served, count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each pod's whole report, all of them there before the first one is worked on; the answers."""
    body_of, here, all_here = reports_api._body, 0, asyncio.Event()

    async def together(request: Any) -> bytes:
        nonlocal here
        body, here = await body_of(request), here + 1
        if here == count:
            all_here.set()
        await all_here.wait()
        return body

    monkeypatch.setattr(reports_api, "_body", together)
    answers = await asyncio.gather(
        *(served.post(whole(rank, count), token=f"token-{rank}") for rank in range(count))
    )
    return [status for status, _ in answers]


def test_a_token_is_reviewed_once_and_a_pod_is_looked_up_once(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        for _ in range(5):
            status, _ = await served.post(whole(), token=GOOD)
            assert status == 200
        assert len(served.cluster.asked("POST", "/tokenreviews")) == 1
        assert len(served.cluster.asked("GET", "/pods/gpt-worker-0")) <= 1

    play(tmp_path, scene)


def test_a_token_is_reviewed_again_when_it_has_expired(tmp_path: Path) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1}).encode()).decode().rstrip("=")
    token = f"x.{claims}.y"

    async def scene(served: Served) -> None:
        served.cluster.tokens[token] = served.cluster.tokens[GOOD]
        for _ in range(2):
            assert (await served.post(whole(), token=token))[0] == 200
        assert len(served.cluster.asked("POST", "/tokenreviews")) == 2

    play(tmp_path, scene)


def test_a_pod_that_the_watch_has_not_shown_is_looked_up(tmp_path: Path) -> None:
    late = ApiServer(tokens={GOOD: bound_to("team", "gpt-worker-0", "pod-0")})

    async def scene(served: Served) -> None:
        assert (await served.post(whole(), token=GOOD))[0] == 404
        served.cluster.objects[pod_path("gpt-worker-0")] = pod_body(0)  # without telling the watch
        assert (await served.post(whole(), token=GOOD))[0] == 200

    play(tmp_path, scene, late)


def doubting(*after: StepId) -> bytes:
    more = {"failures": (Failure(at=step(9), after=after),)}
    return msgspec.json.encode(Sidecar(rank=0, more=more).report())


def with_images(**more: Any) -> bytes:
    """A report of one image of a world of two that says more."""
    report = msgspec.to_builtins(Sidecar(rank=0).durable(1).report())
    for image in report["ranks"][0]["local"]:
        image |= more
    return msgspec.json.encode(report)


def alike(*runs: tuple[int, int, int]) -> bytes:
    """The same with such ranks in the place of a rank and its twins."""
    return with_images(alike={"runs": runs})


FORGED = {
    "none": ("", 401, "no-token"),
    "wrong": ("wrong", 401, "bad-token"),
    "another audience": ("audience", 401, "bad-audience"),
    "of no pod": ("account", 403, "no-pod"),
    "of a person": ("person", 403, "no-pod"),
    "of an earlier pod of that name": ("earlier", 403, "other-pod"),
    "of a pod without a sidecar": ("bare", 403, "not-injected"),
    "of another namespace": ("elsewhere", 403, "not-injected"),
    "of a pod that is gone": ("gone", 404, "unknown-pod"),
}


def forgeries() -> ApiServer:
    made = cluster()
    good = bound_to("team", "gpt-worker-0", "pod-0")
    made.objects[pod_path("gpt-worker-9")] = pod_body(9, injected=False)
    made.tokens |= {
        "audience": {**good, "audiences": ["https://kubernetes.default.svc"]},
        "account": {**good, "user": {**good["user"], "extra": {}}},
        "person": {**good, "user": {**good["user"], "username": "alice"}},
        "earlier": bound_to("team", "gpt-worker-0", "pod-of-yesterday"),
        "bare": bound_to("team", "gpt-worker-9", "pod-9"),
        "elsewhere": bound_to("other", "gpt-worker-0", "pod-0"),
        "gone": bound_to("team", "gpt-worker-7", "pod-7"),
    }
    return made


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_report_is_refused_with_a_reason_and_logged_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, expected, code = FORGED[name]

    async def scene(served: Served) -> None:
        await until(served.parts.pods.loaded.is_set)
        for _ in range(3):
            status, problem = await served.post(whole(), token=token)
            assert (status, problem["code"]) == (expected, code)
            assert problem["message"]
        run = served.parts.registry.runs
        assert not any(one.ledger.places for one in run.values()), "nothing of it was believed"
        refused = served.parts.metrics.registry.get_sample_value(
            "keepstep_reports_refused_total", {"code": code}
        )
        assert refused == 3

    with caplog.at_level(logging.WARNING, "keepstep.operator"):
        play(tmp_path, scene, forgeries())
    logged = [one for one in caplog.records if one.message == "report refused"]
    assert len(logged) == 1
    assert "good-token" not in str(vars(logged[0]))


def test_a_token_of_another_pod_speaks_for_that_pod_only(tmp_path: Path) -> None:
    at = cluster()
    at.objects[pod_path("gpt-worker-1")] = pod_body(1)
    at.tokens["other"] = bound_to("team", "gpt-worker-1", "pod-1")

    async def scene(served: Served) -> None:
        await served.post(whole(rank=0), token="other")
        (run,) = served.parts.registry.runs.values()
        assert list(run.ledger.places) == [1]

    play(tmp_path, scene, at)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"sidecar": 3}', 400),
        (b" " * (LARGEST_REPORT_BYTES + 1), 413),
        (msgspec.json.encode(Sidecar(rank=5, world=2).report()), 400),
        (msgspec.json.encode(Sidecar(rank=0, world=1 << 30).staged(1).report()), 400),
        (msgspec.json.encode(Sidecar(rank=0).staged(10**16).report()), 400),
        (
            msgspec.json.encode(
                Sidecar(rank=0, epochs=[later(2, 1, nonce="abcdef01")]).report()
            ).replace(b"abcdef01", b"x" * 99),
            400,
        ),
        (msgspec.json.encode(Sidecar(rank=0, kept={1: [step(10**16)]}).report()), 400),
        (msgspec.json.encode(Sidecar(rank=0, archive=[step(10**16)]).report()), 400),
        (msgspec.json.encode(Sidecar(rank=0, address="a" * 281).report()), 400),
        (alike((0, 2, 2)), 400),
        (alike((1, 1, 1)), 400),
        (alike((0, 10**12, 1)), 400),
        (alike((0, 1, 0)), 400),
        (alike((-1, 1, 1)), 400),
        (doubting(step(10**16)), 400),
        (doubting(*map(step, range(1025))), 400),
    ],
)
def test_a_report_that_cannot_be_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async def scene(served: Served) -> None:
        answered, problem = await served.post(body, token=GOOD)
        assert answered == status
        assert set(problem) == {"code", "message"}

    play(tmp_path, scene)


def test_the_first_pod_may_tell_of_the_archive_for_any_number_of_ranks(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        report = Sidecar(rank=0, world=1500).durable(5).report()
        (own,) = report.ranks
        archived = replace(own, alive=False, memory=(), local=(), archive=own.local)
        others = [
            replace(archived, rank=rank, archive_answer=Answer.STEPS) for rank in range(1, 1500)
        ]
        body = msgspec.json.encode(replace(report, ranks=(own, *others)))
        assert (await served.post(body, token=GOOD))[0] == 200

        crowd = [replace(own, rank=rank) for rank in range(1025)]
        body = msgspec.json.encode(replace(report, ranks=tuple(crowd), sequence=2))
        assert (await served.post(body, token=GOOD))[0] == 400

    play(tmp_path, scene)


def test_an_api_server_that_does_not_answer_is_no_refusal(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        served.cluster.broken, served.cluster.broken_part = 1, "/tokenreviews"
        status, problem = await served.post(whole(), token=GOOD)
        assert (status, problem["code"]) == (503, "unavailable")
        assert (await served.post(whole(), token=GOOD))[0] == 200

    play(tmp_path, scene)


def test_reports_wait_until_what_was_counted_before_is_known(tmp_path: Path) -> None:
    at = cluster()
    at.broken = 1000

    async def run() -> None:
        async with serving(at, tmp_path) as served:
            status, problem = await served.post(whole(), token=GOOD)
            assert (status, problem["code"]) == (503, "starting")
            assert (await served.get("/healthz"))[0] == 200
            assert (await served.get("/readyz"))[0] == 503
            at.broken = 0
            await until(lambda: not served.parts.ready())
            assert (await served.post(whole(), token=GOOD))[0] == 200
            assert (await served.get("/readyz"))[0] == 200

    asyncio.run(run())


def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        assert (await served.post(whole(), token=GOOD))[0] == 200
        renewed = trusting(make_certificate(tmp_path))
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await served.post(whole(), token=GOOD, context=renewed)
        assert served.tls.reload()
        assert (await served.post(whole(), token=GOOD, context=renewed))[0] == 200

    play(tmp_path, scene)


def test_a_connection_is_closed_with_its_answer_because_thousands_would_fill_memory(
    tmp_path: Path,
) -> None:
    async def scene(served: Served) -> None:
        assert (await served.post(whole(), token=GOOD))[0] == 200
        url = f"https://127.0.0.1:{served.port}/v1/reports"
        async with served.session.post(url, data=b"{}") as response:
            assert response.headers["Connection"] == "close"

    play(tmp_path, scene)


def test_a_sidecar_may_say_more_or_less_than_this_operator_knows(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        more: dict[str, Any] = json.loads(whole())
        more["mood"] = "good"
        assert (await served.post(json.dumps(more).encode(), token=GOOD))[0] == 200
        less = {"sidecar": "0.0.9", "started_at": 1.0, "sequence": 1, "sent_at": 1.0}
        assert (await served.post(json.dumps(less).encode(), token=GOOD))[0] == 200

    play(tmp_path, scene)


def test_a_report_on_the_wire_is_what_the_sidecar_encodes() -> None:
    report = Sidecar(rank=0).staged(1).durable(1).report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


# --- the rest of the process ---------------------------------------------------------------------


def test_a_policy_is_accepted_or_says_what_to_change(tmp_path: Path) -> None:
    at = cluster()
    at.objects[POLICY_PATH] = json.loads(json.dumps(POLICY))

    async def scene(served: Served) -> None:
        status = await until(lambda: at.objects[POLICY_PATH].get("status"))
        (condition,) = status["conditions"]
        # no host path is allowed in this chart
        assert (condition["status"], condition["reason"]) == ("False", "HostPathNotAllowed")
        events = await until(lambda: at.asked("POST", "/events"))
        assert events[0].body["regarding"]["kind"] == "CheckpointPolicy"
        changed = json.loads(json.dumps(POLICY))
        changed["metadata"]["generation"] = 2
        changed["spec"]["volumes"] = [{"name": "nvme0", "emptyDir": {}}]
        at.add(POLICY_PATH, {**changed, "status": status})
        (condition,) = await until(
            lambda: [
                one
                for one in at.objects[POLICY_PATH].get("status", {}).get("conditions", [])
                if one["status"] == "True"
            ]
        )
        assert condition["reason"] == "Accepted"
        assert "emptyDir" in condition["message"]
        assert at.objects[POLICY_PATH]["status"]["observedGeneration"] == 2
        writes = len(at.asked("PATCH", "/checkpointpolicies/"))
        assert writes == 2, "the own write is no reason for another"

    play(tmp_path, scene, at)


def _kept(part: str) -> tuple[ApiServer, str]:
    """A cluster, and the path of the object whose status somebody else writes."""
    at = cluster()
    at.objects[POLICY_PATH] = json.loads(json.dumps(POLICY))
    return at, RUN if part == "checkpointruns" else POLICY_PATH


async def _first_statuses(served: Served, at: ApiServer, part: str) -> None:
    await served.post(whole(), token=GOOD)
    await until(lambda: (at.objects.get(RUN, {}).get("status") or {}).get("committed"))
    await until(lambda: at.objects[POLICY_PATH].get("status"))
    await _at_rest(at, part)


def _overwritten(at: ApiServer, path: str, **more: Any) -> None:
    """Somebody else writes a part of a status."""
    now = at.objects[path]
    at.add(path, {**now, "status": {**now["status"], **more}})


@pytest.mark.parametrize("part", ["checkpointruns", "checkpointpolicies"])
def test_a_status_that_somebody_else_wrote_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(mends, "MEND_S", 0.2)
    at, path = _kept(part)

    async def scene(served: Served) -> None:
        await _first_statuses(served, at, part)
        ours = _said(at.objects[path])
        _overwritten(at, path, conditions=[], phase="Mine")
        await until(lambda: _said(at.objects[path]) == ours)
        await _at_rest(at, part)

    play(tmp_path, scene, at)


def _said(body: dict[str, Any]) -> Any:
    """Of a status, what people read."""
    told = body["status"]
    return told.get("phase"), [(one["type"], one["message"]) for one in told["conditions"]]


async def _at_rest(at: ApiServer, part: str) -> None:
    """Own writes come back from the watch, and are no reason for another."""

    def writes() -> int:
        return len(at.asked("PATCH", f"/{part}/"))

    before = -1
    while before != writes():
        before = writes()
        await asyncio.sleep(4 * mends.MEND_S)


@pytest.mark.parametrize("part", ["checkpointruns", "checkpointpolicies"])
def test_two_writers_of_a_status_that_do_not_agree_are_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(mends, "MEND_S", 0.5)
    at, path = _kept(part)

    async def scene(served: Served) -> None:
        await _first_statuses(served, at, part)
        before, begun_s = len(at.asked("PATCH", f"/{part}/")), time.monotonic()
        for number in range(300):
            if at.objects[path]["status"].get("phase") != "Mine":
                _overwritten(at, path, phase="Mine", step=number)
            await asyncio.sleep(0.01)
        mended = len(at.asked("PATCH", f"/{part}/")) - before
        assert 1 <= mended <= (time.monotonic() - begun_s) / mends.MEND_S + 1

    play(tmp_path, scene, at)


def test_an_annotated_pod_of_a_job_without_a_sidecar_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "UNINJECTED_S", 0.1)

    async def scene(served: Served) -> None:
        def injected() -> str:
            status = served.cluster.objects.get(RUN, {}).get("status") or {}
            told = {one["type"]: one["status"] for one in status.get("conditions", ())}
            return str(told.get("FullyInjected"))

        selector = "!keepstep.dev/injected,training.kubeflow.org/job-name"
        await until(lambda: served.cluster.lists(selector))
        served.cluster.add(pod_path("gpt-worker-1"), pod_body(1, injected=False))
        event, *_ = await until(lambda: served.cluster.asked("POST", "/events"))
        assert event.body["reason"] == "NotInjected"
        assert event.body["regarding"]["name"] == "gpt"
        await until(lambda: injected() == "False")

    play(tmp_path, scene)


def test_pods_are_asked_for_by_label(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        await until(lambda: served.parts.pods.loaded.is_set() and _jobs(served.cluster))
        selectors = {
            one.query.get("labelSelector") for one in served.cluster.asked("GET", "/api/v1/pods")
        }
        assert selectors == {
            "keepstep.dev/injected",
            "!keepstep.dev/injected,training.kubeflow.org/job-name",
            "!keepstep.dev/injected,batch.kubernetes.io/job-name",
        }

    play(tmp_path, scene)


def _jobs(cluster: ApiServer) -> bool:
    return cluster.lists("!keepstep.dev/injected,batch.kubernetes.io/job-name")


def test_a_pod_that_is_deleted_is_forgotten(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        await until(lambda: served.parts.registry.pod("pod-0"))
        await until(lambda: served.cluster.watches("keepstep.dev/injected"))
        served.cluster.remove(pod_path("gpt-worker-0"))
        await until(lambda: served.parts.registry.pod("pod-0") is None)
        assert (await served.post(whole(), token=GOOD))[0] == 404

    play(tmp_path, scene)


JOB = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/gpt"


def test_a_run_is_finished_when_its_pods_are_gone_and_its_job_is_over(tmp_path: Path) -> None:
    at = cluster()
    at.objects[JOB] = {
        "metadata": {"name": "gpt", "namespace": "team", "uid": "1a2b3c4d-0000"},
        "status": {"conditions": [{"type": "Succeeded", "status": "True"}]},
    }

    def phase() -> str | None:
        found: str | None = at.objects.get(RUN, {}).get("status", {}).get("phase")
        return found

    async def scene(served: Served) -> None:
        await served.post(whole(), token=GOOD)
        await until(lambda: phase() == "Running")
        await until(lambda: any(one.object for one in served.parts.registry.runs.values()))
        at.remove(pod_path("gpt-worker-0"))
        await until(lambda: phase() == "Finished")
        assert at.objects[RUN]["status"]["committed"]["step"] == 5
        assert len(at.asked("GET", "/pytorchjobs/gpt")) == 1

    play(tmp_path, scene, at)


def test_what_a_slow_api_server_has_not_answered_is_not_asked_again(tmp_path: Path) -> None:
    """Each tick asks; else an hour without answers would end in thousands of questions at once."""
    key, at = RunKey("team", "gpt-1a2b3c4d"), cluster()
    at.objects[RUN] = {
        "metadata": {"name": key.name, "namespace": "team", "uid": "run-1", "resourceVersion": "1"}
    }
    job = Job(api_version="kubeflow.org/v1", kind="PyTorchJob", name="gpt", uid="1a2b3c4d-0000")

    def asked_for() -> int:
        return len(at.asked("GET", "/pytorchjobs/")) + len(at.asked("DELETE", RUN))

    async def scene(served: Served) -> None:
        errands = served.parts.errands
        await until(lambda: any(one.object for one in served.parts.registry.runs.values()))
        at.delay_s = 0.5
        for _ in range(5):
            errands.carry_out([AskJob(key, job), DeleteRun(key)])
        await until(lambda: not errands._running, what="all that was asked")
        assert asked_for() == 2
        errands.carry_out([AskJob(key, job)])
        await until(lambda: asked_for() == 3, what="another question")

    play(tmp_path, scene, at)


def test_a_job_that_may_not_be_read_is_not_over() -> None:
    """What it left on drives goes when its run does: it may only be suspended."""
    scaled = Job(api_version="apps/v1", kind="StatefulSet", name="gpt", uid="1a2b3c4d-0000")

    async def scene(at: ApiServer) -> JobState:
        async with at.running(), Client(at.access) as client:
            return await asked(client, AskJob(RunKey("team", "gpt"), scaled))

    assert asyncio.run(scene(ApiServer(forbidden="/statefulsets/"))) is JobState.UNKNOWN
    assert asyncio.run(scene(ApiServer())) is JobState.GONE


def test_a_job_whose_version_is_not_served_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is suspended over an upgrade of its operator would lose what lies on nodes."""
    suspended = Job(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name="gpt", uid="set-1")
    at = ApiServer()

    def unserved(path: str, query: object) -> web.Response:
        return web.Response(status=404, text="404 page not found\n")

    async def scene() -> JobState:
        async with at.running(), Client(at.access) as client:
            return await asked(client, AskJob(RunKey("team", "gpt"), suspended))

    assert asyncio.run(scene()) is JobState.GONE
    monkeypatch.setattr(at, "_get", unserved)
    assert asyncio.run(scene()) is JobState.UNKNOWN


def test_an_acknowledged_fresh_start_is_named_in_the_annotation(tmp_path: Path) -> None:
    fresh = later(2, None)
    sidecar = Sidecar(rank=0, world=1).durable(5).restored(fresh, tier=None)

    async def scene(served: Served) -> None:
        await served.post(msgspec.json.encode(sidecar.report()), token=GOOD)
        run = await until(lambda: served.cluster.objects.get(RUN))
        note = {"keepstep.dev/fresh-start": "newest"}
        served.cluster.add(RUN, {**run, "metadata": {**run["metadata"], "annotations": note}})

        def noted() -> bool:
            annotations = served.cluster.objects[RUN]["metadata"]["annotations"]
            return annotations["keepstep.dev/fresh-start"] == str(fresh.id)

        await until(noted)

    play(tmp_path, scene)


def test_the_time_of_the_last_commit_is_named_in_the_annotation_of_a_queued_run(
    tmp_path: Path,
) -> None:
    at = cluster()
    path = pod_path("gpt-worker-0")
    at.objects[path]["metadata"]["labels"]["volcano.sh/queue-name"] = "team"
    sidecar = Sidecar(rank=0, world=1)

    async def scene(served: Served) -> None:
        await served.post(msgspec.json.encode(sidecar.report()), token=GOOD)
        await until(lambda: any(one.object for one in served.parts.registry.runs.values()))
        await served.post(msgspec.json.encode(sidecar.durable(5).report()), token=GOOD)

        def noted() -> str:
            metadata = served.cluster.objects[RUN]["metadata"]
            return str(metadata.get("annotations", {}).get("volcano.sh/last-checkpoint-time", ""))

        assert (await until(noted)).endswith("Z")

    play(tmp_path, scene, at)


def test_a_run_that_somebody_deletes_is_written_again(tmp_path: Path) -> None:
    async def scene(served: Served) -> None:
        await served.post(whole(), token=GOOD)
        await until(lambda: served.cluster.objects.get(RUN, {}).get("status"))
        await until(lambda: any(one.object for one in served.parts.registry.runs.values()))
        served.cluster.remove(RUN)
        status = await until(lambda: served.cluster.objects.get(RUN, {}).get("status"))
        assert status["committed"]["step"] == 5

    play(tmp_path, scene)
