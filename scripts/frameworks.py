"""Writes the first table of docs/frameworks.md: what the tests of each framework found to be equal.

    python scripts/frameworks.py [JUNIT.xml]

With a report of `make test-frameworks`, or of a part of it, what its tests found and the versions
of the environment first go into tests/frameworks/results.json: start it in that environment then.
What no test can find (names, lines, how many people use it) is in scripts/frameworks.toml. A test
compares the page with both.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from keepstep.integrations import TESTED  # noqa: E402

PAGE = ROOT / "docs" / "frameworks.md"
ROWS = ROOT / "scripts" / "frameworks.toml"
RESULTS = ROOT / "tests" / "frameworks" / "results.json"
BEGIN, END = "<!-- frameworks:begin -->", "<!-- frameworks:end -->"

Results = dict[str, dict[str, dict[str, Any]]]
"""By file of tests: `versions` of packages, and `tests` with what each found to be the same."""


def reference() -> str:
    """The page with the table as it is to be."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{_table()}{END}{rest.split(END)[1]}"


def _table() -> str:
    given, results = tomllib.loads(ROWS.read_text()), json.loads(RESULTS.read_text())
    rows = sorted(given["row"], key=lambda row: row.get("rank", 15_001))
    equal = [_equal(row, given["same"], results) for row in rows]
    every = [name for name in equal[0] if all(name in here for here in equal)]
    head = ("framework", "line", "equal beside these", "tested with", "tested releases", "rank")
    lines = [head, ("---",) * len(head)]
    for row, here in zip(rows, equal, strict=True):
        rest = ", ".join(name for name in here if name not in every)
        rank = f"{row['rank']:,}" if "rank" in row else "none"
        lines.append((row["name"], row["line"], rest, *_tested(row, results), rank))
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"After a kill, bit-equal in all rows: {', '.join(every)}.\n\n{table}"


def _found(row: dict[str, Any], results: Results) -> list[dict[str, Any]]:
    """What each test of a row found."""
    selected = [test.partition("::") for test in row["tests"]]
    return [
        found
        for file, _, begin in selected
        for test, found in results[file]["tests"].items()
        if test.startswith(begin)
    ]


def _equal(row: dict[str, Any], words: dict[str, str], results: Results) -> list[str]:
    same = {name for record in _found(row, results) for name in record.get("same", "").split()}
    return list(dict.fromkeys(text for name, text in words.items() if name in same and text))


def _tested(row: dict[str, Any], results: Results) -> tuple[str, str]:
    found, versions = _found(row, results), set()
    for file in {test.partition("::")[0] for test in row["tests"]}:
        packages = results[file]["versions"].items()
        versions |= {
            f"{package} {is_}"
            for package, is_ in packages
            if package in ("torch", *row["packages"])
        }
    several = row.get("ranks")
    ranks = ["1 rank"] * any(record.get("ranks") == 1 for record in found) + [several] * bool(
        several
    )
    tests = f"{len(found)} test{'s' * (len(found) != 1)}"
    within = "; ".join([", ".join(sorted(versions)), "CPU", ", ".join(ranks), tests])
    ranges = [(package, TESTED.get(package.replace("-", "_"))) for package in row["packages"]]
    tried = "; ".join(
        f"{package} {' to '.join(dict.fromkeys(both))}" for package, both in ranges if both
    )
    return within, row.get("releases") or tried or "not looked at"


def take(report: Path) -> None:
    """The tests of a report replace what was known of them."""
    sys.path.append(str(Path(sys.prefix) / "vision"))  # see requirements-vision.txt
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = tomllib.loads(ROWS.read_text())["row"]
    packages: dict[str, set[str]] = {}
    for row in rows:
        for test in row["tests"]:
            packages.setdefault(test.partition("::")[0], {"torch"}).update(row["packages"])
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2] + ".py"
        if file not in packages:
            continue
        versions = {
            package: metadata.version(package).partition("+")[0]
            for package in sorted(packages[file])
        }
        if results.get(file, {}).get("versions") != versions:
            results[file] = {"versions": versions, "tests": {}}
        known = {
            element.attrib["name"]: element.attrib["value"] for element in case.iter("property")
        }
        tests, name = results[file]["tests"], case.attrib["name"]
        tests.pop(name, None)
        if not any(case.find(tag) is not None for tag in ("failure", "error", "skipped")):
            same = {"ranks": max(map(int, known["ranks"].split()))} if "ranks" in known else {}
            tests[name] = same | ({"same": known["same"]} if "same" in known else {})
    for file, here in results.items():
        here["tests"] = {test: same for test, same in here["tests"].items() if _is_in(file, test)}
    RESULTS.write_text(_text(results))


def _is_in(file: str, test: str) -> bool:
    return f"def {test.partition('[')[0]}(" in (RESULTS.parent / file).read_text()


def _text(results: Results) -> str:
    """A line for each test, so that the changes of two branches merge."""
    files = []
    for file, here in sorted(results.items()):
        tests = [f"{json.dumps(test)}: {json.dumps(same)}" for test, same in here["tests"].items()]
        versions, lines = json.dumps(here["versions"]), ",\n   ".join(sorted(tests))
        files.append(f'"{file}": {{"versions": {versions}, "tests": {{\n   {lines}}}}}')
    return "{" + ",\n ".join(files) + "}\n"


def unknown() -> list[str]:
    """Tests in the results that the files do not have."""
    return [
        f"{file}::{test}"
        for file, here in json.loads(RESULTS.read_text()).items()
        for test in here["tests"]
        if not _is_in(file, test)
    ]


if __name__ == "__main__":
    for report in sys.argv[1:]:
        take(Path(report))
    PAGE.write_text(reference())
