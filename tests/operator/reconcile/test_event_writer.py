"""Events as `kubectl describe` finds them: one on the job and one on the run, a series when it is
said again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from keepstep_operator.api.model import Job, RunKey
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.state.actions import EmitEvent
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.events import EventWriter
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import KEY

T0 = 1_790_000_000.5
JOB = Job(api_version="kubeflow.org/v1", kind="PyTorchJob", name="gpt", uid="j-1")
COMMITTED = EmitEvent(run=KEY, about=JOB, reason="Committed", message="step 5", period_s=0.0)


@dataclass
class Stage:
    """A writer in front of an API server that remembers; `now` stands still."""

    server: ApiServer
    writer: EventWriter
    now: float = T0

    def events(self) -> list[dict[str, Any]]:
        return [one for path, one in self.server.objects.items() if "/events/" in path]

    async def say(self, event: EmitEvent, *, requests: int) -> None:
        """Tell it, and wait until so many requests in all were made for it."""
        self.writer.tell(event)
        await until(lambda: len(self.server.requests) >= requests)


def play(story: Callable[[Stage], Coroutine[Any, Any, None]], *, uid: str = "r-1") -> None:
    async def whole() -> None:
        server = ApiServer()
        async with server.running(), Client(server.access) as client:
            registry = Registry()
            stage: Stage

            def uid_of(run: RunKey) -> str:
                return uid

            writer = EventWriter(
                client, uid_of=uid_of, metrics=Metrics(registry), clock=lambda: stage.now
            )
            stage = Stage(server, writer)
            task = asyncio.create_task(writer.run())
            await story(stage)
            task.cancel()

    asyncio.run(whole())


def test_an_event_is_on_the_job_and_on_the_run_and_each_names_the_other() -> None:
    async def story(stage: Stage) -> None:
        await stage.say(COMMITTED, requests=2)
        await until(lambda: len(stage.events()) == 2)
        by_kind = {one["regarding"]["kind"]: one for one in stage.events()}
        job, run = by_kind["PyTorchJob"], by_kind["CheckpointRun"]
        assert (job["regarding"]["uid"], run["regarding"]["uid"]) == ("j-1", "r-1")
        assert job["related"] == run["regarding"]
        assert run["related"] == job["regarding"]
        for one in (job, run):
            assert (one["reason"], one["note"], one["type"]) == ("Committed", "step 5", "Normal")
            assert one["reportingController"] == "keepstep.dev/reconcile"
            assert one["reportingInstance"]
            assert one["eventTime"] == "2026-09-21T14:13:20.500000Z"

    play(story)


def test_what_is_said_again_word_for_word_is_one_more_of_a_series() -> None:
    async def story(stage: Stage) -> None:
        await stage.say(COMMITTED, requests=1)
        stage.now += 600.0
        await stage.say(COMMITTED, requests=2)
        (event,) = await until(lambda: [one for one in stage.events() if "series" in one])
        assert event["series"]["count"] == 2
        assert event["series"]["lastObservedTime"] > event["eventTime"]
        stage.now += 3600.0  # the API server has let it go by then
        await stage.say(COMMITTED, requests=3)
        await until(lambda: len(stage.events()) == 2)

    play(story, uid="")
