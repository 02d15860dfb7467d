"""Copies the tables of results into README, between its two marks.

`python -m bench.readme BARS.md PEERS.md` after runs that should be shown (one file twice is fine);
nothing in README is typed by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def block(bars: Path, peers: Path) -> str:
    """What README shows: the table of bars of one report, the table of peers of another."""
    ours, theirs = bars.read_text(), peers.read_text()
    machine = f"{_row(ours, 'processor')}, {_row(ours, 'memory')}, {_row(ours, 'volume')}"
    return "\n\n".join(
        (
            f"{machine}; 2 GiB of state. Against the floors and the bars, {_made(ours, bars)}:",
            _table(ours, "Bars"),
            "Beside its peers (blocked: what the training thread pays for one save; lost: training"
            f" time lost while it is persisted, compute on both cores), {_made(theirs, peers)}:",
            _table(theirs, "Beside its peers"),
        )
    )


def _made(report: str, path: Path) -> str:
    where = path.resolve().relative_to(ROOT)
    command, rounds = _row(report, "command"), _row(report, "rounds")
    return f"medians over rounds ({rounds}) of `{command}` ([all of it]({where}))"


def _table(report: str, title: str) -> str:
    found = re.search(rf"## {title}.*?\n(\|.*?)\n\n", report, re.S)
    assert found, f"no table {title!r}"
    return found[1]


def _row(report: str, key: str) -> str:
    found = re.search(rf"^\| {key} \| (.*?) \|$", report, re.M)
    assert found, f"no {key!r} in the report"
    return found[1]


def main() -> None:
    bars, peers = map(Path, sys.argv[1:])
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{block(bars, peers)}\n{END}{tail}")


if __name__ == "__main__":
    main()
