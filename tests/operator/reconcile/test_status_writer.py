"""Writes to the API server: coalesced, bounded, made good after failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from keepstep_operator.api.model import RunKey
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Buckets, Pacer, Throttle
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.status_writer import StatusWriter
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import KEY, T0, Sidecar, pod

PATH = f"/apis/keepstep.dev/v1alpha1/namespaces/{KEY.namespace}/checkpointruns/{KEY.name}"


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


def test_many_runs_are_written_less_often_each() -> None:
    pacer: Pacer[int] = Pacer()
    writes = 0
    for tenth in range(600):
        at = T0 + tenth / 10
        for run in range(200):
            pacer.mark(run, at=at)
        writes += len(pacer.take(at=at))
    assert 1000 <= writes <= 60 * 25 + 400


def test_what_is_to_be_seen_soon_waits_for_no_others() -> None:
    pacer: Pacer[int] = Pacer()
    written: dict[int, list[float]] = {run: [] for run in range(200)}
    for tenth in range(600):
        at = T0 + tenth / 10
        for run in written:
            pacer.mark(run, at=at)
        if tenth >= 300:
            pacer.mark(0, at=at, soon=True)  # it asks for that always
        if tenth == 300:
            pacer.mark(1, at=at, soon=True)
        for run in pacer.take(at=at):
            written[run].append(at - T0)
    assert next(at for at in written[1] if at > 30) <= 32.5
    greedy, others = len(written[0]), [len(written[run]) for run in range(2, 200)]
    assert max(others) <= 9
    assert min(others) >= 7
    assert max(others) < greedy <= max(others) + 5


def test_what_fails_is_not_tried_sooner_for_being_wanted_soon() -> None:
    pacer: Pacer[str] = Pacer()
    pacer.mark("run", at=T0)
    assert pacer.take(at=T0 + 1) == ["run"]
    pacer.failed("run", at=T0 + 1)
    due = pacer.next_at()
    pacer.mark("run", at=T0 + 1, soon=True)
    assert pacer.next_at() == due


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


# --- against a server ----------------------------------------------------------------------------


@dataclass
class Bench:
    registry: Registry
    cluster: ApiServer
    writer: StatusWriter
    now: float = T0

    def stage(self, *numbers: int) -> None:
        """One report more."""
        self.sidecar.staged(*numbers)
        for action in self.registry.reported("pod-0-1", self.sidecar.report(), at=self.now):
            if hasattr(action, "run"):
                self.writer.mark(action.run)

    def __post_init__(self) -> None:
        self.sidecar = Sidecar(rank=0, world=1)
        self.registry.pod_seen(pod(0), at=self.now)

    def step(self) -> int | None:
        """As it was written last."""
        status = self.cluster.objects.get(PATH, {}).get("status", {})
        found: int | None = status.get("step")
        return found

    def writes(self) -> int:
        return len(self.cluster.asked("PATCH", "/status"))


def play(scene: Callable[[Bench], object], *, period_s: float = 0.2) -> None:
    """Real time and real requests, with a short period."""

    async def run() -> None:
        registry, loop = Registry(), asyncio.get_running_loop()
        async with ApiServer().running() as cluster, Client(cluster.access) as client:
            pacer: Pacer[RunKey] = Pacer(least_period_s=period_s, settle_s=0.01)
            writer = StatusWriter(
                registry,
                client,
                metrics=Metrics(registry),
                clock=lambda: T0 + loop.time(),
                pacer=pacer,
            )
            task = asyncio.create_task(writer.run())
            try:
                await scene(Bench(registry, cluster, writer))  # type: ignore[misc]
            finally:
                task.cancel()

    asyncio.run(run())


def test_an_api_server_that_fails_gets_the_newest_status_when_it_is_back() -> None:
    async def scene(bench: Bench) -> None:
        bench.cluster.broken = 3
        bench.stage(1)
        await until(lambda: bench.cluster.broken < 3)
        bench.stage(2)
        await until(lambda: bench.step() == 2)

    play(scene, period_s=0.05)


def test_a_run_that_is_gone_is_not_made_again() -> None:
    async def scene(bench: Bench) -> None:
        bench.stage(1)
        await until(lambda: bench.cluster.objects.get(PATH, {}).get("status"))
        bench.registry.pod_gone("pod-0-1", at=T0)
        bench.cluster.remove(PATH)
        bench.writer.forget(KEY)
        bench.registry.object_gone(KEY)
        bench.writer.mark(KEY)
        await until(lambda: bench.writer._pacer.next_at() is None)
        assert PATH not in bench.cluster.objects

    play(scene, period_s=0.05)
