"""Due steps are a pure function of the step, and ranks that disagree on k still meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.schedule import (
    NodeMeasurements,
    StepGrid,
    choose_persist_interval,
    daly_interval_s,
    is_stand_in,
)

_CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=12)


@given(base=st.integers(1, 7), changes=_CHANGES)
def test_a_node_that_missed_the_last_interval_change_still_shares_steps_with_the_others(
    base: int, changes: list[tuple[bool, int]]
) -> None:
    grid, now = StepGrid(base), 0
    for coarser, steps in changes:
        now += steps
        known = grid
        grid = known.coarsen(now) if coarser else known.refine(now)
        window = range(now, now + 400 * base)
        due, still_due = ({s for s in window if grid.due(s)} for grid in (grid, known))
        assert due <= still_due or still_due <= due
        before = [s for s in range(max(0, now - 50), now + 1) if grid.due(s) != known.due(s)]
        assert not before, "a change holds for later steps only"


@given(base=st.integers(1, 7), after=st.integers(0, 1000))
def test_coarsening_doubles_the_interval_and_refining_restores_it(base: int, after: int) -> None:
    coarse = StepGrid(base).coarsen(after)
    far = after + 10 * base
    assert coarse.interval(far) == 2 * base
    assert coarse.refine(far).interval(far + 10 * base) == base
    assert StepGrid(base).refine(after) == StepGrid(base)


@pytest.mark.parametrize(
    ("base", "changes"), [(0, ()), (1, ((5, 1), (5, 2))), (1, ((5, -1),)), (1, ((5, 21),))]
)
def test_an_invalid_step_grid_is_refused(base: int, changes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        StepGrid(base, changes)


def test_young_and_daly_agree_when_a_checkpoint_is_cheap() -> None:
    assert daly_interval_s(2.0, 3600.0) == pytest.approx(120.0, rel=0.02)  # sqrt(2 C M), Young's
    assert daly_interval_s(7200.0, 3600.0) == 3600.0, (
        "beyond 2 M it is the mean time between failures"
    )


@pytest.mark.parametrize(
    ("measured", "limit", "steps"),
    [
        (NodeMeasurements(step_s=1.0, write_s=0.5, image_bytes=1), "step", 1),
        (NodeMeasurements(step_s=1.0, write_s=2.5, image_bytes=1), "write", 4),
        (NodeMeasurements(step_s=1.0, write_s=0.5, image_bytes=1, stall_s=0.06), "stall", 8),
        (
            NodeMeasurements(step_s=1.0, write_s=0.5, image_bytes=1, stall_s=0.02, mtbf_s=10000.0),
            "failures",
            16,
        ),
        (
            NodeMeasurements(
                step_s=1.0,
                write_s=0.5,
                image_bytes=10**9,
                drive_bytes=10**12,
                drive_writes_per_day=1.0,
            ),
            "wear",
            128,
        ),
    ],
)
def test_the_interval_is_the_least_that_every_limit_allows(
    measured: NodeMeasurements, limit: str, steps: int
) -> None:
    interval = choose_persist_interval(measured)
    assert (interval.limit, interval.steps) == (limit, steps)
    assert interval.steps * measured.step_s >= max(interval.bounds.values())


def test_milestone_steps_are_due_at_every_interval() -> None:
    plain, with_milestones = StepGrid(1), StepGrid(1, milestones=frozenset({1000}))
    for after in range(7):
        plain, with_milestones = plain.coarsen(after), with_milestones.coarsen(after)
    plain, with_milestones = plain.refine(8192), with_milestones.refine(8192)
    steps = range(1, 20_001)
    more = {step for step in steps if with_milestones.due(step) and not plain.due(step)}
    assert more == {step for step in range(1000, 20_001, 1000) if step % 128}
    assert more < {step for step in steps if with_milestones.due(step)}


@pytest.mark.parametrize(
    ("commits", "archived"),
    [
        ((8, 9, 10, 11, 12), [10]),
        ((8, 9, 11, 12, 13), [11]),
        ((8, 27, 28), [27]),  # one step stands in for all due steps that were left out
        ((8, 9, 19, 20, 21), [19, 20]),
        ((10, 11, 20), [10, 20]),
        ((13, 14, 15), []),  # it is not known what came before 13
    ],
)
def test_the_first_commit_after_a_due_step_that_was_never_committed_replaces_it(
    commits: tuple[int, ...], archived: list[int]
) -> None:
    found = []
    for at, step in enumerate(commits):
        known = commits[: at + 1]
        before = commits[at - 1] if at else step
        if step % 10 == 0 or is_stand_in(step, before=before, commits=known, every=10):
            found.append(step)
    assert found == archived
