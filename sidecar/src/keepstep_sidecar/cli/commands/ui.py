"""`keepstep ui`: shows the runs of this machine on a page in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.options import directory_option

if TYPE_CHECKING:
    from keepstep.core.goodput import Goodput
    from keepstep.core.history import Event
    from keepstep_sidecar.ui.view import RunPage


@click.command()
@directory_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1 to listen on.  [default: a free one]",
)
@click.option("--no-open", is_flag=True, help="Only print the URL; start no browser.")
def ui(directory: Path, port: int, no_open: bool) -> None:
    """Show the runs below DIR in a browser, as they change.

    Listens on 127.0.0.1 alone; the URL has a token that lets one in. It reads, and changes nothing.
    Ctrl-C ends it. On another machine: ssh -L PORT:127.0.0.1:PORT, and --port PORT there.

    \b
    Examples:
      keepstep ui
      keepstep ui --dir /scratch/ckpt --port 8790 --no-open
    """
    from keepstep_page.browser import show
    from keepstep_sidecar.cli import output
    from keepstep_sidecar.ui.server import serving

    place = Path(os.path.abspath(directory))
    site = serving(
        directory=place,
        port=port,
        names=lambda: run_dir.runs_in(place),
        read=_reader(place),
        text=output.printable,
    )
    asyncio.run(show(site, f"runs in {place}", browser=not no_open, echo=output.echo))


def _reader(directory: Path) -> Callable[[str], RunPage]:
    """A function that reads one run. If the run has no sidecar, its volumes are scanned again only
    when its directories have changed: then only `keepstep rm` writes there."""
    from keepstep_sidecar.cli import calls, inventory
    from keepstep_sidecar.ui.view import RunPage

    happened: dict[str, tuple[Event, ...]] = {}
    goodputs: dict[str, Goodput | None] = {}
    scans: dict[str, tuple[tuple[int, ...], inventory.Holdings]] = {}
    told_by: dict[str, float] = {}

    def held_by(kept: run_dir.RunDir) -> inventory.Holdings:
        if (live := calls.status(kept.socket)) is not None:
            if told_by.get(kept.run) != live.started_at:
                # a new sidecar reuses the numbers of events that the previous one had not written
                happened.pop(kept.run, None)
            told_by[kept.run] = live.started_at
            happened[kept.run] = _more(kept, happened.get(kept.run, ()))
            goodputs[kept.run] = live.goodput
            return inventory.of_live(live)
        state = _changed_at(kept)
        if kept.run not in scans or scans[kept.run][0] != state:
            scans[kept.run] = state, inventory.on_volumes(kept)
            happened[kept.run] = _on_volumes(kept)
            goodputs[kept.run] = inventory.goodput(kept, None)
        return scans[kept.run][1]

    def read(name: str) -> RunPage:
        kept = run_dir.find(directory, name)
        held = held_by(kept)
        return RunPage(
            name=kept.run,
            live=held.live,
            steps=held.steps,
            committed=held.committed,
            newest=held.newest,
            events=happened.get(kept.run, ()),
            goodput=goodputs.get(kept.run),
            volumes=tuple(map(str, kept.roots)),
            log=str(kept.log),
            problems=held.problems,
        )

    return read


def _more(kept: run_dir.RunDir, known: tuple[Event, ...]) -> tuple[Event, ...]:
    """`known` and the sidecar's events since then. If the sidecar has lost its history, only its
    events from the beginning."""
    from keepstep_sidecar.cli import calls
    from keepstep_sidecar.history import KEPT

    last = known[-1].sequence if known else 0
    told = calls.history(kept.socket, last)
    if told is not None and told.last < last:
        known, told = (), calls.history(kept.socket, 0)
    return known if told is None else (*known, *told.events)[-KEPT:]


def _on_volumes(kept: run_dir.RunDir) -> tuple[Event, ...]:
    """The history that the last sidecar left, from the volume with the newest event."""
    from keepstep_sidecar.volume.history_file import HistoryFile
    from keepstep_sidecar.volume.paths import Tree

    paths = [Tree(root).history for root in kept.roots]
    found = [HistoryFile(path, run=kept.run).read(now=time.time())[0] for path in paths]
    newest = max(found, key=lambda events: events[-1].until if events else 0.0)
    return tuple(newest)


def _changed_at(kept: run_dir.RunDir) -> tuple[int, ...]:
    """The modification times of the record, of the history and of the directories that hold steps:
    if none changed, neither did the run's steps and events."""
    times = []
    for root in kept.roots:
        for path in (kept.record, root, root / "pending", root / "history.jsonl"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime_ns)
    return tuple(times)
