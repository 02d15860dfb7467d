"""Writes README's table of guarantees from test results: what is lost when what dies.

    python scripts/guarantees.py build/junit-*.xml    # after make test and make e2e

Each row names the tests that prove it, and stands in the table only if all of them passed; the
steps lost are what those tests measured (`record_property("lost_steps", ...)`). The results are in
docs/guarantees.json; a test compares README with them.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "guarantees.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- guarantees:begin -->", "<!-- guarantees:end -->"


@dataclass(frozen=True)
class Row:
    """What dies, under which policy, from where the run goes on, and the tests that show it."""

    dies: str
    policy: str
    goes_on_from: str
    tests: tuple[str, ...]


ROWS = (
    Row(
        "a trainer (SIGKILL, OOM, exception)",
        "any",
        "memory",
        (
            "tests.e2e.test_2_container_killed::test_a_killed_trainer_restarts_in_place_and_goes_on_from_memory",
        ),
    ),
    Row(
        "a sidecar",
        "any",
        "training goes on; sealed slots are adopted",
        (
            "tests.e2e.test_2_container_killed::test_a_killed_sidecar_comes_back_while_training_goes_on",
        ),
    ),
    Row(
        "a pod, made again on its node",
        "`hostPath`",
        "the node's volume, flushed at the pod's end",
        (
            "tests.e2e.test_3_pods_deleted::test_a_deleted_pod_flushes_and_its_successor_restores_that_step",
        ),
    ),
    Row(
        "the operator, the API server, etcd",
        "any",
        "training goes on; restarts agree among the ranks",
        (
            "tests.e2e.test_4_operator_away::test_pods_restart_by_agreement_while_the_operator_is_down",
            "tests.e2e.test_4_operator_away::test_etcd_and_the_api_server_are_killed_and_nothing_stops",
        ),
    ),
    Row(
        "a shard's bytes (bit rot)",
        "any",
        "the next tier or step that verifies; never those bytes",
        (
            "tests.sidecar.test_restart::test_a_damaged_shard_is_quarantined_and_never_a_silent_fresh_start",
        ),
    ),
)


def read(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Test -> its outcome and what it recorded, from pytest's JUnit files."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
            recorded = {one.get("name"): one.get("value") for one in case.iter("property")}
            lost = recorded.get("lost_steps")
            found[name] = {
                "outcome": bad[0] if bad else "passed",
                **({"lost_steps": int(lost)} if lost else {}),
            }
    return found


def collect(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results that the rows need. Raises SystemExit naming what is missing or failed."""
    needed = [name for row in ROWS for name in row.tests]
    wrong = [
        f"{name}: {results[name]['outcome'] if name in results else 'did not run'}"
        for name in needed
        if results.get(name, {}).get("outcome") != "passed"
    ]
    if wrong:
        raise SystemExit("not proved:\n  " + "\n  ".join(wrong))
    return {name: results[name] for name in needed}


def render(results: dict[str, dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "| what dies | policy | finished steps lost | goes on from |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        lost = [results[one]["lost_steps"] for one in row.tests if "lost_steps" in results[one]]
        said = str(max(lost)) if lost else "none"
        lines.append(f"| {row.dies} | {row.policy} | {said} | {row.goes_on_from} |")
    return "\n".join(lines)


def place(readme: str, table: str) -> str:
    """README with this table between its marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main(paths: list[str]) -> None:
    """Read results, write docs/guarantees.json and README."""
    if not paths:
        raise SystemExit(__doc__)
    results = collect(read(map(Path, paths)))
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    README.write_text(place(README.read_text(), render(results)))


if __name__ == "__main__":
    main(sys.argv[1:])
