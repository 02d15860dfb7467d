"""What is shown of a CheckpointRun: values from its status, and HTML of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""By phase: the word that has a colour, and a sentence."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """`steps`: those that the API knows of, newest first, see `views.steps`."""

    name: str
    status: RunStatus = field(default_factory=RunStatus)
    steps: tuple[Body, ...] = ()
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
        """Unix seconds."""
        return None if self.status.committed is None else seconds_of(self.status.committed.time)

    @property
    def badput(self) -> list[tuple[str, int]]:
        """Buckets with the seconds that went into them, the largest first."""
        if self.status.goodput is None:
            return []
        spent = msgspec.structs.asdict(self.status.goodput.badput_seconds)
        named = [(name.replace("_", " "), seconds) for name, seconds in spent.items() if seconds]
        return sorted(named, key=lambda one: -one[1])


def view_of(run: Body, checkpoints: Sequence[Body]) -> RunView:
    """Of an object and the Checkpoints of its run. What does not fit is an error on the page."""
    name = str(run["metadata"]["name"])
    try:
        found = tuple(views.steps(run, checkpoints))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return RunView(name=name, error=f"its status makes no sense: {error}")
    return RunView(name=name, status=read_status(run.get("status") or {}), steps=found)


class ClusterPages(Pages[RunView]):
    """`namespace`: whose runs are shown."""

    templates = Path(__file__).parent / "templates"
    titles: ClassVar[Mapping[str, str]] = {
        "facts": "At a glance",
        "steps": "Steps",
        "recent": "What happened",
        "places": "Pods and nodes",
        "conditions": "Conditions",
    }
    labels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, namespace: str) -> None:
        super().__init__(
            place=f"namespace {namespace}", text=printable, filters={"unix": seconds_of}
        )

    def known(self, view: RunView) -> dict[str, Any]:
        return {"tiers": views.TIERS}

    def charts(self, view: RunView) -> Charts:
        return {}

    def refused(self, title: str, text: str, *, command: str = "") -> str:
        """A page that says why there is no other. `command`: what somebody else may do about it."""
        return self.render("refused.html", title=title, text=text, command=command)


def printable(text: str) -> str:
    """What a pod has said: no character that reorders or hides others."""
    return "".join(one if one.isprintable() or one in "\t\n" else "\ufffd" for one in text)
