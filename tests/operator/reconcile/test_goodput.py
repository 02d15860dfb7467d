"""Goodput of a run over pods: what sidecars tell, added up, beside a simulation that knows where
each second went."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.core.goodput import Badput, Tally
from keepstep.core.history import Event, Kind
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.reports import Report, ReportedGoodput
from keepstep_operator.api.run import GoodputStatus, RunStatus, as_json, read_status
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.report_body import read
from keepstep_operator.reconcile.state.goodput import (
    BUCKETS,
    MOST_TALLIES,
    SHOWN_S,
    RunGoodput,
    Sum,
    added,
    is_sane,
    whole,
)
from keepstep_sidecar.report.changes import changes
from keepstep_sidecar.report.report import news
from tests.chart.charts import crds, schema_of
from tests.chart.schemas import closed, json_schema
from tests.core.test_goodput import Life, Truth, simulate
from tests.harness import until
from tests.operator.reconcile.samples import KEY, T0, Play, Sidecar, pod, run_object
from tests.operator.reconcile.test_status_writer import PATH, Bench, play

BEGAN = T0
LIFE_1, LIFE_2 = EpochId(1, "00000001"), EpochId(2, "00000002")


def volume(number: int) -> str:
    """The id of the history that begins on this volume."""
    return f"{number:016x}"


def by_life(events: list[Event]) -> list[list[Event]]:
    lives: list[list[Event]] = []
    for event in events:
        if event.kind is Kind.CAME and event.rank == 0:
            lives.append([])
        lives[-1].append(event)
    return lives


def reports(lives: list[list[Event]], places: list[int]) -> Iterator[ReportedGoodput]:
    """After each event, of the sidecar whose volume this life's pod has."""
    tallies: dict[int, Tally] = {}
    for life, place in zip(lives, places, strict=True):
        for event in life:
            tallies[place] = tallies.get(place, Tally()).after([event])
            found = tallies[place].goodput(event.until)
            if found is not None:
                yield ReportedGoodput.of(found, volume(place))


def resumed(sum_: Sum | None) -> Sum | None:
    """As another operator reads it back from the status."""
    goodput = RunGoodput()
    goodput._shown = sum_
    body = as_json(RunStatus(goodput=goodput.status()))
    read_back = msgspec.json.decode(msgspec.json.encode(body))
    goodput.resume(read_status(read_back).goodput)
    return goodput._sum


def by_bucket(sum_: Sum) -> dict[str, int]:
    return dict(zip(BUCKETS, sum_.total.seconds, strict=True))


def is_whole(sum_: Sum) -> bool:
    return sum_.total.sane and len(sum_.known) <= MOST_TALLIES


# --- beside a simulation -------------------------------------------------------------------------

