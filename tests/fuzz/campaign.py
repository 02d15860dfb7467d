"""Runs mutations against the targets, and counts what must not happen.

Of each mutation: no exception that the parser does not name; where nothing was resealed, no other
bytes are accepted; at most a second of CPU, or half a second a megabyte if that is more; and, of a
sample that is measured apart (tracing makes everything slower), memory of at most 64 MiB or some
times the input.
"""

from __future__ import annotations

import hashlib
import pathlib
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from tests.fuzz import mutate
from tests.fuzz.targets import Target

LIMIT_S = 4.0
LIMIT_S_PER_BYTE = 4e-6
"""What is linear took 0.4 to 0.6 µs a byte on the slowest machine tried."""
FLOOR_BYTES = 64 << 20
_TRACED = 25
"""One in so many is measured, and every large one."""

_LARGE = 100_000


@dataclass
class Tally:
    """Of one target. Times in milliseconds of CPU, memory in MiB and as a multiple of the input
    (of inputs of more than 100 kB)."""

    mutations: int = 0
    resealed: int = 0
    accepted: int = 0
    refused: int = 0
    measured: int = 0
    escapes: int = 0
    other_bytes: int = 0
    too_slow: int = 0
    too_large: int = 0
    slowest_ms: float = 0.0
    most_mib: float = 0.0
    most_times: float = 0.0

    @property
    def bad(self) -> int:
        """What must be zero."""
        return self.escapes + self.other_bytes + self.too_slow + self.too_large

    def add(self, other: Tally) -> None:
        """Put two runs together: counts are added, of the rest the worst stays."""
        for key, value in asdict(other).items():
            mine = getattr(self, key)
            setattr(self, key, mine + value if isinstance(value, int) else max(mine, value))


@dataclass
class Campaign:
    """Mutations from one seed. `found`: what went wrong, with the input."""

    seed: int
    targets: Sequence[Target]
    tallies: dict[str, Tally] = field(default_factory=dict)
    found: list[tuple[Target, str, bytes]] = field(default_factory=list)

    def run(self, goes_on: Callable[[], bool], *, most: int | None = None) -> None:
        """Take the targets in turn while `goes_on()`; at most `most` mutations in all."""
        rng, done = random.Random(self.seed), 0
        while goes_on() and (most is None or done < most):
            for target in self.targets:
                self.try_input(target, rng)
                done += 1

    @property
    def mutations(self) -> int:
        """In all."""
        return sum(tally.mutations for tally in self.tallies.values())

    @property
    def bad(self) -> int:
        """What must be zero."""
        return sum(tally.bad for tally in self.tallies.values())

    def try_input(self, target: Target, rng: random.Random) -> None:
        """One mutation of one target."""
        tally = self.tallies.setdefault(target.name, Tally())
        resealed = target.reseal is not None and rng.random() < 0.8
        if resealed and target.reseal is not None:
            data = target.reseal(rng)
        else:
            data = mutate.of_bytes(rng.choice(target.bytewise), rng.choice(target.bytewise), rng)
        tally.mutations += 1
        tally.resealed += resealed
        began = time.thread_time()
        accepted = self._try(target, data, tally)
        took_s = time.thread_time() - began
        tally.slowest_ms = max(tally.slowest_ms, round(took_s * 1000, 1))
        if took_s > max(LIMIT_S, len(data) * LIMIT_S_PER_BYTE):
            self._note(target, f"took {took_s:.1f} s", data, tally, "too_slow")
        if accepted and target.sealed and not resealed and data not in target.bytewise:
            self._note(target, "accepted other bytes", data, tally, "other_bytes")
        if len(data) > _LARGE or tally.mutations % _TRACED == 0:
            self._measure(target, data, tally)

    def _try(self, target: Target, data: bytes, tally: Tally) -> bool:
        try:
            target.parse(data)
        except target.refusals:
            tally.refused += 1
            return False
        except Exception as error:
            self._note(target, f"{type(error).__name__}: {error!s:.200}", data, tally, "escapes")
            return False
        tally.accepted += 1
        return True

    def _measure(self, target: Target, data: bytes, tally: Tally) -> None:
        tracemalloc.start()
        try:
            target.parse(data)
        except Exception:  # was told of above
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        tally.measured += 1
        tally.most_mib = max(tally.most_mib, round(peak / (1 << 20), 1))
        if len(data) > _LARGE:
            tally.most_times = max(tally.most_times, round(peak / max(len(data), 1), 1))
        if peak > max(FLOOR_BYTES, target.times * len(data)):
            self._note(
                target, f"took {peak >> 20} MiB for {len(data)} bytes", data, tally, "too_large"
            )

    def _note(self, target: Target, what: str, data: bytes, tally: Tally, kind: str) -> None:
        setattr(tally, kind, getattr(tally, kind) + 1)
        self.found.append((target, what, data))


def save(target: Target, what: str, data: bytes, folder: pathlib.Path) -> pathlib.Path:
    """Put what went wrong into a file, cut to what is needed for it where that is found quickly."""
    error = what.partition(":")[0]
    if error.isidentifier():
        data = _smallest(target, error, data)
    name = "".join(char if char.isalnum() else "-" for char in target.name)
    path = folder / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:8]}.bin"
    path.write_bytes(data)
    return path


def escape_of(target: Target, data: bytes) -> str:
    """The name of the exception that escapes, '' for none."""
    try:
        target.parse(data)
    except target.refusals:
        return ""
    except Exception as error:
        return type(error).__name__
    return ""


def _smallest(target: Target, error: str, data: bytes) -> bytes:
    step, until = len(data) // 2, time.monotonic() + 10
    while step and time.monotonic() < until:
        for at in range(0, len(data), step):
            shorter = data[:at] + data[at + step :]
            if escape_of(target, shorter) == error:
                data = shorter
                break
        else:
            step //= 2
    return data
