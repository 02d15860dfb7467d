"""docs/frameworks.md says of each adapter for which versions it is; the adapters refuse others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/frameworks.md").read_text()
PINS = dict(
    re.findall(r"^([a-z]+)==([0-9.]+)", (ROOT / "requirements-frameworks.txt").read_text(), re.M)
)


def ranges() -> list[tuple[str, str, str]]:
    """Package, at least, below: of each `require` in the adapters that names its package."""
    found = []
    for file in sorted((ROOT / "lib/src/keepstep/integrations").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"):
                continue
            bounds = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
            name = node.args[0]
            package = name.value if isinstance(name, ast.Constant) else file.stem
            found.append((str(package), bounds["at_least"], bounds["below"]))
    return found


def test_every_adapter_has_a_range() -> None:
    assert {package for package, _, _ in ranges()} == {
        "accelerate", "lightning", "torchtitan", "transformers",
    }  # fmt: skip


@pytest.mark.parametrize(("package", "least", "below"), ranges())
def test_the_table_names_the_range_and_tests_run_within_it(
    package: str, least: str, below: str
) -> None:
    assert f"{package} >= {least}, < {below}" in TABLE

    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    assert release(least) <= release(PINS[package]) < release(below)
