"""What the operator's processes tell of themselves, and of runs over their own restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepstep_operator import __version__
from keepstep_operator.admission.metrics import Metrics as AdmissionMetrics
from keepstep_operator.api.run import RunStatus
from keepstep_operator.certificates.main import Metrics as CertificatesMetrics
from keepstep_operator.reconcile.metrics import Metrics as ReconcileMetrics
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.serving import listening, observed
from tests.operator.reconcile.samples import FIRST, KEY, Play, Sidecar, later, pod, run_object

RUN = {"namespace": KEY.namespace, "run": KEY.name}
RESTARTS, LOST = "keepstep_run_restarts_total", "keepstep_run_lost_steps_total"


@pytest.mark.parametrize(
    "registry",
    [
        AdmissionMetrics().registry,
        ReconcileMetrics(Registry()).registry,
        CertificatesMetrics().registry,
    ],
    ids=["admission", "reconcile", "certificates"],
)
def test_every_process_tells_its_version(registry: CollectorRegistry) -> None:
    labels = {"version": __version__}
    assert registry.get_sample_value("keepstep_operator_build_info", labels) == 1.0


def test_what_a_run_lost_is_counted_on_from_where_an_earlier_reconciler_stopped() -> None:
    play = Play(pod(0), pod(1))
    told = ReconcileMetrics(play.registry).registry
    play.find(run_object(RunStatus(step=90, epoch=str(FIRST.id), restarts=4, lost_steps=70)))
    assert told.get_sample_value(RESTARTS, RUN) == 4.0
    again = later(2, 90)
    for rank in (0, 1):
        play.hear(pod(rank), Sidecar(rank=rank).restored(again, lost=10).report())
    assert told.get_sample_value(RESTARTS, RUN) == 5.0
    assert told.get_sample_value(LOST, RUN) == 80.0
    text = generate_latest(told).decode()
    assert all(f"# TYPE {name} counter" in text for name in (RESTARTS, LOST))


def test_no_count_of_a_run_is_told_before_its_object_has_said_from_where_to_go_on() -> None:
    play = Play(pod(0))
    told = ReconcileMetrics(play.registry).registry
    assert told.get_sample_value("keepstep_run_pods", RUN) == 1.0
    assert told.get_sample_value(RESTARTS, RUN) is None
    play.find(run_object())
    assert told.get_sample_value(RESTARTS, RUN) == 0.0


def test_a_condition_that_is_unknown_is_told_like_any_other() -> None:
    play = Play(pod(0))
    told = ReconcileMetrics(play.registry).registry

    def status(condition: str) -> set[str]:
        return {
            one
            for one in ("True", "False", "Unknown")
            if told.get_sample_value(
                "keepstep_run_condition", {**RUN, "condition": condition, "status": one}
            )
        }

    assert play.status
    assert (status("Protected"), status("FullyInjected")) == ({"Unknown"}, {"True"})
    play.hear(pod(0), Sidecar(rank=0, world=1).report())
    assert play.status
    assert status("Protected") == {"False"}


class _ManyRuns(Collector):
    """Each of two families has so many samples, takes a while, and notes the loop's turn."""

    def __init__(
        self, count: int, *, cpu_s: float = 0.0, turn: Callable[[], int] = lambda: 0
    ) -> None:
        self._count = count
        self._cpu_s = cpu_s
        self._turn = turn
        self.turns: list[int] = []

    def collect(self) -> Iterator[Metric]:
        for name in ("a_step", "b_step"):
            self.turns.append(self._turn())
            until = time.thread_time() + self._cpu_s / 2
            while time.thread_time() < until:
                pass
            family = GaugeMetricFamily(name, "of a run", labels=("run",))
            for number in range(self._count):
                family.add_metric((f"# {number}\n",), number)
            yield family


@asynccontextmanager
async def _told(collector: Collector) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the metrics port."""
    registry = CollectorRegistry()
    registry.register(collector)
    async with (
        listening(observed(registry, lambda: ""), port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session


async def _text(session: aiohttp.ClientSession) -> bytes:
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.read()


async def test_metrics_of_many_runs_are_made_in_parts_with_others_between() -> None:
    turn = 0

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    runs = _ManyRuns(3000, turn=lambda: turn)
    async with _told(runs) as session:
        meanwhile = asyncio.create_task(others())
        assert await _text(session) == generate_latest(_ManyRuns(3000))
        meanwhile.cancel()
    first, second = runs.turns
    assert second - first >= 6


async def test_metrics_are_made_once_for_all_who_ask_within_a_while() -> None:
    """Whoever reaches the port could keep the loop busy with nothing else."""
    runs = _ManyRuns(10, cpu_s=0.5)
    async with _told(runs) as session:
        await asyncio.gather(*(_text(session) for _ in range(5)))
        for _ in range(5):
            await _text(session)
    assert len(runs.turns) == 2
