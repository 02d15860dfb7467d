"""What a policy keeps. Every policy keeps the newest committed step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import retention
from keepstep.core.retention import (
    RULES,
    Retention,
    copies_to_drop,
    droppable_steps,
    filter_allowed_deletions,
    hopeless_steps,
    steps_to_evict,
    steps_to_retire,
    superseded_copies,
    unneeded_steps,
)
from keepstep.steps import EpochId, StepId


def _ids(*steps: int) -> list[StepId]:
    return [StepId(EpochId(1, "0" * 8), step) for step in steps]


def _steps(ids: tuple[StepId, ...]) -> list[int]:
    return [step_id.step for step_id in ids]


@given(
    steps=st.sets(st.integers(0, 500), min_size=1),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
)
def test_the_newest_step_is_never_retired_and_no_step_is_retired_twice(
    steps: set[int], last: int, every: int | None
) -> None:
    policy = Retention(last=last, every_steps=every)
    committed = _ids(*steps)
    gone = steps_to_retire(committed, policy)
    left = set(committed) - set(gone)
    assert max(committed) in left
    assert len(left) >= min(last, len(committed))
    assert steps_to_retire(left, policy) == ()


_HELD = st.dictionaries(st.integers(0, 60), st.integers(0, 100), min_size=1)
"""Step -> its size, or the seconds since the previous step."""

_POLICIES = st.builds(
    lambda last, every, every_s, pins: Retention(
        last=last, every_steps=every, every_s=every_s, pinned=frozenset(_ids(*pins))
    ),
    st.integers(1, 5),
    st.none() | st.integers(1, 20),
    st.none() | st.floats(1.0, 200.0),
    st.sets(st.integers(0, 60), max_size=4),
)


def _times(held: dict[int, int]) -> dict[StepId, float]:
    """When each step was written: later steps later."""
    seconds, times = 0.0, {}
    for step, gap in sorted(held.items()):
        seconds += gap
        times[_ids(step)[0]] = seconds
    return times


@given(held=_HELD, policy=_POLICIES)
def test_the_newest_step_pinned_steps_and_one_step_per_interval_are_never_retired(
    held: dict[int, int], policy: Retention
) -> None:
    times = _times(held)
    gone = set(steps_to_retire(times, policy, written_at=times))
    left = set(times) - gone
    assert not gone & policy.pinned
    assert max(times) in left
    if policy.every_s is not None:
        spans = {int(at // policy.every_s) for at in times.values()}
        assert {int(times[step_id] // policy.every_s) for step_id in left} == spans
    assert steps_to_retire(left, policy, written_at=times) == (), "what is kept once is kept"


@given(held=_HELD, policy=_POLICIES, newer=st.integers(61, 99), gap=st.integers(0, 500))
def test_a_retired_step_stays_retired_when_a_newer_step_is_added(
    held: dict[int, int], policy: Retention, newer: int, gap: int
) -> None:
    before, after = _times(held), _times({**held, newer: gap})
    gone = set(steps_to_retire(before, policy, written_at=before))
    assert gone <= set(steps_to_retire(after, policy, written_at=after))


@given(
    held=_HELD,
    policy=_POLICIES,
    limits=st.tuples(st.integers(-10, 900), st.integers(-10, 900)),
    torn=st.sets(st.integers(0, 60), max_size=6),
)
def test_eviction_frees_no_more_than_needed_and_never_the_newest_or_a_pinned_step(
    held: dict[int, int], policy: Retention, limits: tuple[int, int], torn: set[int]
) -> None:
    sizes, low, high = {_ids(step)[0]: size for step, size in held.items()}, *sorted(limits)
    unfinished = set(_ids(*torn))
    gone = steps_to_evict(sizes, policy, limit_bytes=low, unfinished=unfinished)
    left = {step_id: size for step_id, size in sizes.items() if step_id not in gone}
    whole = sizes.keys() - unfinished
    kept = policy.pinned | ({max(whole)} if whole else set())
    assert not kept.intersection(gone)
    assert len(set(gone)) == len(gone)
    assert sum(left.values()) <= low or set(left) <= kept
    if gone:
        assert sum(left.values()) + sizes[gone[-1]] > low, "the last of them had to go, too"
    if set(gone) - unfinished:
        assert not (left.keys() & unfinished) - kept, "what nobody can restore goes first"
    assert steps_to_evict(left, policy, limit_bytes=low, unfinished=unfinished) == ()
    fewer = steps_to_evict(sizes, policy, limit_bytes=high, unfinished=unfinished)
    assert gone[: len(fewer)] == fewer, "a wider limit evicts the same steps, but not as many"


def test_eviction_deletes_oldest_steps_first_and_steps_that_the_policy_keeps_last() -> None:
    sizes = dict.fromkeys(_ids(10, 15, 20, 25, 30, 31, 32), 10)
    policy = Retention(last=2, every_steps=10, pinned=frozenset(_ids(15)))
    assert _steps(steps_to_evict(sizes, policy, limit_bytes=70)) == []
    assert _steps(steps_to_evict(sizes, policy, limit_bytes=60)) == [25]
    assert _steps(steps_to_evict(sizes, policy, limit_bytes=41)) == [25, 10, 20]
    assert _steps(steps_to_evict(sizes, policy, limit_bytes=0)) == [25, 10, 20, 30, 31]
    torn = steps_to_evict(sizes, policy, limit_bytes=50, unfinished=_ids(31))
    assert _steps(torn) == [31, 25]


def test_every_k_steps_are_kept_beside_the_last() -> None:
    policy = Retention(last=2, every_steps=10)
    assert _steps(steps_to_retire(_ids(10, 15, 20, 21, 22), policy)) == [15]


def test_the_last_commit_and_the_newest_two_steps_are_kept_without_a_leader() -> None:
    (commit,) = _ids(20)
    assert droppable_steps(_ids(10, 20, 30, 40, 50), last_commit=commit) == _ids(30)
    assert droppable_steps(_ids(30, 40, 50), last_commit=None) == _ids(30)


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the last"):
        Retention(last=0)


def test_a_full_volume_also_drops_unpinned_steps_older_than_the_last_commit() -> None:
    held = _ids(10, 15, 20, 30, 40, 50)
    (commit,) = _ids(20)
    assert droppable_steps(held, last_commit=commit, pinned=_ids(15), full=True) == _ids(10, 30)


@given(steps=st.sets(st.integers(0, 100)), commit=st.none() | st.integers(0, 100))
def test_the_last_commit_and_the_newest_two_steps_are_kept_on_a_full_volume(
    steps: set[int], commit: int | None
) -> None:
    held = _ids(*sorted(steps))
    last_commit = None if commit is None else _ids(commit)[0]
    left = set(held) - set(droppable_steps(held, last_commit=last_commit, full=True))
    assert {step_id for step_id in held if step_id == last_commit} <= left
    later = [step_id for step_id in held if last_commit is None or step_id > last_commit]
    assert set(later[-2:]) <= left


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_s": 0.0}, {"every_s": -1.0}])
def test_a_retention_interval_of_zero_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Retention(**wrong)


# --- the table ---------------------------------------------------------------------------------

_DOCS = Path(__file__).parents[2] / "docs" / "protocol.md"

Named = Callable[[Collection[StepId], StepId, frozenset[StepId]], Iterable[StepId]]


def _last(pins: frozenset[StepId]) -> Retention:
    return Retention(last=1, pinned=pins)


_CALLS: dict[str, Named] = {
    "steps_to_retire": lambda held, commit, pins: steps_to_retire(held, _last(pins)),
    "unneeded_steps": lambda held, commit, pins: unneeded_steps(
        held, _last(pins), dead=set(held) - {commit}, unfinished=set(held) - {commit}
    ),
    "filter_allowed_deletions": lambda held, commit, pins: filter_allowed_deletions(
        held, last_commit=commit, pinned=pins
    ),
    "droppable_steps": lambda held, commit, pins: droppable_steps(
        held, last_commit=commit, pinned=pins, full=True
    ),
    "steps_to_evict": lambda held, commit, pins: steps_to_evict(
        dict.fromkeys(held, 1), _last(pins), limit_bytes=0
    ),
    "superseded_copies": lambda held, commit, pins: (
        step_id for step_id, _ in superseded_copies({0: held}, {0: [commit]}, committed=commit)
    ),
    "copies_to_drop": lambda held, commit, pins: (
        step_id for step_id, _ in copies_to_drop({0: held}, {0: commit})
    ),
}
"""Each rule that may meet the newest commit, asked to delete as much as it can."""


def test_the_table_of_deletion_rules_is_complete_and_matches_the_documentation() -> None:
    by = [rule.by for rule in RULES]
    assert all(callable(getattr(retention, name)) for name in by)
    assert {*_CALLS, "hopeless_steps"} == set(by)
    page = _DOCS.read_text()
    for rule in RULES:
        assert f"| `{rule.by}` | {rule.where} | {rule.when} | {rule.goes} |\n" in page


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.by in _CALLS])
@given(steps=st.sets(st.integers(0, 200), min_size=1), pins=st.sets(st.integers(0, 200)))
def test_no_deletion_rule_selects_the_newest_commit_or_a_pinned_step(
    rule: retention.DeletionRule, steps: set[int], pins: set[int]
) -> None:
    held, kept = _ids(*steps), frozenset(_ids(*pins))
    gone = set(_CALLS[rule.by](held, max(held), kept))
    assert gone <= set(held)
    assert max(held) not in gone
    assert rule.where == "peer" or not gone & kept


def test_the_newest_four_of_the_steps_that_can_never_be_completed_are_kept() -> None:
    assert hopeless_steps(_ids(1, 2, 3, 4, 5, 6)) == _ids(1, 2)
    assert hopeless_steps(_ids(1, 2, 3, 4)) == []
