"""HTML of the page, from jinja2 templates that escape whatever they are given.

A page is made of sections, and a viewer is sent those that differ from what it shows: so nothing is
worked out in the browser, and a browser without scripts shows the same, once.
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
"""Lines by chart and name, as page.js draws them."""


class View(Protocol):
    """What every page shows of a run; its own sections show more."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str:
        """In a word, which has a colour: training | waiting | stopped | unreadable."""
        ...

    @property
    def state_text(self) -> str:
        """In a sentence, without anything that changes at every step: it is read out loud."""
        ...

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at."""
        ...

    @property
    def error(self) -> str:
        """Why nothing of it could be read."""
        ...


V = TypeVar("V", bound=View)


class Pages(Generic[V]):
    """Of runs in one place, `place` by name.

    `templates`: the directory with `sections/runs.html` and one for each of `titles`, which are the
    sections of a run in order. `labels`: what a reader of the screen is told of the chart in that
    section. `text` makes text of unknown origin fit to be shown.
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
            # what is escaped already is markup, no text of somebody's
            finalize=lambda value: text(value) if type(value) is str else value,
        )
        self._templates.globals |= {"version": __version__, "place": place}
        self._templates.filters |= {"iso": _iso, **filters}

    def known(self, view: V) -> dict[str, Any]:
        """What the templates of a run's sections are given beside `run`."""
        raise NotImplementedError

    def charts(self, view: V) -> Charts:
        """Of a run."""
        raise NotImplementedError

    def index(self, views: Sequence[V]) -> str:
        """All runs, as a whole page."""
        return self.render("index.html", sections=self.index_sections(views))

    def index_sections(self, views: Sequence[V]) -> dict[str, str]:
        """What of it changes, by the id of its element."""
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
        """What of it changes, by the id of its element."""
        known = {"run": view, **self.known(view)}
        names = ("state", "problems", *self.titles)
        return {name: self.render(f"sections/{name}.html", **known) for name in names}

    def missing(self, name: str) -> str:
        """There is no such run."""
        return self.render("missing.html", name=name)

    def render(self, template: str, **known: Any) -> str:
        return self._templates.get_template(template).render(known)


def _iso(unix_s: float) -> str:
    """To the second, in UTC."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
