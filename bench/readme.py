"""Copies tables of results into README and docs/measured.md.

Call `python -m bench.readme BARS.md PEERS.md` after runs that should be shown. Both may be the same
file. No figure in these pages is typed by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def bars_of(report: Path) -> str:
    """The part for docs/measured.md: the machine, and a table of floors and bars for each size of
    pages."""
    text = report.read_text()
    machine = f"{_row(text, 'processor')}, {_row(text, 'memory')}, {_row(text, 'volume')}"
    made = _made(text, report, "../")
    intro = f"{machine}; 2 GiB of state. Against the floors and the bars, {made}:"
    tables = [f"{heading}:\n\n{table}" for heading, table in _tables(text, "Bars")]
    return "\n\n".join([intro, *tables])


def peers_of(report: Path) -> str:
    """The part for README: the table of other tools."""
    text = report.read_text()
    where = report.resolve().relative_to(ROOT)
    intro = (
        "2 GiB of state on two CPU cores, medians. *Blocked*: what the training thread pays for one"
        " save; *lost*: training time lost while the step is persisted, with compute on both cores."
        f" [All runs and their commands]({where})."
    )
    ((_, table),) = _tables(text, "Beside its peers")
    return f"{intro}\n\n{table}"


def _made(report: str, path: Path, up: str) -> str:
    where = f"{up}{path.resolve().relative_to(ROOT)}"
    command, rounds = _row(report, "command"), _row(report, "rounds")
    return f"medians over rounds ({rounds}) of `{command}` ([all of it]({where}))"


def _tables(report: str, title: str) -> list[tuple[str, str]]:
    """Heading and first table of each section whose heading begins with `title`."""
    found = re.findall(rf"^## ({title}.*?)\n.*?^(\|.*?)\n\n", report, re.S | re.M)
    assert found, f"no table {title!r}"
    return [(str(heading), str(table)) for heading, table in found]


def _row(report: str, key: str) -> str:
    found = re.search(rf"^\| {key} \| (.*?) \|$", report, re.M)
    assert found, f"no {key!r} in the report"
    return found[1]


def main() -> None:
    bars, peers = map(Path, sys.argv[1:])
    for page, text in (("README.md", peers_of(peers)), ("docs/measured.md", bars_of(bars))):
        path = ROOT / page
        head, rest = path.read_text().split(BEGIN)
        path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
