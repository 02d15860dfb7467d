"""What the reconciler's metrics say of runs, over its own restarts."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import generate_latest

from keepstep.wire.run_reports import BadputSeconds, LeaderRecord, RunGoodput
from keepstep_operator.api.run_status import RunStatus
from keepstep_operator.reconcile import run_transitions as transitions
from keepstep_operator.reconcile.answer_to_leader import ClusterFacts
from keepstep_operator.reconcile.metrics import ReconcileMetrics
from keepstep_operator.reconcile.render import render_status
from keepstep_operator.reconcile.run_transitions import Run
from tests.operator.reconcile.samples import KEY, T0, begun, pod, report, reported, run_object

RUN = {"namespace": KEY.namespace, "run": KEY.name}
RESTARTS, LOST = "keepstep_run_restarts_total", "keepstep_run_lost_steps_total"


def value(run: Run, name: str, **labels: str) -> float | None:
    return ReconcileMetrics({KEY: run}).registry.get_sample_value(name, {**RUN, **labels})


def test_counters_of_a_run_continue_from_the_values_of_an_earlier_reconciler() -> None:
    old = run_object(status=RunStatus(phase="Running", restarts=4, lost_steps=70))
    run = transitions.run_object_seen(Run(key=KEY, since=T0), old)
    assert (value(run, RESTARTS), value(run, LOST)) == (4.0, 70.0)
    asks = reported(run, report(sequence=1))
    assert value(asks, RESTARTS) == 4.0, "the first report of a leader asks for the record"
    counted = reported(asks, report(sequence=2, record=LeaderRecord(restarts=5, lost_steps=80)))
    assert (value(counted, RESTARTS), value(counted, LOST)) == (5.0, 80.0)
    text = generate_latest(ReconcileMetrics({KEY: counted}).registry).decode()
    assert all(f"# TYPE {name} counter" in text for name in (RESTARTS, LOST))


def test_counters_of_a_run_are_not_exported_before_its_stored_status_is_read() -> None:
    run = transitions.pod_seen(Run(key=KEY, since=T0), pod(), at=T0)
    assert value(run, "keepstep_run_pods") == 1.0
    assert value(run, RESTARTS) is None
    assert value(transitions.run_object_seen(run, run_object()), RESTARTS) == 0.0


def test_each_condition_exports_one_sample_for_its_current_status() -> None:
    run = begun()
    shown = replace(run, status=render_status(run, ClusterFacts(), now=T0))

    def statuses(condition: str) -> set[str]:
        name = "keepstep_run_condition"
        every = ("True", "False", "Unknown")
        return {
            status for status in every if value(shown, name, condition=condition, status=status)
        }

    assert (statuses("Protected"), statuses("FullyInjected")) == ({"Unknown"}, {"True"})


def test_the_exported_goodput_is_that_of_the_leader_report() -> None:
    goodput = RunGoodput(
        since="2026-11-21T07:00:00Z",
        until="2026-11-21T07:01:40Z",
        ratio="0.750",
        wall_seconds=100,
        productive_seconds=75,
        badput_seconds=BadputSeconds(checkpoint_restore=25),
    )
    run = reported(begun(), report(record=LeaderRecord(goodput=goodput)))
    assert value(run, "keepstep_run_goodput_ratio") == 0.75
    assert value(run, "keepstep_run_goodput_seconds", bucket="checkpoint_restore") == 25.0
    assert value(replace(run, record=LeaderRecord()), "keepstep_run_goodput_ratio") is None
