"""Sections of a run of this machine: what its page shows besides what every page shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from keepstep.core.history import Restart
from keepstep.steps import NEAREST_FIRST
from keepstep_page.pages import Charts, Pages
from keepstep_sidecar.config.quantities import format_duration, format_size
from keepstep_sidecar.ui import timeline
from keepstep_sidecar.ui.view import RunPage, ranks_on

STEPS_SHOWN: Final = 100
ROWS_SHOWN: Final = 50


class MachinePages(Pages[RunPage]):
    """`place`: the directory whose runs are shown."""

    templates = Path(__file__).parent / "templates"
    titles: ClassVar[Mapping[str, str]] = {
        "facts": "At a glance",
        "goodput": "Goodput",
        "steps": "Steps",
        "restarts": "Restores",
        "lost": "Skipped and discarded steps",
        "time": "Step time",
        "drives": "Drives",
        "depots": "Peers and archive",
    }
    labels: ClassVar[Mapping[str, str]] = {
        "steps": "Chart of steps over time, by the tier they reached; the table has those held now",
        "time": "Chart of the time of a step, with and without keepstep; the text says it of now",
    }

    def __init__(self, **options: Any) -> None:
        filters: Mapping[str, Callable[..., Any]] = {
            "size": format_size,
            "duration": format_duration,
            "total": _total_s,
            "ms": _ms,
            "cost": _cost,
        }
        super().__init__(filters=filters, **options)

    def known(self, view: RunPage) -> dict[str, Any]:
        newest_first = sorted(view.steps, key=lambda step: step.id, reverse=True)
        return {
            "steps": newest_first[:STEPS_SHOWN],
            "tiers": [
                tier for tier in NEAREST_FIRST if any(ranks_on(one, tier) for one in view.steps)
            ],
            "ranks_on": ranks_on,
            "restores": timeline.restores(view.events)[: -ROWS_SHOWN - 1 : -1],
            "lost": timeline.lost(view.events)[: -ROWS_SHOWN - 1 : -1],
            "usual": timeline.usual(timeline.step_times(view.events)),
        }

    def charts(self, view: RunPage) -> Charts:
        return {chart: {**lines} for chart, lines in timeline.charts(view).items()}


def _cost(seconds: float) -> str:
    """A part of an interruption: `0.03 s`, `2m05s`."""
    return f"{seconds:.2f} s" if seconds < 10 else format_duration(seconds)


def _ms(seconds: float) -> str:
    """Three digits: `0.52 ms`, `12.3 ms`, `140 ms`."""
    value = 1000 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def _total_s(one: Restart) -> float:
    return one.detection_s + one.start_s + one.restore_s + one.first_step_s
