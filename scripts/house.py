"""Measures the size and the structure of the code ("the house"); `make check` compares both with
limits.

    python scripts/house.py             # each figure and its limit; exit code 1 if one exceeds it
    python scripts/house.py --tighten   # limits that are higher than today's figures become these
    python scripts/house.py --files     # also the files that a save enters

The limits are in scripts/house.toml, and only fall. The files between `save()` and *committed* are
counted by following a real save (`scripts/trace_save.py`). The floors of the house are the length
of the longest chain of packages of the sidecar in which each imports the next one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp
import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import trace_save  # noqa: E402

LIMITS = ROOT / "scripts" / "house.toml"
PARTS = {
    "library": ROOT / "lib/src",
    "sidecar": ROOT / "sidecar/src/keepstep_sidecar",
    "operator": ROOT / "operator/src/keepstep_operator",
}
TIER = (
    "lib/src/keepstep/steps.py",
    "sidecar/src/keepstep_sidecar/tiers/vault.py",
    "sidecar/src/keepstep_sidecar/app.py",
    "sidecar/src/keepstep_sidecar/config/sidecar.py",
    "operator/src/keepstep_operator/api/tiers.py",
    "operator/src/keepstep_operator/api/policy.py",
    "operator/src/keepstep_operator/injection/remote_tiers.py",
    "crds/keepstep.dev_checkpointpolicies.yaml",
)
"""The files of a new tier, here called `vault`: see "Where to add" in CONTRIBUTING.md. A test
builds it from exactly these (tests/tiers/test_a_new_tier.py)."""


DIALECT = re.compile(
    "(?:^|_)(ails|anew|came|hear|heard|heed|look|looked|looking|looks|mend|mended|nobody|obey|said"
    "|say|saying|says|somebody|tell|telling|tells|told|want|wanted|wanting|wants|went|whoever|wish"
    "|wishes)(?:_|$)"
)
"""Words that do not say what a value is: no name has one, nor is `one` a name. Two fields on the
wire have one, `Candidates.wanted` and `MemberReport.heard`: two is the limit."""


@dataclass(frozen=True)
class Figure:
    """One figure of the code. `of`: what has it, if it is the largest of several."""

    name: str
    value: int
    of: str = ""


def figures(entered: Mapping[str, list[str]]) -> Iterator[Figure]:
    """All figures of this checkout; `entered` as `trace_save.entered` returns it."""
    for name, folder in PARTS.items():
        yield Figure(f"lines of the {name}", lines(folder))
    for name in ("tests", "bench", "scripts"):
        yield Figure(f"lines of {name}", lines(ROOT / name))
    yield Figure("words of documents", words())
    for name, paths in entered.items():
        yield Figure(f"files that a save enters in the {name}", len(paths))
    yield Figure("files of a tier", len(TIER))
    for name, folder in PARTS.items():
        sizes = list(classes(folder))
        for what, at in (("methods", 1), ("attributes", 2)):
            largest = max(sizes, key=lambda size: size[at])
            yield Figure(f"{what} of a class in the {name}", int(largest[at]), largest[0])
    found = list(dialect())
    tests = [name for name in found if name.startswith("test_")]
    names = [name for name in found if name not in tests]
    yield Figure("names in a private dialect", len(names), ", ".join(names[:5]))
    yield Figure("tests named in a private dialect", len(tests))
    graph = packages()
    yield Figure("floors of packages in the sidecar", floors(graph))
    yield Figure("cycles of packages in the sidecar", len(cycles(graph)), ", ".join(cycles(graph)))
    yield Figure("files in the sidecar's root", len(list(PARTS["sidecar"].glob("*.py"))))


def lines(folder: Path) -> int:
    """The number of lines of all Python files below `folder`."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def words() -> int:
    """The number of words of README, CONTRIBUTING and all pages of docs/."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages)


def classes(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(name, methods, attributes) of each class. An attribute is assigned to `self` in a method:
    the fields of a value are none."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [
                    method
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                inside = (node for method in methods for node in ast.walk(method))
                yield (
                    node.name,
                    len(methods),
                    len({name for inner in inside for name in _assigned(inner)}),
                )


def _assigned(node: ast.AST) -> Iterator[str]:
    """The attributes of `self` that this expression is the target of."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        yield node.attr


def dialect() -> Iterator[str]:
    """The names with a word of `DIALECT` that the product, tests, bench and scripts define."""
    folders = (*PARTS.values(), *(ROOT / name for name in ("tests", "bench", "scripts")))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = _defined(node)
            if name == "one" or DIALECT.search(name.lower()):
                yield name


def _defined(node: ast.AST) -> str:
    """The name that this node gives to something, its words divided by `_`; '' for none."""
    match node:
        case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)):
            return name
        case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.ClassDef(name=name):
            return re.sub("(?<=[a-z])(?=[A-Z])", "_", name)
    return ""


def packages() -> dict[str, set[str]]:
    """Which others each package of the sidecar (or module of its root) imports."""
    modules = grimp.build_graph("keepstep_sidecar", cache_dir=None)
    graph: dict[str, set[str]] = {_room(module): set() for module in modules.modules}
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
    return sorted(package for package in graph if package in _reached(graph, package))


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    left = list(graph[start])
    while left:
        if (package := left.pop()) not in reached:
            reached.add(package)
            left += graph[package]
    return reached


def exceeded(found: list[Figure], limits: Mapping[str, int]) -> list[str]:
    """The figures that are above their limit or have none, and the limits that have no figure."""
    over = [figure.name for figure in found if figure.value > limits.get(figure.name, -1)]
    return over + sorted(limits.keys() - {figure.name for figure in found})


def tightened(found: list[Figure], limits: Mapping[str, int]) -> dict[str, int]:
    """The limits, none of which is higher than before."""
    return {
        figure.name: min(figure.value, limits.get(figure.name, figure.value)) for figure in found
    }


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--tighten", action="store_true")
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args()
    entered = trace_save.entered()
    found = list(figures(entered))
    text = LIMITS.read_text()
    limits = tomllib.loads(text)
    if options.tighten:
        limits = tightened(found, limits)
        head = text[: text.index('"')]
        rows = "".join(f'"{name}" = {limit}\n' for name, limit in limits.items())
        LIMITS.write_text(head + rows)
    if options.files:
        for name, paths in entered.items():
            print(f"{name}:", *paths, sep="\n    ")
    over = exceeded(found, limits)
    for figure in found:
        of = f", {figure.of}" if figure.of else ""
        verdict = "  EXCEEDED" if figure.name in over else ""
        limit = limits.get(figure.name, "?")
        print(f"{figure.value:>7,}  {figure.name}{of} (at most {limit}){verdict}")
    for name in over:
        print(f"scripts/house.toml: {name}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
