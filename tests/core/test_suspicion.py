"""Crash loops end: a step after whose restore the script failed twice is passed over for a proven
step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.commit_rule import StepLiveness, trace_lineage
from keepstep.core.restore_vote import Candidate, Candidates, choose_step
from keepstep.core.retention import Retention, steps_to_evict, steps_to_retire
from keepstep.core.suspicion import WITHIN, Failure, SuspectSteps
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer

LIVES = [EpochId(number, "0" * 8) for number in range(9)]


def step(number: int, life: int = 1) -> StepId:
    return StepId(LIVES[life], number)


def failure(at: int, life: int, *after: StepId) -> Failure:
    return Failure(at=step(at, life), after=after)


def vote(*held: StepId, failures: tuple[Failure, ...] = (), **fields: object) -> Candidates:
    found = tuple(Candidate(id=step_id, tier=Tier.LOCAL, world=1) for step_id in held)
    return Candidates(answer=TierAnswer.STEPS, candidates=found, failures=failures, **fields)  # type: ignore[arg-type]


HELD = tuple(step(number) for number in (60, 80, 99, 100))
TWICE = (failure(100, 2, step(100)), failure(101, 3, step(100)))


def test_a_step_with_two_failures_after_its_restore_is_replaced_by_the_newest_proven_step() -> None:
    assert choose_step([vote(*HELD, failures=TWICE[:1])]).id == step(100)
    decision = choose_step([vote(*HELD, failures=TWICE)])
    assert (decision.id, decision.suspects) == (step(80), (step(99), step(100)))


def test_failures_after_little_progress_count_as_a_crash_loop_and_after_much_progress_do_not() -> (
    None
):
    creeping = (failure(103, 2, step(100)), failure(105, 3, step(103, 2), step(100)))
    held = (*HELD, step(103, 2), step(105, 3))
    assert choose_step([vote(*held, failures=creeping)]).id == step(80)
    far = (failure(115, 2, step(100)), failure(130, 3, step(115, 2)))
    assert choose_step([vote(*HELD, step(130, 3), failures=far)]).id == step(130, 3)


def test_two_errors_in_one_epoch_count_as_one_failure() -> None:
    failures = (failure(100, 2, step(100)), failure(104, 2, step(100)))
    assert choose_step([vote(*HELD, failures=failures)]).id == step(100)


def test_failures_are_ignored_once_the_run_has_progressed_far_beyond_them() -> None:
    beyond = step(101 + WITHIN, 4)
    assert choose_step([vote(*HELD, beyond, failures=TWICE)]).id == beyond


def test_failures_that_different_machines_reported_are_added_up() -> None:
    ballot, other = (vote(*HELD, failures=(each,)) for each in TWICE)
    both = [ballot, other]
    assert SuspectSteps.from_failures([*ballot.failures, *other.failures], HELD).since == step(100)
    assert choose_step([_of_two(each) for each in both]).id == step(80)


def _of_two(vote: Candidates) -> Candidates:
    found = tuple(
        Candidate(id=candidate.id, tier=candidate.tier, world=2) for candidate in vote.candidates
    )
    return Candidates(answer=vote.answer, candidates=found, failures=vote.failures)


def test_a_run_without_a_proven_step_falls_back_to_its_oldest_step_and_not_to_step_0() -> None:
    held, failures = (
        [step(number) for number in (3, 4, 5)],
        (failure(5, 2, step(5)), failure(5, 3, step(5))),
    )
    assert choose_step([vote(*held, failures=failures)]).id == step(3)
    assert choose_step([vote(held[-1], failures=failures)]).id == step(5), "there is no other"


def test_a_step_that_the_user_requests_or_trusts_is_restored_although_it_is_suspect() -> None:
    asked = choose_step([vote(*HELD, failures=TWICE)], limit=step(100), exact=True)
    assert asked.id == step(100)
    assert choose_step([vote(*HELD, failures=TWICE, trusted=(step(99),))]).id == step(99)
    beyond = step(101, 3)
    assert choose_step([vote(*HELD, beyond, failures=TWICE)]).id == step(80)
    pinned = choose_step([vote(*HELD, beyond, failures=TWICE, trusted=(step(100),))])
    assert pinned.id == beyond, "whoever trusts a step trusts what came of it"


def test_a_failure_makes_all_recently_restored_ancestor_steps_suspect() -> None:
    parents = {LIVES[2]: step(90), LIVES[3]: step(100, 2), LIVES[4]: step(104, 3)}
    found = Failure.from_failed_step(step(110, 4), parents.get, lambda step_id: True)
    assert found.after == (step(104, 3), step(100, 2), step(90))
    assert (
        Failure.from_failed_step(step(111, 4), parents.get, lambda step_id: True).after
        == found.after[:2]
    )
    assert Failure.from_failed_step(
        step(110, 4), parents.get, lambda step_id: step_id.step < 100
    ).after == (step(90),)
    assert Failure.from_failed_step(step(3), parents.get, lambda step_id: True).after == ()


@pytest.mark.parametrize("last", [1, 2])
def test_a_proven_step_is_never_retired_and_is_evicted_last_from_a_full_volume(last: int) -> None:
    policy, there, left = Retention(last=last), set[StepId](), set[StepId]()
    for number in range(1, 200):
        left = {*there, step(number)}
        there = left - set(steps_to_retire(left, policy))
        assert len(there) <= last + 2
        if number >= 4 * WITHIN:
            assert any(
                number - 4 * WITHIN < step_id.step <= number - 2 * WITHIN for step_id in there
            )
    sizes = dict.fromkeys(there, 1)
    gone = steps_to_evict(sizes, policy, limit_bytes=0)
    assert max(there) not in gone
    assert SuspectSteps.from_failures((), there).is_proven(gone[-1])


# --- whole runs ----------------------------------------------------------------------------------


@dataclass
class Run:
    """A run on one machine: its lives, the steps that are held, and the failures."""

    every: int
    keep: Retention
    epochs: list[Epoch] = field(default_factory=list)
    memory: list[StepId] = field(default_factory=list)
    local: set[StepId] = field(default_factory=set)
    failed: list[StepId] = field(default_factory=list)

    def begin(self) -> StepId | None:
        """Begin a life from the step that the ranks vote for. Returns that step."""
        lineage = trace_lineage({epoch.id: epoch for epoch in self.epochs})

        def alive(step_id: StepId) -> bool:
            return lineage.step_liveness(step_id) is StepLiveness.LIVE

        parents = {epoch.id: epoch.parent for epoch in self.epochs}
        held = sorted(filter(alive, {*self.memory, *self.local})) if self.epochs else []
        failures = tuple(Failure.from_failed_step(at, parents.get, alive) for at in self.failed)
        found = choose_step([vote(*held, failures=failures)]).id if held else None
        self.epochs.append(Epoch(EpochId(len(self.epochs) + 1, "0" * 8), found))
        self.memory = [step_id for step_id in self.memory if found is not None and step_id <= found]
        self.local = {step_id for step_id in self.local if found is not None and step_id <= found}
        return found

    def save(self, number: int) -> StepId:
        step_id = StepId(self.epochs[-1].id, number)
        self.memory = [*self.memory, step_id][-3:]
        if not number % self.every:
            self.local.add(step_id)
            self.local -= set(steps_to_retire(self.local, self.keep))
        return step_id


@settings(max_examples=300)
@given(
    poisoned_at=st.integers(5 * WITHIN, 10 * WITHIN),
    noticed_after=st.integers(0, 9),
    lasts=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    killed=st.lists(st.booleans(), max_size=4),
    every=st.integers(1, 10),
    last=st.integers(1, 3),
)
def test_a_poisoned_step_is_avoided_after_two_failures_and_signals_do_not_count_as_failures(
    *,
    poisoned_at: int,
    noticed_after: int,
    lasts: list[int],
    killed: list[bool],
    every: int,
    last: int,
) -> None:
    """From some step on the state is bad, and every life that goes on from there fails a few steps
    later. Signals end some of these lives before."""
    run = Run(every, Retention(last=last))
    run.begin()
    for number in range(poisoned_at + noticed_after + 1):
        run.save(number)
    first = StepId(run.epochs[-1].id, poisoned_at + noticed_after)
    run.failed.append(first)
    own = list(lasts)
    signals = list(killed)
    for _ in range(len(own) + len(signals)):
        if not own:
            break
        parent = run.begin()
        assert parent is not None
        assert parent.step >= poisoned_at, "one failure is no reason to lose steps"
        if signals and signals.pop():
            continue  # the signal came before the first step
        at = parent.step
        for _ in range(own.pop()):
            at = run.save(at + 1).step
        run.failed.append(StepId(run.epochs[-1].id, at))
    if own:
        return
    found = run.begin()
    assert found is not None
    assert found.step < poisoned_at, "two lives failed after a restore: no third one does"
    assert found.step >= first.step - 5 * WITHIN
