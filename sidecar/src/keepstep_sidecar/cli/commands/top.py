"""`keepstep top`: shows the runs of a directory, live in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from keepstep.core.goodput import Goodput
from keepstep.core.history import Event, Kind, Restart
from keepstep.errors import KeepstepError
from keepstep.wire.status import RankStatus, Status
from keepstep_sidecar.cli import calls, inventory, run_dir
from keepstep_sidecar.cli.messages import badput, share
from keepstep_sidecar.cli.options import directory_option, run_option
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.quantities import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_RECENT_S: Final = 60.0
_EVENTS: Final = 512
_RANKS: Final = 16
_RESTARTS: Final = 4
_ANSWER_S: Final = 5.0
_UNITS: Final = ("s", "ms", "us")


@click.command()
@directory_option
@run_option(default="all in DIR")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 60.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Print one frame and end; also where no terminal is.")
def top(directory: Path, run: str | None, every_s: float, once: bool) -> None:
    """Watch the runs of a directory: steps, tiers, drives, restarts and goodput. Ends with q.

    \b
    Examples:
      keepstep top
      keepstep top --run train --every 5
      keepstep top --once
    """
    from keepstep_sidecar.cli import output

    watch = Watch(directory, run)
    shown = output.console()
    if once or not (shown.is_terminal and sys.stdin.isatty()):
        shown.print(frame(watch.look(), now=time.time()))
        return
    from rich.live import Live

    watch.names()  # report a wrong name before taking the screen
    screen = Live(console=shown, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keys(), screen:
        screen.update(frame(watch.look(), now=time.time()), refresh=True)
        while not _asked_to_end(every_s):
            screen.update(frame(watch.look(), now=time.time()), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys one by one, without echo; Ctrl-C is still a signal."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _asked_to_end(wait_s: float) -> bool:
    """Wait up to `wait_s` for a key. Returns whether it was q, or the terminal is gone."""
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    if not ready:
        return False
    keys = os.read(sys.stdin.fileno(), 1024)
    return not keys or b"q" in keys.lower()


# --- looking ---------------------------------------------------------------------------------


@dataclass
class Seen:
    """One run. `live` is None if its sidecar does not run. `trouble`: why it cannot be read."""

    name: str
    live: Status | None = None
    goodput: Goodput | None = None
    events: Sequence[Event] = ()
    trouble: str = ""


@dataclass
class _Followed:
    since: int = 0
    events: list[Event] = field(default_factory=list)


class Watch:
    """Asks the sidecars for their status, and each time only for the new events."""

    def __init__(self, directory: Path, run: str | None = None) -> None:
        """`run`: watch only this run; None for all runs in `directory`."""
        self._directory = directory
        self._run = run
        self._followed: dict[str, _Followed] = {}

    def names(self) -> list[str]:
        """The names of the watched runs. Raises UsageError if there is no such run."""
        names = [] if self._run is not None else run_dir.runs_in(self._directory)
        return list(names) or [run_dir.find(self._directory, self._run).run]

    def look(self) -> list[Seen]:
        """All watched runs as they are now, those with a sidecar first."""
        found = map(self._seen, self.names())
        return sorted(found, key=lambda one: (one.live is None, one.name))

    def _seen(self, name: str) -> Seen:
        try:
            kept = run_dir.load(self._directory, name)
            live = calls.status(kept.socket, timeout_s=_ANSWER_S)
            if live is None:
                return Seen(name, goodput=inventory.goodput(kept, None))
            return Seen(name, live, live.goodput, self._events(kept))
        except KeepstepError as error:
            return Seen(name, trouble=str(error))

    def _events(self, kept: RunDir) -> list[Event]:
        followed = self._followed.setdefault(kept.run, _Followed())
        told = calls.history(kept.socket, since=followed.since, timeout_s=_ANSWER_S)
        if told is None:
            return followed.events
        if told.last < followed.since:  # the sidecar lost its history and began anew
            followed.events.clear()
        followed.since = told.last
        followed.events = [*followed.events, *told.events][-_EVENTS:]
        return followed.events


# --- what follows from it --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds per step, and seconds that a save blocks: means over the last minute, or over the
    last two steps if they were longer apart."""

    step_s: float
    blocked_s: float


def pace(events: Iterable[Event]) -> Pace | None:
    """None if no two steps of the newest life are known."""
    staged = [one for one in events if one.kind is Kind.STAGED and one.step is not None]
    newest = staged[-1] if staged else None
    if newest is None or newest.step is None:
        return None
    life = [one for one in staged if one.step and one.step.epoch == newest.step.epoch]
    recent = [one for one in life if one.at >= newest.until - _RECENT_S]
    first, *_ = recent = recent if len(recent) > 1 or newest.count > 1 else life[-2:]
    begin = first.first if first.first is not None else newest.step.step
    steps, seconds = newest.step.step - begin, newest.until - first.at
    if steps <= 0 or seconds <= 0:
        return None
    saves = sum(one.count for one in recent)
    return Pace(step_s=seconds / steps, blocked_s=sum(one.seconds for one in recent) / saves)


