"""Writes the table of values in the chart's README from values.yaml, and packages the chart.

`make chart` does both, `python scripts/chart_reference.py` only the README. A test compares the
README with values.yaml.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "keepstep"
PLACE = CHART / "README.md"
BEGIN, END = "<!-- values:begin -->\n", "<!-- values:end -->\n"

USUAL: Final = {
    "affinity", "interval", "nodeSelector", "podAnnotations", "podLabels", "priorityClassName",
    "resources", "tolerations",
}  # fmt: skip
"""Values that need no description, because every reader of a chart knows them."""

_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<said>.*)|(?P<key>[A-Za-z]+):.*)")


def readme() -> str:
    """The whole README, with the table that values.yaml makes."""
    head, _, rest = PLACE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{_table()}{END}{tail}"


def undescribed() -> list[str]:
    """The values that need a description and have none."""
    said = _said((CHART / "values.yaml").read_text())
    leaves = (path for path, _ in _leaves(_values(), ()))
    return [".".join(path) for path in leaves if path[-1] not in USUAL and not said.get(path)]


def _table() -> str:
    said = _said((CHART / "values.yaml").read_text())
    rows = [
        f"| `{'.'.join(path)}` | `{json.dumps(value)}` | {_cell(said.get(path, ''))} |"
        for path, value in _leaves(_values(), ())
    ]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows]) + "\n"


def _values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def _leaves(
    values: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in USUAL:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _said(text: str) -> dict[tuple[str, ...], str]:
    """The description of each value: the comment above it that begins with "# --"."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or not line.strip():
            words = []
        elif (said := match["said"]) is not None:
            words = (
                [said.removeprefix("-- ")] if said.startswith("-- ") else words and [*words, said]
            )
        else:
            path = [*path[: len(match["indent"]) // 2], match["key"]]
            found[tuple(path)] = " ".join(words)
            words = []
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PLACE.write_text(readme())
    print(f"{PLACE.relative_to(ROOT)} written")
    if sys.argv[1:] == ["package"]:
        (ROOT / "build").mkdir(exist_ok=True)
        packed = Path(helm_python.package(CHART, destination=ROOT / "build"))
        print(
            f"{packed.relative_to(ROOT)} written; publish: helm push {packed.name} oci://REGISTRY"
        )
