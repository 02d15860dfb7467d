"""Every metric of the reconciler, in two tables. docs/metrics.md lists them, too.

Metrics of runs are read from the registry at each scrape. Metrics of the process are counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepstep_operator.reconcile.state.goodput import BUCKETS
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run import Run
from keepstep_operator.serving import metrics_registry


@dataclass(frozen=True)
class Row:
    """One value per run; a run without a value is left out."""

    name: str
    help: str
    value: Callable[[Run], float | None]
    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily


def _counted(value: Callable[[Run], int]) -> Callable[[Run], float | None]:
    """A counter; no value before the run's object is known. Its status has the value to count on
    from, and a counter that began at 0 for a moment would look like that many new events."""
    return lambda run: float(value(run)) if run.object is not None else None


def _goodput(run: Run) -> float | None:
    total = run.goodput.total
    return None if total is None or run.object is None else total.ratio


RUNS: Final = (
    Row("keepstep_run_pods", "Pods that ask for keepstep", lambda run: float(len(run.pods))),
    Row("keepstep_run_ranks", "Ranks of the run", lambda run: _number(run.ledger.world)),
    Row("keepstep_run_step", "Newest step staged by all ranks", lambda run: _number(run.step)),
    Row(
        "keepstep_run_committed_step",
        "Newest committed step",
        lambda run: _number(run.commit.id.step) if run.commit else None,
    ),
    Row(
        "keepstep_run_last_commit_timestamp_seconds",
        "When it was committed",
        lambda run: run.commit.at if run.commit else None,
    ),
    Row(
        "keepstep_run_behind_steps",
        "Steps staged and not committed",
        lambda run: _number(run.behind),
    ),
    Row(
        "keepstep_run_restarts",
        "Restores after the first start",
        _counted(lambda run: run.restores.restarts),
        CounterMetricFamily,
    ),
    Row(
        "keepstep_run_lost_steps",
        "Steps that had to be made again",
        _counted(lambda run: run.restores.lost_steps),
        CounterMetricFamily,
    ),
    Row("keepstep_run_goodput_ratio", "Useful step time over wall time, over all pods", _goodput),
    Row(
        "keepstep_run_finished",
        "1 when the job is over",
        lambda run: float(run.finished_at is not None),
    ),
)
"""Labels: namespace, run."""

CONDITION: Final = (
    "keepstep_run_condition",
    "1 for the status that each condition of the run has: True, False or Unknown",
)
"""Labels: namespace, run, condition, status."""

GOODPUT_SECONDS: Final = (
    "keepstep_run_goodput_seconds",
    "Wall time of the run, productive and by bucket of badput",
)
"""Labels: namespace, run, bucket."""


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)


class _Runs(Collector):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for row in RUNS:
            family = row.family(row.name, row.help, labels=("namespace", "run"))
            for key, run in self._registry.runs.items():
                if (value := row.value(run)) is not None:
                    family.add_metric((key.namespace, key.name), value)
            yield family
        yield self._conditions()
        yield self._goodput()

    def _conditions(self) -> Metric:
        family = GaugeMetricFamily(*CONDITION, labels=("namespace", "run", "condition", "status"))
        for key, run in self._registry.runs.items():
            for one in run.written.conditions:
                family.add_metric((key.namespace, key.name, one.type, one.status), 1.0)
        return family

    def _goodput(self) -> Metric:
        family = GaugeMetricFamily(*GOODPUT_SECONDS, labels=("namespace", "run", "bucket"))
        for key, run in self._registry.runs.items():
            if (total := run.goodput.total) is not None and run.object is not None:
                for bucket, seconds in zip(BUCKETS, total.seconds, strict=True):
                    family.add_metric((key.namespace, key.name, bucket), seconds)
        return family


class Metrics:
    """The metrics of one process, with their own registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = metrics_registry()
        self.registry.register(_Runs(registry))
        self.reports = Counter("keepstep_reports", "Reports taken in", registry=self.registry)
        self.refused = Counter(
            "keepstep_reports_refused",
            "Reports refused, by code",
            ("code",),
            registry=self.registry,
        )
        self._writes = Counter(
            "keepstep_api_writes",
            "Writes to the API server: status, run, checkpoint, event, policy, other",
            ("what", "outcome"),
            registry=self.registry,
        )
        self._left_out = Counter(
            "keepstep_run_failures",
            "Runs that a part of the reconciler failed at, and left out: tick, status, checkpoints,"
            " events",
            ("part",),
            registry=self.registry,
        )
        self._following = Gauge(
            "keepstep_following",
            "1 while a collection is followed, 0 while the API server does not answer",
            ("collection",),
            registry=self.registry,
        )

    def left_out(self, part: str) -> None:
        """A part of the reconciler raised at a run, and left it out."""
        self._left_out.labels(part).inc()

    def wrote(self, what: str, *, failed: bool = False) -> None:
        """Count one write to the API server."""
        self._writes.labels(what, "failed" if failed else "ok").inc()

    def following(self, collection: str, works: bool) -> None:
        """Set whether the watch of this collection works."""
        self._following.labels(collection).set(works)
