"""Copies tables of results into README and docs/measured.md.

Call `python -m bench.readme BARS.md PEERS.md` after runs that should be shown. Both may be the same
file. No figure in these pages is typed by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from bench.processes import ROOT

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def bars_of(report: Path) -> str:
    """The part for docs/measured.md: the machine, and a table of floors and bars for each size of
    pages."""
    text = report.read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.M))
    machine = f"{rows['processor']}, {rows['memory']}, {rows['volume']}"
    where = f"../{report.resolve().relative_to(ROOT)}"
    made = f"medians over {rows['rounds']} rounds of `{rows['command']}` ([all of it]({where}))"
    intro = f"{machine}. Against the floors and the bars, {made}:"
    return "\n\n".join([intro, *(f"{head}:\n\n{table}" for head, table in _tables(text, "Bars"))])


def peers_of(report: Path) -> str:
    """The part for README: the table of other tools."""
    ((heading, table),) = _tables(report.read_text(), "Beside its peers")
    intro = (
        f"{heading.partition(', ')[2]}, medians. *Blocked*: what the training thread pays for one"
        " save; *lost*: training time lost while the step is persisted, with compute on every core."
        f" [All runs and their commands]({report.resolve().relative_to(ROOT)})."
    )
    return f"{intro}\n\n{table}"


def _tables(report: str, title: str) -> list[tuple[str, str]]:
    """Heading and first table of each section whose heading begins with `title`."""
    found = re.findall(rf"^## ({title}.*?)\n.*?^(\|.*?)\n\n", report, re.S | re.M)
    assert found, f"no table {title!r}"
    return found


def main() -> None:
    bars, peers = map(Path, sys.argv[1:])
    for page, text in (("README.md", peers_of(peers)), ("docs/measured.md", bars_of(bars))):
        path = ROOT / page
        head, rest = path.read_text().split(BEGIN)
        path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