some = st.floats(0.0, 1000.0)
lives_on_volumes = st.lists(
    st.tuples(
        st.builds(
            Life, away=some, prep=some, restore=some, lag=some, startup=some, step=st.just(7.0),
            blocked=some, steps=st.integers(2, 8), torn=some, back=st.integers(0, 20),
            bundle=st.integers(1, 8), known_end=st.booleans(),
        ),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


def simulated(drawn: list[tuple[Life, int]]) -> tuple[list[ReportedGoodput], Truth, float]:
    """All that is told, in which buckets the time of the run was, and its end."""
    events, truth = simulate([life for life, _ in drawn], began=BEGAN)
    return (
        list(reports(by_life(events), [place for _, place in drawn])),
        truth,
        events[-1].until,
    )


WASTED_BY_ANOTHER: list[tuple[Life, int]] = [
    (Life(step=7.0, steps=4), 1),
    (Life(step=7.0, steps=2, back=4), 0),
    (Life(step=7.0, steps=2, back=0), 1),
]
"""The first volume comes back and gives up steps that were given up while it waited."""


@settings(max_examples=200, deadline=None)
@given(drawn=lives_on_volumes)
@example(drawn=WASTED_BY_ANOTHER)
def test_the_sum_finds_where_every_second_went_whatever_volumes_the_pods_had(
    drawn: list[tuple[Life, int]],
) -> None:
    """A pod comes back to a volume, with or without others in between, or begins on a new one."""
    all_told, truth, end = simulated(drawn)
    sum_: Sum | None = None
    for one in all_told:
        assert is_sane(one, at=one.until)
        sum_ = added(sum_, whole(one))
        assert is_whole(sum_)
    assert sum_ is not None
    # whole seconds: each bucket of each history is rounded, and so is what is moved on
    rounded = 2.0 * len(drawn) + 2.0
    assert by_bucket(sum_) == pytest.approx(truth.parts, abs=rounded)
    assert sum(sum_.total.seconds) == pytest.approx(end - BEGAN, abs=3.0)
    assert sum_.total.steps == len(truth.steps)


@settings(max_examples=100, deadline=None)
@given(drawn=lives_on_volumes, data=st.data())
def test_reports_that_are_lost_and_operators_that_restart_lose_no_second(
    drawn: list[tuple[Life, int]], data: st.DataObject
) -> None:
    all_told, truth, end = simulated(drawn)
    heard = [one for one in all_told[1:-1] if data.draw(st.booleans())]
    sum_: Sum | None = None
    for one in (all_told[0], *heard, all_told[-1]):
        sum_ = added(sum_, whole(one))
        assert is_whole(sum_)
        if data.draw(st.booleans()):
            assert resumed(sum_) == sum_
    assert sum_ is not None
    assert sum(sum_.total.seconds) == pytest.approx(end - BEGAN, abs=3.0)
    assert sum_.total.steps == len(truth.steps)


sane_told = st.builds(
    ReportedGoodput,
    id=st.integers(0, 12).map(volume),
    since=st.floats(0.0, 2e9),
    until=st.floats(0.0, 2e9),
    epoch=st.sampled_from([LIFE_1, LIFE_2]),
    step=st.integers(-1, 10**15 - 1),
    steps=st.integers(0, 10**15 - 1),
    productive_s=st.floats(0.0, 2e9),
    badput=st.builds(Badput, training_prep=st.floats(0.0, 2e9), wasted_progress=st.floats(0, 2e9)),
)


@settings(max_examples=200, deadline=None)
@given(all_told=st.lists(sane_told, max_size=20))
def test_whatever_a_pod_makes_up_every_second_is_in_one_bucket(
    all_told: list[ReportedGoodput],
) -> None:
    sum_: Sum | None = None
    for one in all_told:
        if is_sane(one, at=2e9):
            sum_ = added(sum_, whole(one))
            assert is_whole(sum_)
            assert resumed(sum_) == sum_


# --- one by one ----------------------------------------------------------------------------------


def a_life(
    *steps: int, epoch: EpochId = LIFE_1, parent: int | None = None, at: float = T0
) -> list[Event]:
    """A process begins at `at`, has restored ten seconds later, and then a step each ten."""
    before = None if parent is None else StepId(EpochId(epoch.number - 1, "0" * 8), parent)
    times = itertools.count(at + 20, 10)
    happened = [
        Event(sequence=1, kind=Kind.CAME, at=at, until=at, rank=0),
        Event(
            sequence=2, kind=Kind.RESTORED, at=at + 10, until=at + 10, rank=0, seconds=4.0,
            epoch=Epoch(epoch, before),
        ),
    ]  # fmt: skip
    for step, when in zip(steps, times, strict=False):
        happened.append(
            Event(sequence=3, kind=Kind.STAGED, at=when, until=when, step=StepId(epoch, step))
        )
    return happened


def tally(*events: Event, id: int = 0) -> ReportedGoodput:
    """As a sidecar tells it at the newest event."""
    found = Tally().after(events).goodput(events[-1].until)
    assert found is not None
    return ReportedGoodput.of(found, volume(id))


def summed(*all_told: ReportedGoodput) -> dict[str, int]:
    """What is not 0."""
    sum_: Sum | None = None
    for one in all_told:
        sum_ = added(sum_, whole(one))
    assert sum_ is not None
    return {bucket: seconds for bucket, seconds in by_bucket(sum_).items() if seconds}


FIRST = a_life(0, 1, 2, 3, 4)
"""Until T0 + 60: 6 s of preparation, a restore of 4, five steps of 10."""


def test_a_pod_on_a_new_volume_adds_to_what_was_and_the_time_between_is_badput() -> None:
    second = a_life(4, 5, epoch=LIFE_2, parent=3, at=T0 + 160)
    assert summed(tally(*FIRST), tally(*second, id=1)) == {
        "productive": 4 * 10 + 2 * 10,
        "training_prep": 12,
        "checkpoint_restore": 8,
        "wasted_progress": 10,
        "infrastructure_recovery": 100,
    }


def test_a_pod_that_comes_back_to_its_volume_goes_on_and_is_not_added_again() -> None:
    second = a_life(4, 5, epoch=LIFE_2, parent=3, at=T0 + 160)
    there, again = tally(*FIRST), tally(*FIRST, *second)
    assert summed(there, again, again) == summed(again)
    assert summed(again)["infrastructure_recovery"] == 100


def test_what_a_pod_had_done_after_its_last_report_is_reckoned_by_its_usual_step() -> None:
    """Its node was lost: steps 5 and 6 were committed, and nobody had told of them."""
    second = a_life(7, epoch=LIFE_2, parent=6, at=T0 + 160)
    found = summed(tally(*FIRST), tally(*second, id=1))
    assert found["productive"] == 5 * 10 + 2 * 10 + 10
    assert found["infrastructure_recovery"] == 100 - 2 * 10


def test_a_volume_that_waited_elsewhere_counts_no_second_twice() -> None:
    away = a_life(5, 6, 7, epoch=LIFE_2, parent=4, at=T0 + 100)
    back = a_life(8, epoch=EpochId(3, "00000003"), parent=7, at=T0 + 200)
    waiting = tally(*FIRST)
    found = summed(
        waiting,
        tally(*away, id=1),
        replace(waiting, until=T0 + 190),  # the new pod's sidecar has read the file
        tally(*FIRST, *back),
    )
    assert found == {
        "productive": 5 * 10 + 3 * 10 + 10,
        "training_prep": 18,
        "checkpoint_restore": 12,
        "infrastructure_recovery": 40 + 60,
    }


def test_a_history_whose_id_is_forgotten_gives_up_no_step_that_is_counted() -> None:
    """As when an older sidecar wrote the file in between, which knows no ids."""
    more = [*FIRST, *a_life(0, 1, 2, 3, 4, 5, 6)[-2:]]
    assert summed(tally(*FIRST), tally(*more, id=1)) == summed(tally(*more))


def test_whatever_is_no_count_is_left_out() -> None:
    good = tally(*FIRST)
    at = good.until
    bad: list[dict[str, Any]] = [
        {"id": ""}, {"id": "x" * 16}, {"id": "0" * 17}, {"step": -2}, {"step": 10**15},
        {"steps": -1}, {"steps": good.step + 2}, {"since": -1.0}, {"until": at + 7200},
        {"until": T0 - 1}, {"productive_s": -1.0}, {"productive_s": 1e6},
        {"badput": Badput(wasted_progress=-1.0)}, {"badput": Badput(training_prep=1e300)},
    ]  # fmt: skip
    for name in ("since", "until", "productive_s"):
        bad += [{name: math.nan}, {name: math.inf}]
    bad.append({"badput": Badput(checkpoint_save=math.nan)})
    assert is_sane(good, at=at)
    for change in bad:
        assert not is_sane(replace(good, **change), at=at), change
        goodput = RunGoodput()
        goodput.take(replace(good, **change), at=at)
        assert goodput.total is None


def test_a_status_that_nobody_can_have_counted_is_no_past() -> None:
    goodput = RunGoodput()
    goodput.take(tally(*FIRST), at=T0 + 60)
    status = goodput.status()
    assert status is not None
    (one,) = status.tallies
    changes: list[dict[str, Any]] = [
        {"since": "yesterday"}, {"productive_seconds": -5}, {"productive_seconds": 10**6},
        {"until": "2020-01-01T00:00:00Z"}, {"steps": 99},
        {"tallies": [msgspec.structs.replace(one, since="")]},
        {"tallies": [msgspec.structs.replace(one, id="")]},
    ]  # fmt: skip
    for change in changes:
        heir = RunGoodput()
        heir.resume(msgspec.structs.replace(status, **change))
        assert heir.total is None, change
    heir = RunGoodput()
    heir.resume(status)
    assert heir.status() == status


# --- in a run ------------------------------------------------------------------------------------


def telling(one: ReportedGoodput | None, sidecar: Sidecar) -> Report:
    return replace(sidecar.report(), goodput=one)


def stage() -> tuple[Play, Sidecar]:
    scene = Play(pod(0), pod(1))
    scene.find(run_object())
    scene.hear(pod(1), Sidecar(rank=1).staged(1).report())
    return scene, Sidecar(rank=0).staged(1)


def shown(scene: Play) -> GoodputStatus:
    found = scene.status.goodput
    assert found is not None
    return found


def test_the_status_shows_what_the_first_pod_counts() -> None:
    scene, sidecar = stage()
    scene.hear(pod(0), sidecar.report())  # an older sidecar tells of none
    scene.hear(pod(1), telling(tally(*FIRST, id=1), Sidecar(rank=1).staged(1)))
    assert scene.status.goodput is None
    scene.hear(pod(0), telling(tally(*FIRST), sidecar))
    body = as_json(scene.status)["goodput"]
    (one,) = body.pop("tallies")
    assert body == {
        "since": "2026-09-21T14:13:20Z",
        "until": "2026-09-21T14:14:20Z",
        "ratio": "0.833",
        "wallSeconds": 60,
        "productiveSeconds": 50,
        "badputSeconds": {"trainingPrep": 6, "checkpointRestore": 4},
        "step": 4,
        "steps": 5,
    }
    assert (one["id"], one["epoch"]) == (volume(0), str(LIFE_1))
    schema = schema_of(crds()["CheckpointRun"])["properties"]["status"]["properties"]["goodput"]
    jsonschema.validate(as_json(scene.status)["goodput"], closed(json_schema(schema)))
    before = shown(scene)
    scene.hear(pod(0), sidecar.report())  # one that tells only what changed
    assert shown(scene) == before


def test_a_figure_that_always_changes_is_shown_anew_once_a_minute() -> None:
    scene, sidecar = stage()
    seen = []
    for second in range(0, 630, 2):
        one = replace(tally(*FIRST), until=T0 + 60 + second)
        scene.hear(pod(0), telling(one, sidecar))
        scene.wait(2.0)
        seen.append(shown(scene))
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert 630 // SHOWN_S - 1 <= changes <= 630 // SHOWN_S
    last = shown(scene)
    scene.wait(SHOWN_S)
    assert shown(scene) != last, "what was told last is shown, too, when nobody reports any more"
    assert shown(scene).wall_seconds == 60 + 628


def test_an_operator_that_restarts_goes_on_from_the_status() -> None:
    scene, sidecar = stage()
    scene.hear(pod(0), telling(tally(*FIRST), sidecar))
    heir = Play(pod(0), pod(1))
    heir.find(run_object(scene.status))
    heir.hear(pod(1), Sidecar(rank=1).staged(1).report())
    assert heir.status.goodput == scene.status.goodput
    second = a_life(5, epoch=LIFE_2, parent=4, at=T0 + 160)
    successor = pod(0, life=2)
    heir.see(successor)
    new = Sidecar(rank=0, started_at=T0 + 150).staged(1)
    heir.hear(successor, telling(tally(*second, id=1), new))
    assert shown(heir).productive_seconds == 60
    assert shown(heir).wall_seconds == 180
    assert [one.id for one in shown(heir).tallies] == [volume(0), volume(1)]


def test_what_has_not_changed_is_not_told_again() -> None:
    first, second = (telling(tally(*FIRST), Sidecar(rank=0, sequence=of)) for of in (1, 2))
    assert changes(first, second).goodput is None
    assert changes(None, second).goodput == second.goodput
    grown = replace(second, goodput=tally(*FIRST, id=1))
    assert changes(first, grown).goodput == grown.goodput
    assert news(first) == news(grown) != news(replace(grown, ready=False))


def test_the_metrics_say_the_same_by_bucket() -> None:
    scene, sidecar = stage()
    registry = Metrics(scene.registry).registry
    of = {"namespace": KEY.namespace, "run": KEY.name}
    assert registry.get_sample_value("keepstep_run_goodput_ratio", of) is None
    scene.hear(pod(0), telling(tally(*FIRST), sidecar))
    assert registry.get_sample_value("keepstep_run_goodput_ratio", of) == pytest.approx(5 / 6)
    found = {
        bucket: registry.get_sample_value("keepstep_run_goodput_seconds", of | {"bucket": bucket})
        for bucket in BUCKETS
    }
    assert found["productive"] == 50.0
    assert sum(filter(None, found.values())) == 60.0


def test_a_report_with_goodput_is_read_as_it_was_written() -> None:
    report = telling(tally(*FIRST), Sidecar(rank=0))
    *_, last = iter_result(msgspec.json.encode(report))
    assert last.goodput == report.goodput
    cut = msgspec.to_builtins(report)
    for spoilt in ({"id": 5}, {"epoch": {"number": -1, "nonce": "x"}}, {"since": "now"}):
        body = cut | {"goodput": cut["goodput"] | spoilt}
        with pytest.raises(msgspec.ValidationError):
            list(iter_result(msgspec.json.encode(body)))


def iter_result(body: bytes) -> Iterator[Any]:
    yield (yield from read(body))


def test_goodput_alone_writes_no_status_each_time_that_it_is_told() -> None:
    async def scene(bench: Bench) -> None:
        for second in range(21):
            bench.sidecar.more = {"goodput": replace(tally(*FIRST), until=T0 + 60 + second)}
            bench.now = T0 + 60 + second
            bench.stage()
            if second == 0:
                await until(lambda: bench.cluster.objects.get(PATH, {}).get("status"))
            await asyncio.sleep(0.03)  # longer than the writer's period, so each could be written
        assert bench.writes() <= 2
        assert bench.cluster.objects[PATH]["status"]["goodput"]["wallSeconds"] == 60

    play(scene, period_s=0.02)


def test_no_more_tallies_are_remembered_than_a_status_may_have() -> None:
    sum_: Sum | None = None
    for number in range(3 * MOST_TALLIES):
        life = a_life(
            number + 1, epoch=EpochId(number + 1, "0" * 8), parent=number, at=T0 + 100 * number
        )
        sum_ = added(sum_, whole(tally(*life, id=number)))
    assert sum_ is not None
    assert len(sum_.known) == MOST_TALLIES
    assert by_bucket(sum_)["productive"] == 3 * MOST_TALLIES * 10
