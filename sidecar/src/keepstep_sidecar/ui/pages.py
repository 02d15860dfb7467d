"""HTML of the page, from jinja2 templates that escape whatever they are given.

A page is made of sections, and a viewer is sent those that differ from what it shows: so nothing is
worked out in the browser, and a browser without scripts shows the same, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from keepstep.core.history import Restart
from keepstep.steps import NEAREST_FIRST
from keepstep_sidecar import __version__
from keepstep_sidecar.config.quantities import format_duration, format_size
from keepstep_sidecar.ui import timeline
from keepstep_sidecar.ui.view import RunView, ranks_on

_HERE: Final = Path(__file__).parent
STATIC: Final = _HERE / "static"

RUN_SECTIONS: Final = {
    "facts": "At a glance",
    "goodput": "Goodput",
    "steps": "Steps",
    "restarts": "Restores",
    "lost": "Skipped and discarded steps",
    "time": "Step time",
    "drives": "Drives",
    "depots": "Peers and archive",
}
"""By the name of their template, in the order of the page; beside `state` and `problems`."""

CHARTS: Final = {
    "steps": "Chart of steps over time, by the tier they reached; the table has those held now",
    "time": "Chart of the time of a step, with and without keepstep; the text says it of now",
}
"""By the section that they stand in: what a reader of the screen is told of them."""

STEPS_SHOWN: Final = 100
ROWS_SHOWN: Final = 50


class Pages:
    """`directory`: whose runs are shown; `text`: makes text of unknown origin fit to be shown."""

    def __init__(self, *, directory: Path, text: Callable[[str], str]) -> None:
        self._directory = str(directory)
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # what is escaped already is markup, no text of somebody's
            finalize=lambda value: text(value) if type(value) is str else value,
        )
        self._templates.globals |= {"version": __version__, "directory": self._directory}
        self._templates.filters |= {
            "size": format_size,
            "duration": format_duration,
            "iso": _iso,
            "total": _total_s,
            "ms": _ms,
            "cost": _cost,
        }

    def index(self, views: Sequence[RunView]) -> str:
        """All runs, as a whole page."""
        return self._render("index.html", sections=self.index_sections(views))

    def index_sections(self, views: Sequence[RunView]) -> dict[str, str]:
        """What of it changes, by the id of its element."""
        return {"runs": self._render("sections/runs.html", runs=views)}

    def run(self, view: RunView) -> str:
        """One run, as a whole page."""
        return self._render(
            "run.html",
            run=view,
            titles=RUN_SECTIONS,
            charts=CHARTS,
            sections=self.run_sections(view),
        )

    def run_sections(self, view: RunView) -> dict[str, str]:
        """What of it changes, by the id of its element."""
        newest_first = sorted(view.steps, key=lambda step: step.id, reverse=True)
        known: dict[str, Any] = {
            "run": view,
            "steps": newest_first[:STEPS_SHOWN],
            "tiers": [
                tier for tier in NEAREST_FIRST if any(ranks_on(one, tier) for one in view.steps)
            ],
            "ranks_on": ranks_on,
            "restores": timeline.restores(view.events)[: -ROWS_SHOWN - 1 : -1],
            "lost": timeline.lost(view.events)[: -ROWS_SHOWN - 1 : -1],
            "usual": timeline.usual(timeline.step_times(view.events)),
        }
        names = ("state", "problems", *RUN_SECTIONS)
        return {name: self._render(f"sections/{name}.html", **known) for name in names}

    def missing(self, name: str) -> str:
        """There is no such run."""
        return self._render("missing.html", name=name)

    def _render(self, template: str, **known: Any) -> str:
        return self._templates.get_template(template).render(known)


def _iso(unix_s: float) -> str:
    """To the second, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="seconds")


def _cost(seconds: float) -> str:
    """A part of an interruption: `0.03 s`, `2m05s`."""
    return f"{seconds:.2f} s" if seconds < 10 else format_duration(seconds)


def _ms(seconds: float) -> str:
    """Three digits: `0.52 ms`, `12.3 ms`, `140 ms`."""
    value = 1000 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def _total_s(one: Restart) -> float:
    return one.detection_s + one.start_s + one.restore_s + one.first_step_s
