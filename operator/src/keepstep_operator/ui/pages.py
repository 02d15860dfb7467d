"""What the page shows of a CheckpointRun: values from its status, and their HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from keepstep_operator.api.run import RunStatus, read_status, seconds_of
from keepstep_operator.bodies import Body
from keepstep_operator.kubectl import views
from keepstep_page.pages import Charts, Pages

_STATES: Final = {
    "Running": ("training", "It trains."),
    "Restoring": ("waiting", "Ranks come back from a restart."),
    "Waiting": ("waiting", "No sidecar has reported yet."),
    "Finished": ("stopped", "The job is over."),
}
"""By phase: a word, which has a colour, and a sentence."""


POINTS: Final = 400
"""The most commits that are remembered of a run."""

Point = tuple[float, float]
"""Unix seconds, and the number of a step."""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """What is shown of one run. `steps`: the steps that the API knows of, newest first; see
    `views.steps`. `commits`: the commits that were seen, oldest first. `made`: when each Checkpoint
    was created, by step."""

    name: str
    status: RunStatus = field(default_factory=RunStatus)
    steps: tuple[Body, ...] = ()
    commits: tuple[Point, ...] = ()
    made: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def state(self) -> str:
        return "unreadable" if self.error else _STATES.get(self.status.phase, ("waiting", ""))[0]

    @property
    def state_text(self) -> str:
        if self.error:
            return "This run cannot be read."
        return _STATES.get(self.status.phase, ("", self.status.phase))[1]

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self.status.warnings)

    @property
    def committed_at(self) -> float | None:
        """When the newest step was committed, in unix seconds."""
        return None if self.status.committed is None else seconds_of(self.status.committed.time)

    @property
    def badput(self) -> list[tuple[str, int]]:
        """The buckets with their seconds, the largest first; empty ones are left out."""
        if self.status.goodput is None:
            return []
        spent = msgspec.structs.asdict(self.status.goodput.badput_seconds)
        named = [(name.replace("_", " "), seconds) for name, seconds in spent.items() if seconds]
        return sorted(named, key=lambda one: -one[1])


def view_of(run: Body, checkpoints: Sequence[Body], before: RunPage | None = None) -> RunPage:
    """The view of a CheckpointRun and its Checkpoints. Invalid content becomes an error on the
    page. `before`: the former view."""
    name = str(run["metadata"]["name"])
    try:
        found = tuple(views.steps(run, checkpoints))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return RunPage(name=name, error=f"its status makes no sense: {error}")
    status = read_status(run.get("status") or {})
    times = {str(one["spec"]["step"]): _made_at(one) for one in checkpoints}
    return RunPage(
        name=name,
        status=status,
        steps=found,
        commits=_with(status, before.commits if before else ()),
        made={step: at for step, at in times.items() if at is not None},
    )


def _made_at(checkpoint: Body) -> float | None:
    return seconds_of(str(checkpoint["metadata"].get("creationTimestamp", "")))


def _with(status: RunStatus, commits: tuple[Point, ...]) -> tuple[Point, ...]:
    """The commits, plus the one in the status."""
    if status.committed is None or (at := seconds_of(status.committed.time)) is None:
        return commits
    point = at, float(status.committed.step)
    return commits if point in commits[-1:] else (*commits, point)[-POINTS:]


class ClusterPages(Pages[RunPage]):
    """The pages of one namespace."""

    templates = Path(__file__).parent / "templates"
    titles: ClassVar[Mapping[str, str]] = {
        "facts": "At a glance",
        "steps": "Steps",
        "recent": "What happened",
        "places": "Pods and nodes",
        "conditions": "Conditions",
    }
    labels: ClassVar[Mapping[str, str]] = {
        "steps": "Chart of steps over time: commits since somebody looks, Checkpoints by the tiers"
        " that hold them, and restores; the tables have the same",
    }

    def __init__(self, namespace: str) -> None:
        super().__init__(
            place=f"namespace {namespace}", text=printable, filters={"unix": seconds_of}
        )

    def known(self, view: RunPage) -> dict[str, Any]:
        return {"tiers": views.TIERS}

    def charts(self, view: RunPage) -> Charts:
        lines: dict[str, Any] = {"committed": _line(view.commits)}
        for tier in views.TIERS[1:]:
            held = [one for one in view.steps if tier in one["tiers"]]
            lines[tier] = _line(
                (view.made[one["id"]], float(one["step"])) for one in held if one["id"] in view.made
            )
        lines["restored"] = _line(
            (at, float(one.step))
            for one in view.status.recent
            if one.seconds is not None  # a restart
            if one.step is not None and (at := seconds_of(one.time)) is not None
        )
        return {"steps": lines}

    def refused(self, title: str, text: str, *, command: str = "") -> str:
        """A page that says why the wanted one is refused. `command`: what an administrator can run
        about it."""
        return self.render("refused.html", title=title, text=text, command=command)


def _line(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    """The points as page.js draws them: ascending in time."""
    ordered = sorted(points)
    return [at for at, _ in ordered], [step for _, step in ordered]


def printable(text: str) -> str:
    """The text of a pod without characters that could reorder or hide others."""
    return "".join(one if one.isprintable() or one in "\t\n" else "\ufffd" for one in text)
