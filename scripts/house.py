"""Measures the size and the structure of the code ("the house") against limits.

`python scripts/house.py` prints each figure and its limit. It exits with 1 if a figure exceeds its
limit.

The floors of the house are the length of the longest chain of packages of the sidecar in which each
imports the next one. `tests/core/test_house.py` checks the figures of the structure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, SIDECAR = ROOT / "lib/src/keepstep", ROOT / "sidecar/src/keepstep_sidecar"


SEALED_TO_COMMITTED = (
    "keepstep_sidecar/commit/committer.py",
    "keepstep/core/node.py",
    "keepstep/core/persist_planner.py",
    "keepstep_sidecar/volume/volume_set.py",
    "keepstep_sidecar/volume/volume.py",
    "keepstep_sidecar/volume/writer.py",
    "keepstep_sidecar/volume/shard_file.py",
    "keepstep_sidecar/volume/direct_io.py",
    "keepstep_sidecar/commit/inventory.py",
    "keepstep/core/ledger/ledger.py",
    "keepstep/core/ledger/commit_rule.py",
    "keepstep_sidecar/volume/directories.py",
)
"""The files that a step passes from sealed to committed, in order.
`tests/sidecar/test_commit_path.py` follows a step through them."""


@dataclass(frozen=True)
class Figure:
    """One figure of the code. `most`: its limit."""

    name: str
    value: int
    most: int

    @property
    def met(self) -> bool:
        return self.value <= self.most


def figures() -> list[Figure]:
    """All figures of this checkout."""
    tests = lines(ROOT / "tests") - lines(ROOT / "tests" / "operator")
    return [
        Figure("lines of the library", lines(LIBRARY), 10_800),
        Figure("lines of the sidecar", lines(SIDECAR), 12_800),
        Figure("lines of tests, the operator's left out", tests, 21_000),
        Figure("floors of packages in the sidecar", floors(packages()), 11),
        Figure("cycles of packages in the sidecar", len(cycles(packages())), 0),
        Figure("files from sealed to committed", len(SEALED_TO_COMMITTED), 12),
        Figure("files in the sidecar's root", len(list(SIDECAR.glob("*.py"))), 10),
    ]


def lines(folder: Path) -> int:
    """The number of lines of all Python files below `folder`."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def packages() -> dict[str, set[str]]:
    """Which others each package of the sidecar (or module of its root) imports."""
    modules = grimp.build_graph("keepstep_sidecar", cache_dir=None)
    graph: dict[str, set[str]] = {_room(one): set() for one in modules.modules}
    for importer in modules.modules:
        for imported in modules.find_modules_directly_imported_by(importer):
            graph[_room(importer)].add(_room(imported))
    return {room: others - {room, "keepstep_sidecar"} for room, others in graph.items()}


def _room(module: str) -> str:
    """The package of a module. A module of the sidecar's root counts as a package of its own, and
    so do `tiers.peer` and `tiers.archive`; the rest of `tiers` is what these two share."""
    words = module.split(".")
    deep = words[1:2] == ["tiers"] and words[2:3] in (["peer"], ["archive"])
    return ".".join(words[: 3 if deep else 2])


def floors(graph: Mapping[str, set[str]]) -> int:
    """The length of the longest chain of packages that import the next one; 0 if there is a
    cycle."""
    if cycles(graph):
        return 0

    @cache
    def height(package: str) -> int:
        return 1 + max(map(height, graph[package]), default=0)

    return max(map(height, graph), default=0)


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """The packages that import themselves through others."""
    return sorted(one for one in graph if one in _reached(graph, one))


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    left = list(graph[start])
    while left:
        if (one := left.pop()) not in reached:
            reached.add(one)
            left += graph[one]
    return reached


def main() -> int:
    found = figures()
    for one in found:
        print(f"{one.value:>7,}  {one.name} (at most {one.most:,}){'' if one.met else '  MISSED'}")
    return int(not all(one.met for one in found))


if __name__ == "__main__":
    sys.exit(main())
