"""Reads what the demo's runs logged, and makes the table, the verdict and the plot.

This module starts no processes. It computes everything from the times of the kills and from the
journals that `train_gpt.py` wrote: one JSON line for each start and each finished step.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP_STEPS = 5
"""The first steps are left out of step times, because they allocate and tune."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished step. `wall` is unix seconds; `loss_hex` has all bits of `loss`."""

    step: int
    loss: float
    loss_hex: str
    seconds: float
    wall: float


@dataclass(frozen=True, slots=True)
class Started:
    """A start of the trainers, whose first step is `first`. `tier` is None if nothing was
    restored."""

    first: int
    tier: str | None
    restore_s: float | None
    pid: int
    wall: float


@dataclass(frozen=True, kw_only=True)
class Death:
    """A kill. `step` was the newest finished step; `wall` is unix seconds."""

    victim: str
    step: int
    wall: float
    note: str = ""


@dataclass
class Journal:
    """The log of one run, read as it grows. A step that was computed twice is in it twice."""

    path: Path
    _finished: list[Finished] = field(default_factory=list)
    _started: list[Started] = field(default_factory=list)
    _offset: int = 0

    def finished(self) -> list[Finished]:
        """Every finished step so far, in the order of the log."""
        self._read()
        return self._finished

    def started(self) -> list[Started]:
        """Every start of the trainers so far."""
        self._read()
        return self._started

    def last(self) -> Finished | None:
        """The step that was finished last."""
        return self.finished()[-1] if self.finished() else None

    def frontier(self) -> int:
        """The highest finished step, -1 for none."""
        return max((event.step for event in self.finished()), default=-1)

    def first_times(self) -> list[Finished]:
        """For each step, the first time that it was finished; ascending."""
        new: list[Finished] = []
        for event in self.finished():
            if not new or event.step > new[-1].step:
                new.append(event)
        return new

    def losses(self) -> dict[int, set[str]]:
        """The bits of each step's loss; several if computing a step again gave another loss."""
        losses: dict[int, set[str]] = {}
        for event in self.finished():
            losses.setdefault(event.step, set()).add(event.loss_hex)
        return losses

    def median_step_s(self) -> float:
        return statistics.median(event.seconds for event in self.finished()[WARM_UP_STEPS:])

    def fast_step_s(self) -> float:
        """The first decile of step times, which other load on the machine disturbs least."""
        seconds = [event.seconds for event in self.finished()[WARM_UP_STEPS:]]
        return statistics.quantiles(seconds, n=10)[0]

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]  # the last line may be incomplete
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._add(json.loads(line))

    def _add(self, event: dict[str, Any]) -> None:
        if "step" in event:
            self._finished.append(Finished(**event))
        else:
            self._started.append(Started(**event))


@dataclass(frozen=True)
class Cost:
    """What one kill cost. `restored` is None if the trainers lived on."""

    death: Death
    restored: Started | None
    redone: int
    lost_s: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The three runs, each of which went to its end.

    `start_s`: seconds from the launch of the plain run to its first finished step.
    """

    steps: int
    start_s: float
    plain: Journal
    kept: Journal
    killed: Journal
    deaths: tuple[Death, ...]

    @cached_property
    def differing(self) -> list[int]:
        """The steps whose loss differs between runs or attempts, or that a run never finished."""
        runs = [journal.losses() for journal in (self.plain, self.kept, self.killed)]
        return [
            step
            for step in range(self.steps)
            if len(set().union(*(run.get(step, {"missing"}) for run in runs))) != 1
        ]

    @property
    def bit_equal(self) -> bool:
        return not self.differing

    def costs(self) -> list[Cost]:
        return [self._cost(death) for death in self.deaths]

    def _cost(self, death: Death) -> Cost:
        following = min((d.wall for d in self.deaths if d.wall > death.wall), default=float("inf"))
        starts = (event for event in self.killed.started() if death.wall < event.wall < following)
        restored = next(starts, None)
        redone = 0
        if restored:
            before = (event for event in self.killed.finished() if event.wall < restored.wall)
            redone = max(event.step for event in before) + 1 - restored.first
        return Cost(death, restored, redone, self._lost_s(death))

    def _lost_s(self, death: Death) -> float:
        """How many seconds later than usual the steps right after the kill were finished.

        The usual pace is the median time between new steps. Several steps count, because the
        restart of a sidecar slows the training down for a while without stopping it.
        """
        walls = [time.wall for time in self.killed.first_times()]
        pace = statistics.median(after - before for before, after in itertools.pairwise(walls))
        start = max(index for index, wall in enumerate(walls) if wall <= death.wall)
        end = min(len(walls) - 1, start + max(2, self.steps // 15))
        return max(0.0, walls[end] - walls[start] - (end - start) * pace)


# --- for people --------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print the table of kills, the step times and the verdict."""
    console.print(_kills_table(report))
    for death in report.deaths:
        if death.note:
            console.print(f"After the kill of {death.victim}: {death.note}", soft_wrap=True)
    console.print(_pace(report))
    console.print(_verdict(report))


