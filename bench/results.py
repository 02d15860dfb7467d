"""Samples of all rounds, and the figures computed from them: medians, spread, the bars."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Sample:
    """The figures of one process for one subject and size in one round, or why it has none."""

    subject: str
    size_bytes: int
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    missing: str = ""
    seconds: float = 0.0
    huge_pages: bool = False


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one figure over the rounds."""

    median: float
    low: float
    high: float
    count: int


class Results:
    """All samples of a run."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def on(self, *, huge_pages: bool) -> Results:
        """The samples that were measured on pages of one size. Other tools have memory of their
        own: theirs are among those on small pages."""
        found = Results()
        found.samples = [one for one in self.samples if one.huge_pages == huge_pages]
        return found

    def spread(self, subject: str, size_bytes: int, figure: str) -> Spread | None:
        """The spread of a figure; None if it was not measured."""
        values = sorted(
            one.figures[figure]
            for one in self.samples
            if one.subject == subject and one.size_bytes == size_bytes and figure in one.figures
        )
        if not values:
            return None
        low, _, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else (values * 3)
        )
        return Spread(statistics.median(values), low, high, len(values))

    def median(self, subject: str, size_bytes: int, figure: str) -> float:
        """The median of a figure. Raises LookupError if it was not measured."""
        spread = self.spread(subject, size_bytes, figure)
        if spread is None:
            raise LookupError(f"{subject}: no {figure} at {size_bytes} bytes")
        return spread.median

    def missing(self) -> dict[str, str]:
        """Subjects that could not run, and why."""
        return {one.subject: one.missing for one in self.samples if one.missing}

    def sizes(self) -> list[int]:
        """All sizes, ascending."""
        return sorted({one.size_bytes for one in self.samples})

    def as_json(self) -> list[dict[str, Any]]:
        """Every sample."""
        return [asdict(one) for one in self.samples]


@dataclass(frozen=True)
class Bar:
    """One requirement: `figure` must not exceed `limit`, and on huge pages `huge_limit`."""

    name: str
    limit: float
    huge_limit: float
    unit: str
    floor: str
    figure: Callable[[Results, int], float]
    floor_value: Callable[[Results, int], float]
    value: Callable[[Results, int], float]

    def limit_on(self, *, huge_pages: bool) -> float:
        """The limit on pages of one size."""
        return self.huge_limit if huge_pages else self.limit


def _of(subject: str, figure: str) -> Callable[[Results, int], float]:
    return lambda results, size: results.median(subject, size, figure)


def _ratio(
    top: Callable[[Results, int], float], bottom: Callable[[Results, int], float]
) -> Callable[[Results, int], float]:
    return lambda results, size: top(results, size) / bottom(results, size)


def _zero(_: Results, __: int) -> float:
    return 0.0


def _busy_floor(results: Results, size: int) -> float:
    copy = results.median("memcpy", size, "memcpy_cpu_s")
    return (copy + results.median("keepstep", size, "busy_beside_cpu_s")) / _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


_MEMCPY = _of("memcpy", "memcpy_s")
_WRITE = _of("disk", "fio_write_s")
_READ = _of("disk", "read_s")


def _ratio_bar(
    name: str,
    limit: float,
    floor: str,
    value: Callable[[Results, int], float],
    floor_value: Callable[[Results, int], float],
    *,
    huge: float | None = None,
) -> Bar:
    ratio = _ratio(value, floor_value)
    return Bar(name, limit, huge or limit, "x", floor, ratio, floor_value, value)


def _plain_bar(
    name: str,
    limit: float,
    unit: str,
    floor: str,
    value: Callable[[Results, int], float],
    floor_value: Callable[[Results, int], float] = _zero,
    *,
    huge: float | None = None,
) -> Bar:
    return Bar(name, limit, huge or limit, unit, floor, value, floor_value, value)


def _scaled(
    value: Callable[[Results, int], float], factor: float
) -> Callable[[Results, int], float]:
    return lambda results, size: value(results, size) * factor


BARS: tuple[Bar, ...] = (
    _ratio_bar(
        "blocked time of a save, lazy (call + fence)",
        0.1,
        "one memcpy of the state",
        _of("keepstep", "blocked_s"),
        _MEMCPY,
        huge=0.08,
    ),
    _ratio_bar(
        "blocked time of a save, eager",
        1.2,
        "one memcpy of the state",
        _of("keepstep eager", "blocked_s"),
        _MEMCPY,
    ),
    _ratio_bar(
        "step time while saving every step, compute off the CPU",
        1.03,
        "the same without saving",
        _of("keepstep", "step_s"),
        _of("keepstep", "plain_step_s"),
    ),
    _ratio_bar(
        "time added to a step, compute on every core",
        1.3,
        "CPU of copy and write / cores",
        _of("keepstep", "busy_added_s"),
        _busy_floor,
    ),
    _ratio_bar(
        "durable from staged",
        1.05,
        "fio O_DIRECT 8 MiB, end_fsync",
        _of("keepstep eager", "write_s"),
        _WRITE,
    ),
    *(
        _ratio_bar(
            f"from the call to durable, {name}",
            1.15,
            "the longer of memcpy and fio",
            _of(subject, "durable_s"),
            lambda results, size: max(_MEMCPY(results, size), _WRITE(results, size)),
        )
        for name, subject in (("lazy", "keepstep"), ("eager", "keepstep eager"))
    ),
    _plain_bar(
        "training time lost while persisting",
        0.1,
        "s",
        "the write's own CPU / cores",
        _of("keepstep eager", "lost_s"),
        lambda results, size: results.median("keepstep eager", size, "write_cpu_s") / _cores(),
        huge=0.06,
    ),
    _plain_bar(
        "CPU per GB made durable (sidecar)",
        0.1,
        "s/GB",
        "fio's own",
        _of("keepstep", "background_cpu_s_per_gb"),
        _of("disk", "fio_write_cpu_s_per_gb"),
        huge=0.05,
    ),
    _ratio_bar(
        "restore from memory",
        1.2,
        "one memcpy of the state",
        _of("lives", "restore_memory_s"),
        _MEMCPY,
        huge=1.15,
    ),
    _ratio_bar(
        "restore from local: read and verified into a slot",
        1.1,
        "O_DIRECT read of the same file",
        _of("lives", "engine_load_s"),
        _of("lives", "engine_read_s"),
    ),
    _ratio_bar(
        "restore from local: `restore()` asked when the sidecar is just up, memory made anew",
        1.1,
        "O_DIRECT read of the bytes",
        _of("lives", "restore_local_bare_s"),
        _READ,
        huge=1.5,
    ),
    _plain_bar(
        "kill -9 to the next finished step, beyond a plain start and the restore",
        1.0,
        "s",
        "a plain start of the same process",
        _of("lives", "kill_beyond_restore_s"),
        _of("lives", "plain_start_s"),
    ),
    _plain_bar(
        "sidecar memory beyond slots (RssAnon + RssFile)",
        80.0,
        "MiB",
        "0",
        _of("keepstep", "sidecar_rss_mib"),
    ),
    _plain_bar(
        "`import keepstep` after `import torch` (with Checkpointer)",
        50.0,
        "ms",
        "import torch",
        _scaled(_of("imports", "import_keepstep_s"), 1e3),
        _scaled(_of("imports", "import_torch_s"), 1e3),
    ),
)
