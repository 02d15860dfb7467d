"""The table of docs/frameworks.md is what frameworks.json proves. Adapters refuse versions outside
their range."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import frameworks

ROOT = Path(__file__).parents[2]
PINS = dict(
    re.findall(
        r"^([a-z-]+)==([0-9.]+)", (ROOT / "requirements-frameworks.txt").read_text(), re.MULTILINE
    )
)
RESULTS = json.loads(frameworks.RESULTS.read_text())


def test_the_page_shows_what_was_proved() -> None:
    page = frameworks.PAGE.read_text()
    assert frameworks.place(page, frameworks.render(RESULTS)) == page, (
        "run: make test-frameworks; python scripts/frameworks.py build/junit-frameworks.xml"
    )


def test_every_row_is_proved_by_tests_with_the_versions_that_are_installed() -> None:
    assert RESULTS.keys() == frameworks.ROWS.keys()
    for key, row in frameworks.ROWS.items():
        versions = {one: PINS[one] for one in ("torch", *row.packages)}
        assert RESULTS[key]["versions"] == versions, key
        assert RESULTS[key]["compared"].keys() <= frameworks.WORDS.keys(), key
        assert {"losses", "weights", "optimizer", "random"} <= RESULTS[key]["compared"].keys()


def test_every_row_is_named_by_a_test() -> None:
    marks = re.compile(r'mark\.proves\("(\w+)"')
    named = {
        row
        for file in (ROOT / "tests" / "frameworks").glob("test_*.py")
        for row in marks.findall(file.read_text())
    }
    assert named == frameworks.ROWS.keys()


def test_every_adapter_has_a_range() -> None:
    assert {package for package, _, _ in frameworks.ranges()} == {
        "accelerate", "deepspeed", "lightning", "torchtitan", "transformers", "trl",
    }  # fmt: skip


@pytest.mark.parametrize(("package", "least", "below"), frameworks.ranges())
def test_the_table_names_the_range_and_tests_run_within_it(
    package: str, least: str, below: str
) -> None:
    assert f"{package} >= {least}, < {below}" in frameworks.render(RESULTS)

    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    assert release(least) <= release(PINS[package]) < release(below)


def junit(path: Path, *cases: tuple[dict[str, Any], str]) -> Path:
    """Write a JUnit file like pytest's. A case is what the test recorded, and the other contents of
    its element."""
    body = "".join(
        f"<testcase name='{number}'><properties>"
        + "".join(f"<property name='{key}' value='{value}'/>" for key, value in told.items())
        + f"</properties>{more}</testcase>"
        for number, (told, more) in enumerate(cases)
    )
    path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return path


TOLD = {
    "proves": "fabric",
    "versions": '{"torch": "2.13.0"}',
    "ranks": "1 rank",
    "compared": '["losses", "weights"]',
}


def test_only_what_passed_and_says_what_it_compared_proves_a_row(tmp_path: Path) -> None:
    two = {**TOLD, "ranks": "2 ranks by DDP", "compared": '["losses"]'}
    path = junit(tmp_path / "all.xml", (TOLD, ""), (TOLD, "<failure/>"), ({}, ""), (two, ""))
    proved = frameworks.collect([path])
    assert proved == {
        "fabric": {
            "versions": {"torch": "2.13.0"},
            "tests": 2,
            "ranks": {"1 rank": 1, "2 ranks by DDP": 1},
            "compared": {"losses": 2, "weights": 1},
        }
    }
    table = frameworks.render(proved).splitlines()
    assert len(table) == 3
    assert "| losses of all micro-batches (and so the order of the data), weights |" in table[2]
    assert "torch 2.13.0; CPU; 1 rank, 2 ranks by DDP; 2 tests" in table[2]


def test_a_difference_from_what_is_kept_is_named(tmp_path: Path) -> None:
    path = junit(tmp_path / "some.xml", (TOLD, ""))
    with pytest.raises(SystemExit) as refused:
        frameworks.main(["--check", str(path)])
    assert "transformers: tests: now None, in frameworks.json" in str(refused.value)
    assert f"python scripts/frameworks.py {path}" in str(refused.value)
    assert not frameworks.differences(RESULTS, json.loads(json.dumps(RESULTS)))
