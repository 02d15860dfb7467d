"""Writes docs/python-api.md from the signatures and docstrings of the library's public names.

Run `python scripts/python_reference.py` after one of them changed. A test compares the two. The
script reads the source without importing it, so an integration's framework need not be installed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "lib" / "src"
PLACE = ROOT / "docs" / "python-api.md"

_HEAD = """\
# Python API

Made from the code by `scripts/python_reference.py`; a test compares the two. Names that do not
stand here may change in any release. How to use them: [add keepstep](add-keepstep.md); frameworks:
[frameworks](frameworks.md).
"""

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Module:
    """A module that users import from. `names`: its public names, in order."""

    name: str
    doc: str
    names: dict[str, Definition]


def reference() -> str:
    """The whole document."""
    return _HEAD + "".join(map(_section, modules()))


def modules() -> list[Module]:
    """The modules that training code imports: keepstep, keepstep.dcp and each integration."""
    integrations = sorted((SOURCE / "keepstep" / "integrations").glob("[a-z]*.py"))
    named = [f"keepstep.integrations.{one.stem}" for one in integrations]
    return [_offering("keepstep"), _offering("keepstep.dcp"), *map(_defining, named)]


def _offering(name: str) -> Module:
    """A package with the names of its `__all__`, read from the modules that it imports them
    from."""
    tree = _parsed(name)
    listed = next(
        one.value
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    home = {
        alias.name: one.module
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom) and one.module is not None
        for alias in one.names
    }
    names = sorted(ast.literal_eval(listed))
    found = {one: _definitions(_parsed(home[one]))[one] for one in names}
    return Module(name, _doc(tree), found)


def _defining(name: str) -> Module:
    """A module with the public names that it defines itself."""
    tree = _parsed(name)
    names = {one: node for one, node in _definitions(tree).items() if not one.startswith("_")}
    return Module(name, _doc(tree), names)


def _parsed(module: str) -> ast.Module:
    place = SOURCE.joinpath(*module.split("."))
    return ast.parse(
        (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
    )


def _definitions(tree: ast.Module | ast.ClassDef) -> dict[str, Definition]:
    return {one.name: one for one in tree.body if isinstance(one, Definition)}


def _section(module: Module) -> str:
    parts = "".join(_entry(name, node) for name, node in module.names.items())
    return f"\n## {module.name}\n\n{module.doc}\n{parts}"


def _entry(name: str, node: Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"\n### {name}\n\n{_signature(name, node)}\n{_doc(node)}\n"
    return f"\n### {name}\n\n{_class(node)}{''.join(_members(node))}"


def _class(node: ast.ClassDef) -> str:
    bases = ", ".join(map(ast.unparse, node.bases))
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    lines += [f"    {ast.unparse(one)}" for one in node.body if isinstance(one, ast.AnnAssign)]
    made = _definitions(node).get("__init__")
    if not isinstance(made, ast.FunctionDef):
        return f"{_code(lines)}\n{_doc(node)}\n"
    told = "\n\n".join(filter(None, (_doc(node), _doc(made))))
    return f"{_code(lines)}\n{_signature(node.name, made)}\n{told}\n"


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The public methods and properties that have a docstring."""
    for name, one in _definitions(node).items():
        if isinstance(one, ast.FunctionDef) and not name.startswith("_") and _doc(one):
            yield f"\n#### {node.name}.{name}\n\n{_signature(name, one)}\n{_doc(one)}\n"


def _signature(name: str, node: ast.FunctionDef) -> str:
    """The signature as a call without self; one argument per line if it is long."""
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    back = ast.unparse(node.returns) if node.returns else "Any"
    if decorators == "property":
        return _code([f"{name}: {back}"])
    if "contextmanager" in decorators:
        name, back = f"with {name}", ""
    end = f") -> {back}" if back and node.name != "__init__" else ")"
    arguments = [one for one in _each(node.args) if one != "self"]
    whole = f"{name}({', '.join(arguments)}{end}"
    if len(whole) <= 88:
        return _code([whole])
    return _code([f"{name}(", *(f"    {one}," for one in arguments), end])


def _each(of: ast.arguments) -> Iterator[str]:
    """Each argument with its default."""
    blank = [None] * (len(of.args) - len(of.defaults))
    for one, default in zip(of.args, [*blank, *of.defaults], strict=True):
        yield _argument(one, default)
    if of.vararg or of.kwonlyargs:
        yield f"*{ast.unparse(of.vararg)}" if of.vararg else "*"
    for one, default in zip(of.kwonlyargs, of.kw_defaults, strict=True):
        yield _argument(one, default)
    if of.kwarg:
        yield f"**{ast.unparse(of.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) + (f" = {ast.unparse(default)}" if default is not None else "")


def _code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"]) + "\n"


def _doc(node: ast.Module | Definition) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


if __name__ == "__main__":
    PLACE.write_text(reference())
    print(f"{PLACE} written")
