"""When something may be done again: status writes, events, log lines. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

SETTLE_S = 0.2
"""How long to wait after a change: changes come in groups, like the reports of all pods of a run
after each step."""
LEAST_PERIOD_S = 2.0
WRITES_A_SECOND = 25.0
"""For all runs together. With more than fifty runs, each is written less often than every two
seconds."""
SOON_AT_ONCE = 3.0
SOON_EVERY_S = 15.0
"""How often one key may be written ahead of others: three times at once, then every 15 s."""
_LONGEST_BACKOFF_S = 15.0


class Pacer(Generic[Key]):
    """Which keys are due for a write: soon after a change, never twice within the period, and after
    longer and longer pauses while writes fail."""

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
        """The present time between two writes of one key."""
        return max(self._least_period_s, len(self._began) / self._writes_a_second)

    def mark(self, key: Key, *, at: float, soon: bool = False) -> float:
        """The key has changed. Returns when its write is due; a key that already waits keeps its
        turn. `soon`: it need not wait until all others had their turn, as long as it seldom asks
        for this and its writes do not fail."""
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
        """The keys that are due, those wanted soon first. They count as begun now. `most`: take at
        most so many, if writing takes time in which others may become wanted sooner."""
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
        """When the next key is due; None if none waits."""
        return min(self._due.values(), default=None)

    def done(self, key: Key, *, rests: bool = False) -> None:
        """The key was written, or needed no write. `rests`: it will hardly change again, so it no
        longer counts in the period of the others."""
        self._failures.pop(key, None)
        if rests:
            self._began.pop(key, None)

    def failed(self, key: Key, *, at: float) -> None:
        """The write failed: try again later."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(_LONGEST_BACKOFF_S, self._least_period_s * 2.0**failures)
        self._due[key] = at + pause_s

    def forget(self, key: Key) -> None:
        """The key is gone."""
        self._wanted.discard(key)
        for known in (self._due, self._began, self._failures):
            known.pop(key, None)


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Buckets(Generic[Key]):
    """A token bucket for each key: `burst` tokens at once, then one each `refill_s`."""

    def __init__(self, *, burst: float, refill_s: float, remembered: int = 20_000) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._remembered = remembered
        self._buckets: dict[Key, _Bucket] = {}

    def left(self, key: Key, *, at: float, each_s: float | None = None) -> float:
        """The tokens that the key has now. `each_s`: replaces `refill_s`."""
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, at)
        since_s = at - bucket.at
        bucket.tokens = min(self._burst, bucket.tokens + since_s / (each_s or self._refill_s))
        bucket.at = at
        self._buckets[key] = bucket  # to the end: the oldest is forgotten first
        while len(self._buckets) > self._remembered:
            del self._buckets[next(iter(self._buckets))]
        return bucket.tokens

    def take(self, key: Key, *, at: float, each_s: float | None = None) -> bool:
        """Take one token. Returns whether there was one."""
        if self.left(key, at=at, each_s=each_s) < 1.0:
            return False
        self.spend(key, 1.0)
        return True

    def spend(self, key: Key, tokens: float) -> None:
        """Take tokens away. They may be more than there are; then the key waits until the debt is
        paid."""
        if (bucket := self._buckets.get(key)) is not None:
            bucket.tokens -= tokens

    def give_back(self, key: Key) -> None:
        """Return a token that was taken needlessly."""
        self.spend(key, -1.0)


class Throttle:
    """Allows each thing at most once per period, and at most `burst` things per subject at once."""

    def __init__(
        self, *, burst: int = 20, refill_s: float = 30.0, remembered: int = 20_000
    ) -> None:
        self._remembered = remembered
        self._said: dict[Hashable, float] = {}
        self._buckets = Buckets[Hashable](burst=burst, refill_s=refill_s, remembered=remembered)

    def allows(self, subject: Hashable, thing: Hashable, *, period_s: float, at: float) -> bool:
        """Whether to say this thing now. If so, it counts as said."""
        key = (subject, thing)
        if key in self._said and at - self._said[key] < max(period_s, 0.0):
            return False
        if not self._buckets.take(subject, at=at):
            return False
        self._said.pop(key, None)  # to the end: the oldest is forgotten first
        self._said[key] = at
        while len(self._said) > self._remembered:
            del self._said[next(iter(self._said))]
        return True
