"""Copies the tables of the newest results into README, between its two marks.

`python -m bench.readme` after a run that should be shown; nothing in README is typed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def block(report: str, *, name: str) -> str:
    """The part of a report that README shows. `name`: the report's file name."""
    command = _row(report, "command")
    machine = f"{_row(report, 'processor')}, {_row(report, 'memory')}, {_row(report, 'volume')}"
    bars = re.search(r"## Bars.*?(\|.*?)\n\n", report, re.S)
    peers = re.search(r"## Beside its peers.*?\n(\|.*?)\n\n", report, re.S)
    assert bars, "no table of bars"
    assert peers, "no table of peers"
    return "\n\n".join(
        (
            f"{machine}. Made by `{command}`; medians; rounds: {_row(report, 'rounds')}. All of it,"
            f" with plots and how figures grow: [bench/results/{name}](bench/results/{name}).",
            "2 GiB of state, against the floors and the bars:",
            bars[1],
            "Beside its peers (blocked: what the training thread pays for one save; lost: training"
            " time lost while 2 GiB are persisted, compute on both cores):",
            peers[1],
        )
    )


def _row(report: str, key: str) -> str:
    found = re.search(rf"^\| {key} \| (.*?) \|$", report, re.M)
    assert found, f"no {key!r} in the report"
    return found[1]


def main() -> None:
    report = max((ROOT / "bench" / "results").glob("*.md"), key=lambda one: one.stat().st_mtime)
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    shown = block(report.read_text(), name=report.name)
    readme.write_text(f"{head}{BEGIN}\n{shown}\n{END}{tail}")


if __name__ == "__main__":
    main()
