"""Every metric of the reconciler, in a table. docs/metrics.md lists them, too.

Metrics of runs are read from their values at each scrape. Metrics of the process are counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepstep.wire.run_reports import LeaderRecord, RunReport, parse_utc
from keepstep_operator.api.cluster_objects import RunKey
from keepstep_operator.reconcile.run_transitions import Run
from keepstep_operator.serving import metrics_registry


@dataclass(frozen=True)
class RunMetric:
    """One value per run; a run without a value is left out."""

    name: str
    help: str
    value: Callable[[Run], float | None]
    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily


def _counted(value: Callable[[LeaderRecord], int]) -> Callable[[Run], float | None]:
    """A counter; no value before the run's object is known. Its status has the value to count on
    from, and a counter that began at 0 for a moment would look like that many new events."""
    return lambda run: float(value(run.record)) if run.object is not None else None


def _reported(value: Callable[[RunReport], float | None]) -> Callable[[Run], float | None]:
    return lambda run: None if run.report is None else value(run.report)


def _ratio(run: Run) -> float | None:
    goodput = run.record.goodput
    return None if goodput is None else goodput.productive_seconds / max(1, goodput.wall_seconds)


def _committed_at(run: Run) -> float | None:
    return parse_utc(run.committed.time) if run.committed is not None else None


RUNS: Final = (
    RunMetric(
        "keepstep_run_pods", "Pods that ask for keepstep", lambda run: float(len([*run.job_pods]))
    ),
    RunMetric(
        "keepstep_run_ranks", "Ranks of the run", _reported(lambda report: report.world or None)
    ),
    RunMetric(
        "keepstep_run_step",
        "Newest step staged by all ranks",
        lambda run: run.report.step if run.report is not None else run.status.step,
    ),
    RunMetric(
        "keepstep_run_committed_step",
        "Newest committed step",
        lambda run: run.committed.step if run.committed is not None else None,
    ),
    RunMetric("keepstep_run_last_commit_timestamp_seconds", "When it was committed", _committed_at),
    RunMetric(
        "keepstep_run_behind_steps",
        "Steps staged and not committed",
        _reported(lambda report: report.behind),
    ),
    RunMetric(
        "keepstep_run_volume_used_ratio",
        "Used part of the run's fullest volume",
        _reported(lambda report: report.fullest),
    ),
    RunMetric(
        "keepstep_run_restarts",
        "Restores after the first start",
        _counted(lambda record: record.restarts),
        CounterMetricFamily,
    ),
    RunMetric(
        "keepstep_run_lost_steps",
        "Steps that had to be made again",
        _counted(lambda record: record.lost_steps),
        CounterMetricFamily,
    ),
    RunMetric(
        "keepstep_run_goodput_ratio", "Useful step time over wall time, over all pods", _ratio
    ),
    RunMetric(
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


class _Runs(Collector):
    def __init__(self, runs: Mapping[RunKey, Run]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        for row in RUNS:
            family = row.family(row.name, row.help, labels=("namespace", "run"))
            for key, run in self._runs.items():
                if (value := row.value(run)) is not None:
                    family.add_metric((key.namespace, key.name), value)
            yield family
        yield self._conditions()
        yield self._goodput()

    def _conditions(self) -> Metric:
        family = GaugeMetricFamily(*CONDITION, labels=("namespace", "run", "condition", "status"))
        for key, run in self._runs.items():
            for condition in run.status.conditions:
                family.add_metric((key.namespace, key.name, condition.type, condition.status), 1.0)
        return family

    def _goodput(self) -> Metric:
        family = GaugeMetricFamily(*GOODPUT_SECONDS, labels=("namespace", "run", "bucket"))
        for key, run in self._runs.items():
            if (goodput := run.record.goodput) is not None:
                spent = {"productive": goodput.productive_seconds, **asdict(goodput.badput_seconds)}
                for bucket, seconds in spent.items():
                    family.add_metric((key.namespace, key.name, bucket), seconds)
        return family


class ReconcileMetrics:
    """The metrics of one process, with their own registry. `runs`: read at each scrape."""

    def __init__(self, runs: Mapping[RunKey, Run]) -> None:
        self.registry = metrics_registry()
        self.registry.register(_Runs(runs))
        self.reports = Counter("keepstep_reports", "Reports taken in", registry=self.registry)
        self.refused = Counter(
            "keepstep_reports_refused",
            "Reports refused, by code",
            ("code",),
            registry=self.registry,
        )
        self._writes = Counter(
            "keepstep_api_writes",
            "Writes to the API server: status, run, checkpoint, event, service, other",
            ("what", "outcome"),
            registry=self.registry,
        )

    def wrote(self, what: str, *, failed: bool = False) -> None:
        """Count one write to the API server."""
        self._writes.labels(what, "failed" if failed else "ok").inc()
