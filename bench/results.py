"""Samples of all rounds, and the figures computed from them: medians, spread, the bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """The figures of one process for one subject in one round, or why it has none."""

    subject: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    missing: str = ""
    seconds: float = 0.0
    huge_pages: bool = False

    @property
    def title(self) -> str:
        """The subject, and its pages unless they are small."""
        return f"{self.subject}, 2 MiB pages" if self.huge_pages else self.subject


@dataclass
class Results:
    """All samples of a run."""

    samples: list[Sample] = field(default_factory=list)

    def of(self, **fields: Any) -> Results:
        """The samples whose fields have these values."""
        conditions = fields.items()
        return Results(
            [
                sample
                for sample in self.samples
                if all(getattr(sample, name) == it for name, it in conditions)
            ]
        )

    def values(self, subject: str, figure: str) -> list[float]:
        """A figure in each round that has it."""
        found = [sample.figures.get(figure) for sample in self.samples if sample.subject == subject]
        return [value for value in found if value is not None]

    def median(self, subject: str, figure: str) -> float:
        """The median of a figure. Raises LookupError if it was not measured."""
        if not (values := self.values(subject, figure)):
            raise LookupError(f"{subject}: no {figure}")
        return statistics.median(values)


Value = Callable[[Results], float]


@dataclass(frozen=True)
class Bar:
    """One requirement: `figure` must not exceed `limit`, and on huge pages `huge`. The figure is
    `value / floor_value` if the unit is "x", else `value`."""

    name: str
    limit: float
    unit: str
    value: Value
    floor: str
    floor_value: Value
    huge: float | None = None

    def limit_on(self, *, huge_pages: bool) -> float:
        """The limit on pages of one size."""
        return self.huge if huge_pages and self.huge is not None else self.limit

    def figure(self, results: Results) -> float:
        """What the limit is for. Raises LookupError if it was not measured."""
        value = self.value(results)
        return value / self.floor_value(results) if self.unit == "x" else value


def _of(subject: str, figure: str, *, times: float = 1.0) -> Value:
    return lambda results: results.median(subject, figure) * times


def _slower_floor(results: Results) -> float:
    return max(_MEMCPY(results), _WRITE(results))


def _write_and_digest(results: Results) -> float:
    """What a durable step that can be verified costs any writer, in seconds of CPU for a GB."""
    written = results.median("disk", "fio_write_cpu_s_per_gb")
    return written + results.median("memcpy", "hash_cpu_s_per_gb")


_MEMCPY, _WRITE = _of("memcpy", "memcpy_s"), _of("disk", "fio_write_s")
_COPY, _TLS = "one memcpy of the state", "plain TLS, received and digested"
_LAZY, _EAGER, _FLOOR = "keepstep", "keepstep eager", "memcpy and fio"
_ANY = "the same of one memcpy and fio, at the writer's priority"

# fmt: off
BARS: tuple[Bar, ...] = (
    Bar("blocked time of a save, lazy (call + fence)", 0.1, "x",
        _of(_LAZY, "blocked_s"), _COPY, _MEMCPY, huge=0.08),
    Bar("blocked time of a save, eager", 1.2, "x",
        _of(_EAGER, "blocked_s"), _COPY, _MEMCPY),
    Bar("step time while saving every step, compute off the CPU", 1.03, "x",
        _of(_LAZY, "step_s"), "the same without saving", _of(_LAZY, "plain_step_s")),
    Bar("time added to a step, compute on every core", 1.3, "x",
        _of(_LAZY, "busy_added_s"), _ANY, _of(_FLOOR, "busy_added_s")),
    Bar("durable from staged", 1.05, "x",
        _of(_EAGER, "write_s"), "fio O_DIRECT 8 MiB, end_fsync", _WRITE),
    Bar("from the call to durable, lazy", 1.15, "x",
        _of(_LAZY, "durable_s"), "the longer of memcpy and fio", _slower_floor),
    Bar("from the call to durable, eager", 1.15, "x",
        _of(_EAGER, "durable_s"), "the longer of memcpy and fio", _slower_floor),
    Bar("training time lost while persisting", 1.3, "x",
        _of(_EAGER, "lost_s"), _ANY, _of(_FLOOR, "lost_s")),
    Bar("CPU per GB made durable (sidecar)", 1.05, "x",
        _of(_LAZY, "background_cpu_s_per_gb"), "fio's own, and one digest of the bytes",
        _write_and_digest),
    Bar("restore from memory", 1.2, "x",
        _of("lives", "restore_memory_s"), _COPY, _MEMCPY, huge=1.15),
    Bar("restore from local: read and verified into a slot", 1.1, "x",
        _of("lives", "engine_load_s"), "O_DIRECT read of the same file",
        _of("lives", "engine_read_s")),
    Bar("restore from local: `restore()` asked when the sidecar is just up, memory made anew",
        1.1, "x", _of("lives", "restore_local_bare_s"), "O_DIRECT read of the bytes",
        _of("disk", "read_s"), huge=1.5),
    Bar("kill -9 to the next finished step, beyond a plain start and the restore", 1.0, "s",
        _of("lives", "kill_beyond_restore_s"), "a plain start of the same process",
        _of("lives", "plain_start_s")),
    Bar("sidecar memory beyond slots (RssAnon + RssFile)", 80.0, "MiB",
        _of(_LAZY, "sidecar_rss_mib"), "0", lambda *_: 0.0),
    Bar("`import keepstep` after `import torch` (with Checkpointer)", 50.0, "ms",
        _of("imports", "import_keepstep_s", times=1e3), "import torch",
        _of("imports", "import_torch_s", times=1e3)),
    Bar("a copy at a buddy, from durable here", 1.5, "x",
        _of("peer", "peer_copy_s"), _TLS, _of("peer", "peer_floor_s")),
    Bar("restore from a buddy, memory and drive made anew", 2.5, "x",
        _of("peer", "peer_restore_s"), _TLS, _of("peer", "peer_floor_s")),
    Bar("archived, from durable here", 1.5, "x",
        _of("archive", "archive_copy_s"), "obstore.put of the same file",
        _of("archive", "archive_put_s")),
    Bar("restore from the archive, memory and drive made anew", 4.0, "x",
        _of("archive", "archive_restore_s"), "obstore.get of the same file, digested",
        _of("archive", "archive_get_s")),
)
# fmt: on
