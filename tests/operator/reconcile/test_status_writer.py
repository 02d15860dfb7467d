"""Writes to the API server: coalesced, bounded, made good after failures."""

from __future__ import annotations

import itertools

from keepstep_operator.reconcile.ratelimit import Buckets, Pacer, Throttle
from tests.operator.reconcile.samples import T0


def test_changes_within_the_period_are_one_write() -> None:
    pacer: Pacer[str] = Pacer()
    written = []
    for tenth in range(100):
        at = T0 + tenth / 10
        pacer.mark("run", at=at)
        written += [at - T0 for _ in pacer.take(at=at)]
    assert len(written) == 5
    assert written[0] <= 0.3, "the first is written at once"
    assert all(b - a >= 2.0 for a, b in itertools.pairwise(written))


def test_many_runs_are_written_less_often_each() -> None:
    pacer: Pacer[int] = Pacer()
    writes = 0
    for tenth in range(600):
        at = T0 + tenth / 10
        for run in range(200):
            pacer.mark(run, at=at)
        writes += len(pacer.take(at=at))
    assert 1000 <= writes <= 60 * 25 + 400


def test_what_is_to_be_seen_soon_waits_for_no_others() -> None:
    pacer: Pacer[int] = Pacer()
    written: dict[int, list[float]] = {run: [] for run in range(200)}
    for tenth in range(600):
        at = T0 + tenth / 10
        for run in written:
            pacer.mark(run, at=at)
        if tenth >= 300:
            pacer.mark(0, at=at, soon=True)  # it asks for that always
        if tenth == 300:
            pacer.mark(1, at=at, soon=True)
        for run in pacer.take(at=at):
            written[run].append(at - T0)
    assert next(at for at in written[1] if at > 30) <= 32.5
    greedy, others = len(written[0]), [len(written[run]) for run in range(2, 200)]
    assert max(others) <= 9
    assert min(others) >= 7
    assert max(others) < greedy <= max(others) + 5


def test_what_fails_is_not_tried_sooner_for_being_wanted_soon() -> None:
    pacer: Pacer[str] = Pacer()
    pacer.mark("run", at=T0)
    assert pacer.take(at=T0 + 1) == ["run"]
    pacer.failed("run", at=T0 + 1)
    due = pacer.next_at()
    pacer.mark("run", at=T0 + 1, soon=True)
    assert pacer.next_at() == due


def test_a_bucket_gives_what_is_in_it_and_fills_again() -> None:
    buckets = Buckets[str](burst=2, refill_s=10.0)
    assert [buckets.take("a", at=T0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", at=T0)
    assert buckets.take("a", at=T0 + 10)
    buckets.spend("a", 3.0)
    assert not buckets.take("a", at=T0 + 30)
    assert buckets.take("a", at=T0 + 50)


def test_a_failed_write_is_tried_again_later_and_later() -> None:
    pacer: Pacer[str] = Pacer()
    at, pauses = T0, []
    pacer.mark("run", at=at)
    for _ in range(8):
        due = pacer.next_at()
        assert due is not None
        assert pacer.take(at=due) == ["run"]
        pauses.append(due - at)
        at = due
        pacer.failed("run", at=at)
    assert pauses[1:] == [4.0, 8.0, *[15.0] * 5]
    pacer.forget("run")
    assert pacer.next_at() is None


def test_the_same_is_said_once_a_period_and_not_everything_at_once() -> None:
    throttle = Throttle(burst=3, refill_s=10.0)
    assert throttle.allows("run", "a", period_s=60, at=0)
    assert not throttle.allows("run", "a", period_s=60, at=59)
    assert throttle.allows("run", "a", period_s=60, at=60)
    assert [throttle.allows("run", i, period_s=60, at=61) for i in range(4)] == [True] * 2 + [
        False
    ] * 2
    assert throttle.allows("another", 0, period_s=60, at=61)
    assert throttle.allows("run", 3, period_s=60, at=72)