def restarts(events: Iterable[Event]) -> list[Event]:
    """The newest few restarts, the newest first."""
    found = [one for one in events if one.kind is Kind.RESTARTED and one.restart is not None]
    return found[: -_RESTARTS - 1 : -1]


# --- a frame ---------------------------------------------------------------------------------


def frame(runs: Sequence[Seen], *, now: float) -> Group:
    """One frame with all runs. On a screen, what does not fit at its end is cut off."""
    from rich.console import Group

    return Group(*(part for one in runs for part in _parts(one, now)))


def _parts(seen: Seen, now: float) -> Iterator[RenderableType]:
    yield _facts(_run_facts(seen, now))
    if seen.live is not None:
        if ranks := seen.live.ranks:
            columns = ("RANK", "TRAINER", "STAGED", "DURABLE", "SAVES", "LOST", "BLOCKED/SAVE")
            yield _table(columns, map(_rank, ranks[:_RANKS]))
            if len(ranks) > _RANKS:
                yield f"and {len(ranks) - _RANKS} more ranks"
        if found := restarts(seen.events):
            columns = ("RESTARTED", "RANK", "COST", "PROCESS", "START", "RESTORE", "FIRST STEP")
            rows = (_restart(one, one.restart, now) for one in found if one.restart)
            yield _table(columns, rows)
        for text in seen.live.warnings:
            yield f"warning: {text}"
    yield ""


def _run_facts(seen: Seen, now: float) -> list[tuple[str, str]]:
    live = seen.live
    state = seen.trouble or ("not running" if live is None else _state(live, now))
    facts = [("run", f"{seen.name}: {state}")]
    if live is not None:
        facts.append(("steps", _steps(live, pace(seen.events), now)))
        marks = [f"{tier} {id.step}" for tier, id in live.watermarks.items()]
        facts.append(("tiers", ", ".join(marks) or "nothing yet"))
        facts += [("behind", f"{one.tier}: {one.backlog} shards wait") for one in live.depots]
        for drive in live.volumes:
            sizes = f"{format_size(drive.used_bytes)} used, {format_size(drive.free_bytes)} free"
            failed = f"; FAILED: {drive.failed}" if drive.failed else ""
            facts.append(("drive", f"{sizes}{failed}  {drive.path}"))
    if seen.goodput is not None:
        lost = badput(seen.goodput)
        times = (
            f", interrupted {seen.goodput.interruptions} x" if seen.goodput.interruptions else ""
        )
        facts.append(("goodput", f"{share(seen.goodput)}{times}{lost and f'; lost: {lost}'}"))
    return facts


def _state(live: Status, now: float) -> str:
    alive = sum(one.alive for one in live.ranks)
    epoch = "no epoch yet" if live.epoch is None else f"epoch {live.epoch.id.number}"
    up = format_duration(max(0.0, now - live.started_at))
    waits = [f"rank {one.rank} waits: {one.waits}" for one in live.ranks if one.waits]
    said = f"; {waits[0]}" if waits else ""
    return f"{alive} of {len(live.ranks)} trainers, {epoch}, sidecar up {up}{said}"


def _steps(live: Status, speed: Pace | None, now: float) -> str:
    staged = [one.staged.step for one in live.ranks if one.staged is not None]
    texts = [f"staged {min(staged)}" if staged else "nothing staged"]
    if (committed := live.watermarks.get("local")) is not None:
        at = live.committed_at
        ago = "" if at is None else f" ({format_duration(max(0.0, now - at))} ago)"
        texts.append(f"committed {committed.step}{ago}")
    if speed is not None:
        texts.append(f"{1 / speed.step_s:.3g} steps/s, {_time(speed.step_s)} a step")
        texts.append(f"saves block {_time(speed.blocked_s)}")
    return ", ".join(texts)


def _rank(rank: RankStatus) -> tuple[str, ...]:
    return (
        f"{rank.rank} of {rank.world}",
        f"pid {rank.pid}" if rank.alive else "none",
        "" if rank.staged is None else str(rank.staged.step),
        "" if rank.durable is None else str(rank.durable.step),
        str(rank.saves),
        str(rank.skipped + rank.discarded),
        _time(rank.blocked_s / rank.saves) if rank.saves else "",
    )


def _restart(event: Event, cost: Restart, now: float) -> tuple[str, ...]:
    parts = (cost.detection_s, cost.start_s, cost.restore_s, cost.first_step_s)
    ago = format_duration(max(0.0, now - event.at))
    return f"{ago} ago", str(event.rank), *(_time(one) for one in (sum(parts), *parts))


def _time(seconds: float) -> str:
    """A duration in the unit that suits it: `12.3 ms`."""
    for unit in _UNITS:
        if seconds >= 1.0 or unit == _UNITS[-1]:
            break
        seconds *= 1000
    return f"{seconds:.3g} {unit}"


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in facts:
        made.add_row(name, text)
    return made


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
