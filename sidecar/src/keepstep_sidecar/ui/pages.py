"""HTML of the page, from jinja2 templates that escape everything they are given.

A page consists of sections, and a viewer is sent the sections that differ from what it shows. So
the browser computes nothing, and a browser without scripts shows the same page, but only once.

What a run says may be anything: its files may be those of others. A run whose values cannot be
shown is shown as unreadable, and the others as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from keepstep.steps import NEAREST_FIRST
from keepstep.version import __version__
from keepstep_sidecar.config.settings import format_duration, format_size
from keepstep_sidecar.ui import run_figures
from keepstep_sidecar.ui.run_figures import RunPage

T = TypeVar("T")

_HERE: Final = Path(__file__).parent
STATIC: Final = _HERE / "static"
TEMPLATES: Final = _HERE / "templates"
STEPS_SHOWN: Final = 100
ROWS_SHOWN: Final = 50

Shown = tuple[dict[str, str], dict[str, Any]]
"""The changing parts of a page: HTML by the id of their element, and the lines to draw by chart."""

_TITLES: Final = {
    "facts": "At a glance",
    "goodput": "Goodput",
    "steps": "Steps",
    "restarts": "Restores",
    "lost": "Skipped and discarded steps",
    "time": "Step time",
    "drives": "Drives",
    "tiers": "Peers and archive",
}
"""The sections of a run, in order; each has a template."""
_LABELS: Final = {
    "steps": "Chart of steps over time, by the tier they reached; the table has those held now",
    "time": "Chart of the time of a step, with and without keepstep; the text says it of now",
}
"""By section with a chart: the text for screen readers."""


class Pages:
    """Pages of the runs in one place. `place`: its name. `text` makes text of unknown origin safe
    to show."""

    def __init__(self, *, place: str, text: Callable[[str], str]) -> None:
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # text that is already escaped is markup of keepstep, not text of unknown origin
            finalize=lambda value: text(value) if type(value) is str else value,
        )
        self._templates.globals |= {"version": __version__, "place": place}
        filters: Mapping[str, Callable[..., Any]] = {
            "iso": _iso,
            "size": format_size,
            "duration": format_duration,
            "ms": _ms,
            "cost": _cost,
        }
        self._templates.filters |= filters

    def index(self, views: Sequence[RunPage]) -> str:
        """All runs, as a whole page."""
        return self._render("index.html", sections=self.index_sections(views)[0])

    def index_sections(self, views: Sequence[RunPage]) -> Shown:
        """The changing parts of the page of all runs."""
        rows = [_safely(lambda run: self._render("row.html", run=run), view) for view in views]
        return {"runs": self._render("sections/runs.html", rows=rows)}, {}

    def run(self, view: RunPage) -> str:
        """One run, as a whole page."""
        sections, _ = self.run_sections(view)
        return self._render("run.html", run=view, titles=_TITLES, charts=_LABELS, sections=sections)

    def run_sections(self, view: RunPage) -> Shown:
        """The changing parts of the page of one run."""
        return _safely(self._run_sections, view)

    def _run_sections(self, view: RunPage) -> Shown:
        newest_first = sorted(view.steps, key=lambda step: step.id, reverse=True)
        known = {
            "run": view,
            "steps": newest_first[:STEPS_SHOWN],
            "tiers": [
                tier for tier in NEAREST_FIRST if any(tier in step.ranks for step in view.steps)
            ],
            "restores": run_figures.shown_restores(view.events)[: -ROWS_SHOWN - 1 : -1],
            "lost": run_figures.lost_step_events(view.events)[: -ROWS_SHOWN - 1 : -1],
            "usual": run_figures.median_step_time(run_figures.step_times(view.events)),
        }
        names = ("state", "problems", *_TITLES)
        sections = {name: self._render(f"sections/{name}.html", **known) for name in names}
        return sections, dict(run_figures.chart_lines(view))

    def missing(self, name: str) -> str:
        """The page that says that there is no such run."""
        return self._render("missing.html", name=name)

    def _render(self, template: str, **known: Any) -> str:
        return self._templates.get_template(template).render(known)


def _safely(make: Callable[[RunPage], T], view: RunPage) -> T:
    try:
        return make(view)
    except Exception as error:
        unreadable = f"it has values that cannot be shown: {type(error).__name__}: {error}"
        return make(RunPage(name=view.name, error=unreadable))


def _iso(unix_s: float) -> str:
    """The time to the second, in UTC."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(sep=" ", timespec="seconds")


def _cost(seconds: float) -> str:
    """A part of an interruption: `0.03 s`, `2m05s`."""
    return f"{seconds:.2f} s" if seconds < 10 else format_duration(seconds)


def _ms(seconds: float) -> str:
    """Three digits: `0.52 ms`, `12.3 ms`, `140 ms`."""
    value = 1000 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"
