"""What the operator's processes tell of themselves, and of runs over their own restarts."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from keepstep_operator import observing as module
from keepstep_operator.api.run import RunStatus
from keepstep_operator.observing import observing
from keepstep_operator.reconcile.metrics import Metrics as ReconcileMetrics
from tests.harness import until
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


# The metrics port answers while the event loop of the process works, and says if it is stuck.


def asked(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


async def test_health_is_answered_while_the_loop_works() -> None:
    answers: list[tuple[int, bytes]] = []
    async with observing(CollectorRegistry(), lambda: "", port=0) as port:
        asking = threading.Thread(target=lambda: answers.append(asked(port, "/healthz")))
        asking.start()
        asking.join()  # holds this loop
    assert answers == [(200, b"ok\n")]


async def test_a_loop_that_does_not_turn_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.5)
    answers: list[tuple[int, bytes]] = []
    async with observing(CollectorRegistry(), lambda: "", port=0) as port:
        time.sleep(0.6)  # noqa: ASYNC251 - it is stuck
        asking = threading.Thread(target=lambda: answers.append(asked(port, "/healthz")))
        asking.start()
        asking.join()
        ((status, reason),) = answers
        assert (status, b"not turned" in reason) == (503, True)
        await until(lambda: asyncio.to_thread(lambda: asked(port, "/healthz")[0] == 200))
