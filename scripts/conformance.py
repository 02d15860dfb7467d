"""The tables of docs/conformance.md: what a killed training is beside an undisturbed one.

The rows declare their results (tests/conformance/rows), and their tests fail unless exactly these
are seen. So the tables need no results of a test run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conformance.rows import every_row, packages  # noqa: E402
from tests.conformance.table import Result, Row  # noqa: E402


def render() -> str:
    """The tables, one for each kind."""
    rows = every_row()
    counted = Counter(row.keepstep for row in rows)
    words = ", ".join(f"{counted[result]} {result.value}" for result in Result if counted[result])
    better = sum(row.keepstep is Result.EQUAL is not row.control for row in rows)
    tables = [
        _table(kind, [row for row in rows if row.kind == kind and not _is_above(row)])
        for kind in dict.fromkeys(row.kind for row in rows)
    ]
    summary = f"{len(rows)} rows: {words}. In {better} of the equal ones `torch.save` is not equal."
    return "\n".join([summary, "", _optimizers(rows), *tables])


def _table(kind: str, rows: list[Row]) -> str:
    lines = [
        f"## {kind}\n",
        "| what | `torch.save` | keepstep | reason |",
        "| --- | --- | --- | --- |",
    ]
    if any(row.packages for row in rows):
        pins = _versions()
        names = dict.fromkeys(name for row in rows for name in row.packages)
        lines.insert(1, "With " + ", ".join(f"{name} {pins[name]}" for name in names) + ".\n")
    for row in rows:
        cells = (row.what, row.control.value, row.keepstep.value, row.reason)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_EQUAL = {Result.EQUAL: "yes", Result.AS_CONTROL: "as with `torch.save`"}


def _is_above(row: Row) -> bool:
    """Whether the table of optimizers says it all."""
    return bool(row.optimizer and row.packages)


def _optimizers(rows: tuple[Row, ...]) -> str:
    """A line for all optimizers of one package that have one result, for one reason."""
    pins = _versions()
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        if row.optimizer:
            package = (*row.packages, "torch")[0]
            name, _, option = row.optimizer.partition(", with ")
            kept = f"with `{option}`" if option else "yes"
            key = (package, pins[package], kept, _EQUAL[row.keepstep], row.reason)
            found.setdefault(key, {})[f"`{name}`"] = None
    for (package, name), why in packages.UNTRIED.items():
        found.setdefault((package, pins[package], "not tried", "", why), {})[f"`{name}`"] = None
    lines = [
        "## Optimizers\n",
        "Each with a row of its own, killed and compared on a CPU.\n",
        "| package | tested version | optimizers | kept | bit-equal | note |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (package, version, kept, equal, why), names in found.items():
        cells = (package, version, ", ".join(names), kept, equal, why)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    text = (ROOT / "requirements-frameworks.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
