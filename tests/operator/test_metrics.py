"""What the operator's processes tell of themselves, and of runs over their own restarts."""

from __future__ import annotations

from prometheus_client import generate_latest

from keepstep_operator.api.run import RunStatus
from keepstep_operator.reconcile.metrics import Metrics as ReconcileMetrics
from tests.operator.reconcile.samples import FIRST, KEY, Play, Sidecar, later, pod, run_object

RUN = {"namespace": KEY.namespace, "run": KEY.name}
RESTARTS, LOST = "keepstep_run_restarts_total", "keepstep_run_lost_steps_total"


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
