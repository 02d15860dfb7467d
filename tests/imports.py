"""Checks, without importing anything, that each name exists that tests take from this repository.
Part of `make check`: otherwise a broken import shows when the test is collected, which for a test
that needs a cluster, a GPU or a framework is long after.

    python -m tests.imports
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT, *(ROOT / part / "src" for part in ("lib", "sidecar", "operator"))]
OURS = {"tests", "bench", "scripts", "examples"} | {
    f"keepstep{part}" for part in ("", "_sidecar", "_operator")
}


@cache
def names(module: str) -> set[str] | None:
    """The names of a module of this repository, its submodules among them. None: no such module."""
    places = [source.joinpath(*module.split(".")) for source in SOURCES]
    files = [place / "__init__.py" for place in places] + [
        place.with_suffix(".py") for place in places
    ]
    bound = {path.stem for place in places for path in place.glob("*")}
    todo: list[ast.AST] = [ast.parse(path.read_text()) for path in files if path.exists()]
    if not todo and not bound:
        return None
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue  # what is bound inside is no name of the module
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.split(".")[0])
        todo.extend(ast.iter_child_nodes(node))
    return bound


def missing(path: Path) -> Iterator[str]:
    """What this file takes from this repository that is not there: names that it imports, inside
    functions, too, and attributes of the modules that its head imports."""
    tree = ast.parse(path.read_text())
    taken: list[tuple[int, str, list[str]]] = []
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            taken += [(node.lineno, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            taken.append((node.lineno, node.module, [alias.name for alias in node.names]))
            if node in tree.body:
                named = {alias.asname or alias.name: alias.name for alias in node.names}
                modules |= {here: f"{node.module}.{there}" for here, there in named.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            if module.split(".")[0] in OURS and names(module) and node.attr[:2] != "__":
                taken.append((node.lineno, module, [node.attr]))
    for line, module, names_ in taken:
        if module.split(".")[0] not in OURS:
            continue
        has = names(module)
        lost = [name for name in names_ if has is not None and not has & {name, "__getattr__"}]
        if has is None or lost:
            yield f"{path.relative_to(ROOT)}:{line}: {module} has no {lost or 'file'}"


if __name__ == "__main__":
    folders = ("tests", "bench", "scripts", "examples")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    sys.exit("\n".join(text for path in files for text in missing(path)) or None)
