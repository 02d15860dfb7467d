"""What the page shows of a run: from its sidecar or, without one, from its volumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from keepstep.core.history import Goodput, HistoryEvent
from keepstep.wire.status import Status
from keepstep_sidecar.cli import calls, inventory, run_dir
from keepstep_sidecar.history import KEPT
from keepstep_sidecar.ui.run_figures import RunPage


class SidecarPoller:
    """A sidecar's status, and its history, of which only new events are asked for."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._started_at = 0.0
        self.events: tuple[HistoryEvent, ...] = ()

    def status(self) -> Status | None:
        """The status; None if no sidecar listens. `events` is of the same moment. Raises
        SidecarError."""
        if (live := calls.ask_status(self._socket)) is None:
            return None
        if self._started_at != live.started_at:
            # a new sidecar reuses the numbers of events that the previous one had not written
            self._started_at, self.events = live.started_at, ()
        last = self.events[-1].sequence if self.events else 0
        news = calls.ask_history(self._socket, last)
        if news is not None and news.last < last:  # it has lost its history
            self.events, news = (), calls.ask_history(self._socket, 0)
        if news is not None:
            self.events = (*self.events, *news.events)[-KEPT:]
        return live


def _page(
    name: str,
    held: inventory.RunHoldings,
    events: tuple[HistoryEvent, ...],
    goodput: Goodput | None,
) -> RunPage:
    return RunPage(
        name=name,
        live=held.live,
        steps=held.steps,
        committed=held.newest_committed,
        newest=held.newest_complete_step,
        events=events,
        goodput=goodput,
        problems=held.problems,
    )


def sidecar_reader(path: Path) -> Callable[[str], RunPage]:
    """A function that reads the run of the sidecar that listens on `path`, and nothing but what
    that sidecar says."""
    follower = SidecarPoller(path)

    def read(name: str) -> RunPage:
        if (live := follower.status()) is None:
            return RunPage(name=name, error="its sidecar does not listen")
        return _page(name, inventory.holdings_of_sidecar(live), follower.events, live.goodput)

    return read


def run_page_reader(directory: Path) -> Callable[[str], RunPage]:
    """A function that reads one run below `directory`: from its sidecar or, without one, from its
    volumes."""
    followed: dict[str, SidecarPoller] = {}

    def read(name: str) -> RunPage:
        kept = run_dir.find_run(directory, name)
        follower = followed.setdefault(name, SidecarPoller(kept.socket))
        if (live := follower.status()) is not None:
            page = _page(name, inventory.holdings_of_sidecar(live), follower.events, live.goodput)
        else:
            events, goodput = inventory.read_stored_history(kept)
            page = _page(name, inventory.holdings_on_volumes(kept), tuple(events), goodput)
        places = tuple(map(str, kept.roots))
        return dataclasses.replace(page, name=kept.name, volumes=places, log=str(kept.log))

    return read
