"""Goodput of a run over pods: what sidecars tell, added up, beside a simulation that knows where
each second went."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.core.history import Badput, Event, Kind, Tally
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.reports import Report, ReportedGoodput
from keepstep_operator.api.run import GoodputStatus, RunStatus, as_json, read_status
from keepstep_operator.reconcile.state.goodput import (
    BUCKETS,
    MOST_TALLIES,
    RunGoodput,
    Sum,
    added,
    is_sane,
    whole,
)
from tests.chart.charts import crds, schema_of
from tests.chart.schemas import closed, json_schema
from tests.core.test_goodput import Life, Truth, simulate
from tests.operator.reconcile.samples import T0, Play, Sidecar, pod, run_object

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


FIRST = a_life(0, 1, 2, 3, 4)
"""Until T0 + 60: 6 s of preparation, a restore of 4, five steps of 10."""


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
