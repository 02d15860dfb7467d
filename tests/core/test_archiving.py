"""Which steps are sent to the archive; it may have been away for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.archiving import missing, newest_wanted
from keepstep.retention import Retention, retired
from keepstep.steps import EpochId, StepId


def _ids(*steps: int) -> list[StepId]:
    return [StepId(EpochId(1, "0" * 8), step) for step in steps]


def _steps(ids: tuple[StepId, ...]) -> list[int]:
    return [id.step for id in ids]


def test_only_steps_of_the_grid_are_sent_the_oldest_first() -> None:
    committed = _ids(900, 1000, 1500, 2000, 2100)
    policy = Retention(last=3)
    assert _steps(missing(committed, (), every=1000, retention=policy)) == [1000, 2000]
    assert _steps(missing(committed, _ids(1000), every=1000, retention=policy)) == [2000]


def test_after_a_long_outage_nothing_is_sent_that_would_be_deleted_again() -> None:
    committed = _ids(*range(10, 110, 10))
    policy = Retention(last=2, every_steps=50)
    assert _steps(missing(committed, _ids(5), every=10, retention=policy)) == [50, 90, 100]


def test_a_pinned_step_is_sent_although_it_lies_off_the_grid() -> None:
    policy = Retention(last=1, pinned=frozenset(_ids(17)))
    assert _steps(missing(_ids(17, 18, 20, 30), (), every=10, retention=policy)) == [17, 30]


def test_who_closes_waits_for_the_newest_step_of_the_grid() -> None:
    policy = Retention(last=1)
    assert newest_wanted(_ids(10, 20, 25), every=10, retention=policy) == _ids(20)[0]
    assert newest_wanted(_ids(5), every=10, retention=policy) is None


@given(
    committed=st.sets(st.integers(0, 100)),
    archived=st.sets(st.integers(0, 100)),
    every=st.integers(1, 12),
    last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 40),
)
def test_catching_up_one_step_at_a_time_ends_and_sends_nothing_twice(
    committed: set[int], archived: set[int], every: int, last: int, every_steps: int | None
) -> None:
    policy = Retention(last=last, every_steps=every_steps)
    there, sent = set(_ids(*archived)), []
    while todo := missing(_ids(*committed), there, every=every, retention=policy):
        assert list(todo) == sorted(set(todo) - there)
        assert len(sent) <= len(committed), "it never ends"
        there.add(todo[0])
        sent.append(todo[0])
        gone = set(retired(there, policy))
        assert todo[0] not in gone or any(id > todo[0] for id in there)
        there -= gone
    assert len(set(sent)) == len(sent)
    newest = newest_wanted(_ids(*committed), every=every, retention=policy)
    assert newest is None or newest in there or newest in retired({*there, newest}, policy)
