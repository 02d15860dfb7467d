"""Writes to the API server: statuses, Events and Checkpoint objects, coalesced, bounded, made good
after failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from keepstep_operator.api.model import Job
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Buckets, Pacer, Throttle
from keepstep_operator.reconcile.state.actions import EmitEvent
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.checkpoint_writer import CheckpointWriter
from keepstep_operator.reconcile.writers.events import EventWriter
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import KEY, T0, Sidecar, pod, policy, run_object, step
from tests.operator.reconcile.test_tiers import ARCHIVE


def test_changes_within_the_period_are_one_write() -> None:
    pacer: Pacer[str] = Pacer()
    written = []
    for tenth in range(100):
        at = T0 + tenth / 10
        pacer.mark("run", at=at)
        written += [at - T0 for _ in pacer.take(at=at)]
    assert len(written) == 5
    assert written[0] <= 0.3, "the first is written at once"
    assert all(b - a >= 2.0 for a, b in itertools.pairwise(written))


def test_a_bucket_gives_what_is_in_it_and_fills_again() -> None:
    buckets = Buckets[str](burst=2, refill_s=10.0)
    assert [buckets.take("a", at=T0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", at=T0)
    assert buckets.take("a", at=T0 + 10)
    buckets.spend("a", 3.0)
    assert not buckets.take("a", at=T0 + 30)
    assert buckets.take("a", at=T0 + 50)


def test_a_failed_write_is_tried_again_later_and_later() -> None:
    pacer: Pacer[str] = Pacer()
    at, pauses = T0, []
    pacer.mark("run", at=at)
    for _ in range(8):
        due = pacer.next_at()
        assert due is not None
        assert pacer.take(at=due) == ["run"]
        pauses.append(due - at)
        at = due
        pacer.failed("run", at=at)
    assert pauses[1:] == [4.0, 8.0, *[15.0] * 5]
    pacer.forget("run")
    assert pacer.next_at() is None


def test_the_same_is_said_once_a_period_and_not_everything_at_once() -> None:
    throttle = Throttle(burst=3, refill_s=10.0)
    assert throttle.allows("run", "a", period_s=60, at=0)
    assert not throttle.allows("run", "a", period_s=60, at=59)
    assert throttle.allows("run", "a", period_s=60, at=60)
    assert [throttle.allows("run", i, period_s=60, at=61) for i in range(4)] == [True] * 2 + [
        False
    ] * 2
    assert throttle.allows("another", 0, period_s=60, at=61)
    assert throttle.allows("run", 3, period_s=60, at=72)


# Events as `kubectl describe` finds them: one on the job and one on the run, a series when it
# is said again.


SAID_AT = 1_790_000_000.5
JOB = Job(api_version="kubeflow.org/v1", kind="PyTorchJob", name="gpt", uid="j-1")
COMMITTED = EmitEvent(run=KEY, about=JOB, reason="Committed", message="step 5", period_s=0.0)


@dataclass
class Stage:
    """A writer in front of an API server that remembers; `now` stands still."""

    server: ApiServer
    writer: EventWriter
    now: float = SAID_AT

    def events(self) -> list[dict[str, Any]]:
        return [one for path, one in self.server.objects.items() if "/events/" in path]

    async def say(self, event: EmitEvent, *, requests: int) -> None:
        """Tell it, and wait until so many requests in all were made for it."""
        self.writer.tell(event)
        await until(lambda: len(self.server.requests) >= requests)


@asynccontextmanager
async def writing_events(*, uid: str = "r-1") -> AsyncIterator[Stage]:
    server = ApiServer()
    async with server.running(), Client(server.access) as client:
        stage: Stage
        writer = EventWriter(
            client,
            uid_of=lambda run: uid,
            metrics=Metrics(Registry()),
            clock=lambda: stage.now,
        )
        stage = Stage(server, writer)
        task = asyncio.create_task(writer.run())
        yield stage
        task.cancel()


async def test_an_event_is_on_the_job_and_on_the_run_and_each_names_the_other() -> None:
    async with writing_events() as stage:
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


async def test_what_is_said_again_word_for_word_is_one_more_of_a_series() -> None:
    async with writing_events(uid="") as stage:
        await stage.say(COMMITTED, requests=1)
        stage.now += 600.0
        await stage.say(COMMITTED, requests=2)
        (event,) = await until(lambda: [one for one in stage.events() if "series" in one])
        assert event["series"]["count"] == 2
        assert event["series"]["lastObservedTime"] > event["eventTime"]
        stage.now += 3600.0  # the API server has let it go by then
        await stage.say(COMMITTED, requests=3)
        await until(lambda: len(stage.events()) == 2)


# Checkpoint objects and nodes, over real HTTP.


CHECKPOINTS = f"/apis/keepstep.dev/v1alpha1/namespaces/{KEY.namespace}/checkpoints"


def path(number: int) -> str:
    return f"{CHECKPOINTS}/{KEY.name}-{step(number)}"


@dataclass
class Bench:
    """One pod, one rank, and an archive whose content the test sets."""

    registry: Registry
    cluster: ApiServer
    checkpoint_writer: CheckpointWriter

    def __post_init__(self) -> None:
        self.sidecar = Sidecar(rank=0, world=1).durable(90)
        self.registry.policy_seen(policy(archive=ARCHIVE))
        self.registry.pod_seen(pod(0), at=T0)
        self.registry.object_seen(run_object(), at=T0)

    def archive(self, numbers: Iterable[int]) -> None:
        self.sidecar.archive = [step(number) for number in numbers]
        self.registry.reported("pod-0-1", self.sidecar.report(), at=T0)
        self.checkpoint_writer.mark(KEY)

    def there(self) -> set[str]:
        return {one for one in self.cluster.objects if one.startswith(CHECKPOINTS)}

    def asked(self) -> int:
        methods = ("POST", "PATCH", "DELETE")
        return sum(len(self.cluster.asked(one, "/checkpoints")) for one in methods)


@asynccontextmanager
async def writing_checkpoints(cluster: ApiServer, *, list_every_s: float) -> AsyncIterator[Bench]:
    registry, loop = Registry(), asyncio.get_running_loop()
    async with cluster.running(), Client(cluster.access) as client:
        checkpoint_writer = CheckpointWriter(
            registry,
            client,
            metrics=Metrics(registry),
            clock=loop.time,
            pacer=Pacer(least_period_s=0.2, settle_s=0.05),
            list_every_s=list_every_s,
        )
        task = loop.create_task(checkpoint_writer.run())
        yield Bench(registry, cluster, checkpoint_writer)
        task.cancel()


async def test_objects_of_others_are_left_alone_and_ours_come_back_when_deleted() -> None:
    cluster = ApiServer()
    theirs = f"{CHECKPOINTS}/mine"
    cluster.objects[theirs] = {
        "metadata": {
            "name": "mine",
            "namespace": KEY.namespace,
            "labels": {"keepstep.dev/run-key": KEY.name},
        }
    }

    async with writing_checkpoints(cluster, list_every_s=0.5) as bench:
        bench.archive([80])
        await until(lambda: path(80) in bench.there())
        await until(lambda: bench.cluster.objects[path(80)].get("status"))
        (owner,) = bench.cluster.objects[path(80)]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("CheckpointRun", "run-1"), "it goes with its run"
        bench.cluster.remove(path(80))
        await until(lambda: path(80) in bench.there())
        assert theirs in bench.there()
