"""Checkpoint objects and nodes, over real HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep_operator.api.model import NodeRecord, RunKey, RunObject
from keepstep_operator.kube import Client, follow
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Pacer
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run import Run
from keepstep_operator.reconcile.state.run_view import KeptStep
from keepstep_operator.reconcile.watch import Handlers
from keepstep_operator.reconcile.writers import checkpoint_writer
from keepstep_operator.reconcile.writers.checkpoint_writer import AT_ONCE, CheckpointWriter
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import (
    IMAGE_BYTES,
    KEY,
    T0,
    Sidecar,
    pod,
    policy,
    run_object,
    step,
)
from tests.operator.reconcile.test_tiers import ARCHIVE

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


def play(
    scene: Callable[[Bench], Coroutine[Any, Any, None]],
    cluster: ApiServer | None = None,
    *,
    list_every_s: float = 600.0,
) -> None:
    async def run() -> None:
        registry, loop = Registry(), asyncio.get_running_loop()
        standin = cluster or ApiServer()
        async with standin.running(), Client(standin.access) as client:
            checkpoint_writer = CheckpointWriter(
                registry,
                client,
                metrics=Metrics(registry),
                clock=loop.time,
                pacer=Pacer(least_period_s=0.2, settle_s=0.05),
                list_every_s=list_every_s,
            )
            task = loop.create_task(checkpoint_writer.run())
            try:
                await scene(Bench(registry, standin, checkpoint_writer))
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_name_that_somebody_elses_object_has_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> int:
        return sum(one.message == "checkpoint not made" for one in caplog.records)

    async def scene(bench: Bench) -> None:
        foreign = bench.cluster.add(path(70), {"metadata": {"name": f"{KEY.name}-{step(70)}"}})
        bench.archive([70, 80])
        await until(lambda: path(80) in bench.there())
        bench.archive([70, 90])
        await until(lambda: path(90) in bench.there())
        assert bench.cluster.objects[path(70)] == foreign
        assert told() == 1

    with caplog.at_level(logging.WARNING, "keepstep.operator"):
        play(scene)


def test_archived_and_pinned_steps_become_objects_and_go_with_their_step() -> None:
    async def scene(bench: Bench) -> None:
        bench.registry.object_seen(run_object(pins=(str(step(90)),)), at=T0)
        bench.archive([70, 80])
        await until(lambda: len(bench.there()) == 3)
        body = bench.cluster.objects[path(80)]
        spec = {"run": KEY.name, "step": str(step(80)), "ranks": 1, "bytes": IMAGE_BYTES}
        assert body["spec"] == spec
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("CheckpointRun", KEY.name, "run-1")
        await until(lambda: bench.cluster.objects[path(80)].get("status"))
        assert bench.cluster.objects[path(80)]["status"]["tiers"] == ["archive"]
        bench.archive([80])
        await until(lambda: bench.there() == {path(80), path(90)})

    play(scene)


def test_objects_of_others_are_left_alone_and_ours_come_back_when_deleted() -> None:
    cluster = ApiServer()
    theirs = f"{CHECKPOINTS}/mine"
    cluster.objects[theirs] = {
        "metadata": {
            "name": "mine",
            "namespace": KEY.namespace,
            "labels": {"keepstep.dev/run-key": KEY.name},
        }
    }

    async def scene(bench: Bench) -> None:
        bench.archive([80])
        await until(lambda: path(80) in bench.there())
        await until(lambda: bench.cluster.objects[path(80)].get("status"))
        bench.cluster.remove(path(80))
        await until(lambda: path(80) in bench.there())
        assert theirs in bench.there()

    play(scene, cluster, list_every_s=0.5)


def test_a_step_that_stays_costs_no_further_write_and_many_come_a_few_at_a_time() -> None:
    async def scene(bench: Bench) -> None:
        bench.archive(range(100, 100 + AT_ONCE + 5))
        await until(lambda: len(bench.there()) == AT_ONCE)
        await until(lambda: len(bench.there()) == AT_ONCE + 5)
        await until(lambda: bench.asked() == 2 * (AT_ONCE + 5))
        newest = 100 + AT_ONCE + 5
        bench.archive(range(100, newest))
        bench.archive(range(100, newest + 1))
        await until(lambda: path(newest) in bench.there())
        await until(lambda: bench.asked() == 2 * (AT_ONCE + 6))

    play(scene)


def test_what_could_not_be_written_is_written_later() -> None:
    cluster = ApiServer(broken=1, broken_part=f"namespaces/{KEY.namespace}/checkpoints")

    async def scene(bench: Bench) -> None:
        bench.archive([70])
        await until(lambda: path(70) in bench.there())
        assert len(bench.cluster.asked("GET", "/checkpoints")) == 2
        await until(lambda: bench.asked() == 2)
        bench.cluster.broken = 1
        bench.archive([70, 80])
        await until(lambda: path(80) in bench.there())
        assert len(bench.cluster.asked("POST", "/checkpoints")) == 3

    play(scene, cluster)


def test_nodes_are_followed_with_their_zone_and_whether_they_are_cordoned() -> None:
    zone = {"topology.kubernetes.io/zone": "a"}

    def node(name: str, **spec: Any) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "labels": zone, "managedFields": [{}]},
            "spec": spec,
            "status": {"images": [{"sizeBytes": 1}] * 50},
        }

    async def run() -> None:
        registry, cluster = Registry(), ApiServer()
        cluster.add("/api/v1/nodes/one", node("one"))
        cluster.add("/api/v1/nodes/two", node("two", unschedulable=True))
        seen: dict[str, NodeRecord] = registry._nodes
        handlers = Handlers(
            registry,
            None,  # type: ignore[arg-type]
            writer=None,  # type: ignore[arg-type]
            metrics=Metrics(registry),
            host_paths=(),
            clock=lambda: T0,
        )
        async with cluster.running(), Client(cluster.access) as client:
            task = asyncio.create_task(follow(client, [handlers.nodes()]))
            await until(lambda: len(seen) == 2)
            assert [seen[name].cordoned for name in ("one", "two")] == [False, True]
            assert seen["one"].labels == zone
            await until(cluster.watches)
            taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
            cluster.add("/api/v1/nodes/one", node("one", taints=[taint]))
            await until(lambda: seen["one"].cordoned)
            cluster.remove("/api/v1/nodes/two")
            await until(lambda: set(seen) == {"one"})
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


async def test_runs_of_which_nothing_is_to_be_written_are_looked_at_with_others_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All runs of a cluster are due at once after a start, and again a period later; one with a
    hundred archived steps takes a millisecond."""
    registry, turn, looked = Registry(), 0, list[int]()
    keys = [RunKey(KEY.namespace, f"run-{number}") for number in range(20)]
    for key in keys:
        registry.object_seen(RunObject(key=key, uid=f"uid-of-{key.name}"), at=T0)

    def kept_steps(run: Run) -> tuple[KeptStep, ...]:
        looked.append(turn)
        return ()

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(checkpoint_writer, "kept_steps", kept_steps)
    clock = asyncio.get_running_loop().time
    pacer = Pacer[RunKey](least_period_s=0.05, settle_s=0.0)
    standin = ApiServer()
    async with standin.running(), Client(standin.access) as client:
        metrics = Metrics(registry)
        writer = CheckpointWriter(registry, client, metrics=metrics, clock=clock, pacer=pacer)
        tasks = [asyncio.create_task(one) for one in (writer.run(), others())]
        for looks in (len(keys), 2 * len(keys)):
            for key in keys:
                writer.mark(key)
            await until(lambda looks=looks: len(looked) == looks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    again = looked[len(keys) :]
    assert len(set(again)) == len(again)
