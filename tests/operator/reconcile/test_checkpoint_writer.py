"""Checkpoint objects and nodes, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from keepstep_operator.kube import Client
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Pacer
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.checkpoint_writer import CheckpointWriter
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import (
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
        (owner,) = bench.cluster.objects[path(80)]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("CheckpointRun", "run-1"), "it goes with its run"
        bench.cluster.remove(path(80))
        await until(lambda: path(80) in bench.there())
        assert theirs in bench.there()

    play(scene, cluster, list_every_s=0.5)