def _kills_table(report: Report) -> Table:
    table = Table(title="What each kill cost", box=box.SIMPLE_HEAD)
    table.add_column("killed", no_wrap=True)
    for heading in ("at", "back to", "from", "redone", "restore", "lost"):
        table.add_column(heading, justify="right")
    for cost in report.costs():
        table.add_row(*_cells(cost))
    return table


def _cells(cost: Cost) -> tuple[str, ...]:
    death, restored = cost.death, cost.restored
    lost = f"{cost.lost_s:.1f} s"
    if restored is None:
        return (death.victim, str(death.step), "-", "-", "0", "-", lost)
    step, tier = str(restored.first - 1), restored.tier or "nothing"
    restore = f"{1e3 * (restored.restore_s or 0.0):.0f} ms"
    return (death.victim, str(death.step), step, tier, str(cost.redone), restore, lost)


def _pace(report: Report) -> str:
    return "\n".join(
        (
            _step_times("Plain", report.plain),
            _step_times("Every step kept", report.kept),
            "Both trained on all cores, one after the other: other load shows in either.",
            f"Of the time lost, the start of Python and torch is {report.start_s:.1f} s (plain).",
        )
    )


def _step_times(name: str, journal: Journal) -> str:
    fast_ms, median_ms = 1e3 * journal.fast_step_s(), 1e3 * journal.median_step_s()
    return f"{name}: a step took {median_ms:.1f} ms (median), {fast_ms:.1f} ms (fastest tenth)."


def _verdict(report: Report) -> str:
    again = len(report.killed.finished()) - report.steps
    if report.bit_equal:
        return (
            f"[bold green]Bit-equal:[/] all {report.steps} losses, {again} of them computed a"
            " second time, are the same floats in all three runs."
        )
    return (
        f"[bold red]NOT bit-equal:[/] {len(report.differing)} of {report.steps} steps differ,"
        f" the first is step {report.differing[0]}."
    )


def plot(report: Report, path: Path) -> None:
    """Write a PNG with the loss curves and the progress over time; both show the kills."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display, and opens no window
    from matplotlib import pyplot

    figure, (losses, times) = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    _plot_losses(report, losses)
    _plot_times(report, times)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_losses(report: Report, axes: Axes) -> None:
    plain, killed = report.plain.finished(), report.killed.finished()
    axes.plot(
        [event.step for event in plain],
        [event.loss for event in plain],
        color="0.8",
        linewidth=6,
        label="never killed, without keepstep",
    )
    axes.plot(
        [event.step for event in killed],
        [event.loss for event in killed],
        color="tab:blue",
        linewidth=1.3,
        label=f"killed {len(report.deaths)} times, every step kept",
    )
    top = max(event.loss for event in plain)
    for death in report.deaths:
        axes.axvline(death.step, color="tab:red", linestyle="--", linewidth=1)
        axes.text(death.step, top, f" {death.victim}", color="tab:red", rotation=90, va="top")
    verdict = "bit-equal" if report.bit_equal else f"{len(report.differing)} steps DIFFER"
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"Loss of both runs: {verdict}")
    axes.legend(loc="lower left")


def _plot_times(report: Report, axes: Axes) -> None:
    runs = (("plain", report.plain), ("kept", report.kept), ("killed", report.killed))
    for name, journal in runs:
        started = journal.started()[0].wall
        finished = journal.finished()
        label = f"{name}: median step {1e3 * journal.median_step_s():.1f} ms"
        axes.plot(
            [event.wall - started for event in finished],
            [event.step for event in finished],
            label=label,
        )
    started = report.killed.started()[0].wall
    for cost in report.costs():
        death = cost.death
        axes.plot(death.wall - started, death.step, "x", color="tab:red", markersize=9)
        axes.annotate(
            f"{death.victim}: {cost.lost_s:.1f} s",
            (death.wall - started, death.step),
            xytext=(-8, 8),  # above the curve, where the axes are empty
            textcoords="offset points",
            ha="right",
            color="tab:red",
        )
    axes.set(
        xlabel="seconds since the first start", ylabel="step", title="Time, and what kills cost"
    )
    axes.legend(loc="lower right")
