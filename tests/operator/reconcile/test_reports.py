"""The reports API over real TLS: who is heard, who is refused, and what comes of it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from keepstep.core.suspicion import Failure
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.reports import ReportReply
from keepstep_operator.api.model import Job, JobState, RunKey
from keepstep_operator.injection import inject
from keepstep_operator.kube import Client, KubeError
from keepstep_operator.reconcile.errands import asked
from keepstep_operator.reconcile.reports_api import LARGEST_REPORT_BYTES
from keepstep_operator.reconcile.state.actions import AskJob
from keepstep_operator.reconcile.state.run import Run
from keepstep_operator.reconcile.token_auth import Refused, TokenAuth
from keepstep_operator.reconcile.writers import checkpoint_writer, events, mends
from tests.harness import until
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.injection import pods
from tests.operator.reconcile.samples import Sidecar, later, pod_body, pod_path, step
from tests.operator.reconcile.serving import Served, serving

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


@asynccontextmanager
async def playing(tmp_path: Path, at: ApiServer | None = None) -> AsyncIterator[Served]:
    async with serving(at or cluster(), tmp_path) as served:
        await until(lambda: not served.parts.ready(), what="policies and runs are listed")
        yield served


def whole(rank: int = 0, world: int = 1) -> bytes:
    return msgspec.json.encode(Sidecar(rank=rank, world=world).staged(5).durable(5).report())


async def test_a_report_is_answered_and_seen_in_the_status_of_a_run_that_is_made_for_it(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as served:
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


async def test_a_token_is_reviewed_once_and_a_pod_is_looked_up_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as served:
        for _ in range(5):
            status, _ = await served.post(whole(), token=GOOD)
            assert status == 200
        assert len(served.cluster.asked("POST", "/tokenreviews")) == 1
        assert len(served.cluster.asked("GET", "/pods/gpt-worker-0")) <= 1


async def test_a_token_is_reviewed_again_when_it_has_expired(tmp_path: Path) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1}).encode()).decode().rstrip("=")
    token = f"x.{claims}.y"

    async with playing(tmp_path) as served:
        served.cluster.tokens[token] = served.cluster.tokens[GOOD]
        for _ in range(2):
            assert (await served.post(whole(), token=token))[0] == 200
        assert len(served.cluster.asked("POST", "/tokenreviews")) == 2


class Tokens:
    """What the operator asks about tokens: those that begin with `good` are. `away`: no answer.
    `asked`: about which. `now`: its clock."""

    def __init__(self) -> None:
        self.away, self.asked, self.now = False, list[str](), 1_790_000_000.0
        self._auth = TokenAuth(cast(Client, self), clock=lambda: self.now)

    async def create(self, resource: object, body: dict[str, Any], **options: Any) -> Any:
        if self.away:
            raise KubeError("the API server is away")
        token = body["spec"]["token"]
        self.asked.append(token)
        good = bound_to("team", "p", token) if token.startswith("good") else {}
        return {"status": good or {"authenticated": False}}

    async def known(self, token: str, *, source: str = "") -> bool:
        """Whether a report with this token would be taken."""
        try:
            await self._auth.identify(token, source=source)
        except Refused:
            return False
        return True


def expiring(at: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": at}).encode()).decode()
    return f"good.{claims}.signature"


async def test_an_hour_without_the_api_server_ends_no_injected_pods_identity() -> None:
    """The kubelet, which renews a token after four fifths of its life, is cut off, too."""
    tokens = Tokens()
    injected = inject(pods.pytorch_job(rank=0), pods.policy(), pods.DEFAULTS)
    (volume,) = [one for one in injected["spec"]["volumes"] if one["name"] == "keepstep-token"]
    life_s = volume["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"]
    token = expiring(tokens.now + life_s / 5)
    assert await tokens.known(token)
    tokens.away = True
    for _ in range(120):
        tokens.now += 30.0
        assert await tokens.known(token)


async def test_a_run_reports_after_its_five_thousandth_restart(tmp_path: Path) -> None:
    epochs = [Epoch(EpochId(number + 1, f"{number:08x}")) for number in range(5000)]
    report = msgspec.json.encode(Sidecar(rank=0, world=1, epochs=epochs).report())

    async with playing(tmp_path) as served:
        status, answer = await served.post(report, token=GOOD)
        assert status == 200, answer


async def test_a_run_that_is_over_is_deleted_by_its_uid_and_not_if_somebody_wrote_it_meanwhile(
    tmp_path: Path,
) -> None:
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 30 * 24 * 3600.0))
    recent = [{"time": ended, "type": "Finished", "message": "the job is finished"}]
    path, at, pinned = RUN.replace("gpt-1a2b3c4d", "old"), cluster(), []
    at.add(
        path,
        {
            "metadata": {"name": "old", "namespace": "team", "uid": "u-old", "generation": 1},
            "spec": {},
            "status": {"phase": "Finished", "recent": recent},
        },
    )

    def pin(method: str, where: str) -> None:
        """Just before its end comes, unseen by the watches."""
        if method == "DELETE" and where == path and not pinned:
            pins = {"spec": {"pins": ["0001.aaaaaaaa-000000005"]}}
            with at.unseen():
                pinned.append(at.add(path, at.objects[path] | pins))

    at.before = pin

    async with playing(tmp_path, at):
        deletions = await until(
            lambda: len(found := at.asked("DELETE", "/checkpointruns/old")) > 1 and found,
            what="its end",
        )
        assert deletions[0].body["preconditions"]["uid"] == "u-old"
        assert path in at.objects, "it is looked at again"


def doubting(*after: StepId) -> bytes:
    more = {"failures": (Failure(at=step(9), after=after),)}
    return msgspec.json.encode(Sidecar(rank=0, more=more).report())


def with_images(**more: Any) -> bytes:
    """A report of one image of a world of two that says more."""
    report = msgspec.to_builtins(Sidecar(rank=0).durable(1).report())
    for image in report["ranks"][0]["tiers"]["local"]["shards"]:
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
async def test_a_forged_report_is_refused_with_a_reason_and_logged_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, expected, code = FORGED[name]
    caplog.set_level(logging.WARNING, "keepstep.operator")
    async with playing(tmp_path, forgeries()) as served:
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
    logged = [one for one in caplog.records if one.message == "report refused"]
    assert len(logged) == 1
    assert "good-token" not in str(vars(logged[0]))


async def test_a_token_of_another_pod_speaks_for_that_pod_only(tmp_path: Path) -> None:
    at = cluster()
    at.objects[pod_path("gpt-worker-1")] = pod_body(1)
    at.tokens["other"] = bound_to("team", "gpt-worker-1", "pod-1")

    async with playing(tmp_path, at) as served:
        await served.post(whole(rank=0), token="other")
        (run,) = served.parts.registry.runs.values()
        assert list(run.ledger.places) == [1]


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
async def test_a_report_that_cannot_be_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async with playing(tmp_path) as served:
        answered, problem = await served.post(body, token=GOOD)
        assert answered == status
        assert set(problem) == {"code", "message"}


async def test_an_api_server_that_does_not_answer_is_no_refusal(tmp_path: Path) -> None:
    async with playing(tmp_path) as served:
        served.cluster.broken, served.cluster.broken_part = 1, "/tokenreviews"
        status, problem = await served.post(whole(), token=GOOD)
        assert (status, problem["code"]) == (503, "unavailable")
        assert (await served.post(whole(), token=GOOD))[0] == 200


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


# --- the rest of the process ---------------------------------------------------------------------


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
async def test_a_status_that_somebody_else_wrote_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(mends, "MEND_S", 0.2)
    at, path = _kept(part)

    async with playing(tmp_path, at) as served:
        await _first_statuses(served, at, part)
        ours = _said(at.objects[path])
        _overwritten(at, path, conditions=[], phase="Mine")
        await until(lambda: _said(at.objects[path]) == ours)
        await _at_rest(at, part)


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


@pytest.mark.parametrize(
    ("owner", "name"), [(Run, "tick"), (checkpoint_writer, "kept_steps"), (events, "event_bodies")]
)
async def test_a_run_that_raises_ends_neither_the_process_nor_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    at, works = cluster(), getattr(owner, name)
    at.tokens["poisoned"] = bound_to("evil", "gpt-worker-0", "pod-9")
    poisoned = pod_body(0)
    poisoned["metadata"] |= {"namespace": "evil", "uid": "pod-9"}
    at.objects[pod_path("gpt-worker-0", "evil")] = poisoned

    def raises(about: Any, *arguments: Any, **options: Any) -> Any:
        key = about.key if isinstance(about, Run) else about.run
        if key.namespace == "evil":
            raise ValueError(key)
        return works(about, *arguments, **options)

    async with playing(tmp_path, at) as served:

        def failures() -> float:
            found = served.parts.metrics.registry.collect()
            samples = [one for family in found for one in family.samples]
            return sum(one.value for one in samples if one.name == "keepstep_run_failures_total")

        monkeypatch.setattr(owner, name, raises)
        for token in ("poisoned", GOOD):
            assert (await served.post(whole(), token=token))[0] == 200
        await until(failures, what="the run that raises is left out")
        await until(lambda: at.objects.get(RUN, {}).get("status"))
        assert (await served.post(whole(), token=GOOD))[0] == 200
