"""HTML of the page, from jinja2 templates that escape everything they are given.

A page consists of sections, and a viewer is sent the sections that differ from what it shows. So
the browser computes nothing, and a browser without scripts shows the same page, but only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from keepstep.version import __version__

_HERE: Final = Path(__file__).parent
STATIC: Final = _HERE / "static"

Charts = dict[str, dict[str, Any]]
"""The lines to draw, by chart and name, in the form that page.js needs."""


class View(Protocol):
    """What every page shows of a run. The sections of sidecar and operator show more."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str:
        """The state in one word, which has a color: training | waiting | stopped | unreadable."""
        ...

    @property
    def state_text(self) -> str:
        """The state in one sentence. It contains nothing that changes at every step, because screen
        readers read it out loud.
        """
        ...

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems that need attention."""
        ...

    @property
    def error(self) -> str:
        """Why nothing of the run could be read."""
        ...


V = TypeVar("V", bound=View)


class Pages(Generic[V]):
    """Pages of the runs in one place. `place`: the name of the place.

    `templates`: a directory with `sections/runs.html` and a template for each of `titles`.
    `titles`: the sections of a run, in order. `labels`: for the chart of a section, the text for
    screen readers. `text` makes text of unknown origin safe to show.
    """

    templates: ClassVar[Path]
    titles: ClassVar[Mapping[str, str]]
    labels: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        *,
        place: str,
        text: Callable[[str], str] = str,
        filters: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._templates = Environment(
            loader=FileSystemLoader([self.templates, _HERE / "templates"]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # text that is already escaped is markup of keepstep, not text of unknown origin
            finalize=lambda value: text(value) if type(value) is str else value,
        )
        self._templates.globals |= {"version": __version__, "place": place}
        self._templates.filters |= {"iso": _iso, **filters}

    def known(self, view: V) -> dict[str, Any]:
        """What the templates of a run's sections get, besides `run`."""
        raise NotImplementedError

    def charts(self, view: V) -> Charts:
        """The charts of a run."""
        raise NotImplementedError

    def index(self, views: Sequence[V]) -> str:
        """All runs, as a whole page."""
        return self.render("index.html", sections=self.index_sections(views))

    def index_sections(self, views: Sequence[V]) -> dict[str, str]:
        """The changing parts of the page of all runs, by the id of their element."""
        return {"runs": self.render("sections/runs.html", runs=views)}

    def run(self, view: V) -> str:
        """One run, as a whole page."""
        return self.render(
            "run.html",
            run=view,
            titles=self.titles,
            charts=self.labels,
            sections=self.run_sections(view),
        )

    def run_sections(self, view: V) -> dict[str, str]:
        """The changing parts of the page of one run, by the id of their element."""
        known = {"run": view, **self.known(view)}
        names = ("state", "problems", *self.titles)
        return {name: self.render(f"sections/{name}.html", **known) for name in names}

    def missing(self, name: str) -> str:
        """The page that says that there is no such run."""
        return self.render("missing.html", name=name)

    def render(self, template: str, **known: Any) -> str:
        return self._templates.get_template(template).render(known)


def _iso(unix_s: float) -> str:
    """The time to the second, in UTC."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
