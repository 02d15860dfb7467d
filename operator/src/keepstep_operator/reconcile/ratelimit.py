"""When something may be done again: status writes, events, log lines. Pure, time passed in."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

SETTLE_S = 0.2
"""Changes come in groups: reports of all pods of a run, after each step."""
LEAST_PERIOD_S = 2.0
WRITES_A_SECOND = 25.0
"""Over all runs; with more than fifty, each is written less often than every two seconds."""
SOON_AT_ONCE = 3.0
SOON_EVERY_S = 15.0
"""How often one key may go before those that can wait."""
_LONGEST_BACKOFF_S = 15.0


class Pacer(Generic[Key]):
    """Which keys are due for a write: soon after a change, never twice within the period, later
    and later while it fails."""

    def __init__(
        self,
        *,
        least_period_s: float = LEAST_PERIOD_S,
        writes_a_second: float = WRITES_A_SECOND,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._least_period_s = least_period_s
        self._writes_a_second = writes_a_second
        self._settle_s = settle_s
        self._due: dict[Key, float] = {}
        self._began: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._soon = Buckets[Key](burst=SOON_AT_ONCE, refill_s=SOON_EVERY_S)
        self._wanted: set[Key] = set()

    @property
    def period_s(self) -> float:
        """Between two writes of one key, now."""
        return max(self._least_period_s, len(self._began) / self._writes_a_second)

    def mark(self, key: Key, *, at: float, soon: bool = False) -> float:
        """It has changed; when it is due. What waits already keeps its turn. `soon`: it is not to
        wait until all others had theirs, as long as it seldom asks for that, and does not fail."""
        if key not in self._due:
            self._due[key] = self._turn(key, at, self.period_s)
        hurries = soon and key not in self._failures and key not in self._wanted
        if hurries and self._soon.take(key, at=at):
            self._wanted.add(key)
            self._due[key] = min(self._due[key], self._turn(key, at, self._least_period_s))
        return self._due[key]

    def _turn(self, key: Key, at: float, period_s: float) -> float:
        return max(at + self._settle_s, self._began.get(key, -period_s) + period_s)

    def take(self, *, at: float, most: int | None = None) -> list[Key]:
        """What is due, in order, what is wanted soon first; it counts as begun now. `most`: where
        that takes time, in which others may be wanted sooner."""
        keys = sorted(
            (key for key, when in self._due.items() if when <= at),
            key=lambda key: (key not in self._wanted, self._due[key]),
        )[:most]
        for key in keys:
            del self._due[key]
            self._wanted.discard(key)
            self._began[key] = at
        return keys

    def next_at(self) -> float | None:
        """When the next key is due; None: nothing waits."""
        return min(self._due.values(), default=None)

    def done(self, key: Key, *, rests: bool = False) -> None:
        """It was written, or needed no write. `rests`: it will hardly change again, so it takes no
        part of the writes that there are."""
        self._failures.pop(key, None)
        if rests:
            self._began.pop(key, None)

    def failed(self, key: Key, *, at: float) -> None:
        """It was not written: again, later."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(_LONGEST_BACKOFF_S, self._least_period_s * 2.0**failures)
        self._due[key] = at + pause_s

    def forget(self, key: Key) -> None:
        """It is gone."""
        self._wanted.discard(key)
        for known in (self._due, self._began, self._failures):
            known.pop(key, None)


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Buckets(Generic[Key]):
    """A bucket of tokens for each key: `burst` at once, then one each `refill_s`."""

    def __init__(self, *, burst: float, refill_s: float, remembered: int = 20_000) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._remembered = remembered
        self._buckets: dict[Key, _Bucket] = {}

    def left(self, key: Key, *, at: float, each_s: float | None = None) -> float:
        """Tokens that it has now. `each_s`: in place of `refill_s`."""
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, at)
        since_s = at - bucket.at
        bucket.tokens = min(self._burst, bucket.tokens + since_s / (each_s or self._refill_s))
        bucket.at = at
        self._buckets[key] = bucket  # the newest last, so that the oldest is forgotten first
        while len(self._buckets) > self._remembered:
            del self._buckets[next(iter(self._buckets))]
        return bucket.tokens

    def take(self, key: Key, *, at: float, each_s: float | None = None) -> bool:
        """One token, if there is one."""
        if self.left(key, at=at, each_s=each_s) < 1.0:
            return False
        self.spend(key, 1.0)
        return True

    def spend(self, key: Key, tokens: float) -> None:
        """What was used; it may be more than there was, and is paid for by waiting."""
        if (bucket := self._buckets.get(key)) is not None:
            bucket.tokens -= tokens

    def give_back(self, key: Key) -> None:
        """One that was taken for nothing."""
        self.spend(key, -1.0)


class Throttle:
    """Says the same thing at most once a period, and at most `burst` things a subject at once."""

    def __init__(
        self, *, burst: int = 20, refill_s: float = 30.0, remembered: int = 20_000
    ) -> None:
        self._remembered = remembered
        self._said: dict[Hashable, float] = {}
        self._buckets = Buckets[Hashable](burst=burst, refill_s=refill_s, remembered=remembered)

    def allows(self, subject: Hashable, thing: Hashable, *, period_s: float, at: float) -> bool:
        """Whether to say it; then it counts as said."""
        key = (subject, thing)
        if key in self._said and at - self._said[key] < max(period_s, 0.0):
            return False
        if not self._buckets.take(subject, at=at):
            return False
        self._said.pop(key, None)  # the newest last, so that the oldest is forgotten first
        self._said[key] = at
        while len(self._said) > self._remembered:
            del self._said[next(iter(self._said))]
        return True
