"""The tables of docs/log-events.md: each event that the code logs, with its levels and fields as
the code has them, and its meaning from scripts/log_events.toml."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = {
    "library": ROOT / "lib/src/keepstep",
    "sidecar": ROOT / "sidecar/src/keepstep_sidecar",
    "operator": ROOT / "operator/src/keepstep_operator",
}
EVENT: Final = re.compile(r"[a-z_]+\.[a-z_]+")
TAG: Final = re.compile(r"keepstep: .* \[([^\[\]]*)\]", re.DOTALL)
CALLS: Final = {
    **{"warn": "WARNING", "_complain": "WARNING", "crash": "ERROR"},
    **{"exception": "ERROR", "info": "INFO", "warning": "WARNING", "error": "ERROR"},
}
"""The calls that log, and the level of each."""
LOGGERS: Final = {"log", "_log", "_journal", "self", "saver", "logging.getLogger('keepstep')"}
PRINTS: Final = {"cli", "kubectl", "warm/__main__.py", "log.py"}
"""Where `info` prints, and where the calls are defined."""


@dataclass
class Logged:
    """What the code logs under one name."""

    levels: dict[str, None] = field(default_factory=dict)
    fields: dict[str, None] = field(default_factory=dict)


def logged(part: str) -> dict[str, Logged]:
    """The events of one part, by name. Raises ValueError for a call without one."""
    found: dict[str, Logged] = defaultdict(Logged)
    for path in sorted(PARTS[part].rglob("*.py")):
        place = path.relative_to(PARTS[part]).as_posix()
        if not {place, place.split("/")[0]} & PRINTS:
            tree = ast.parse(path.read_text())
            for call in _calls(tree):
                for name in _names(call, where=f"{place}:{call.lineno}"):
                    found[name].levels |= dict.fromkeys(_levels(call, tree))
                    found[name].fields |= dict.fromkeys(_fields(call))
    return found


def reference() -> str:
    """The tables, in Markdown."""
    meanings = tomllib.loads((ROOT / "scripts/log_events.toml").read_text())
    return "".join(_section(part, logged(part), meanings[part]) for part in PARTS)


def _section(part: str, events: dict[str, Logged], meanings: dict[str, str]) -> str:
    rows = [
        f"| `{name}` | {', '.join(logged.levels).lower()} | {', '.join(logged.fields)} | "
        f"{meanings[name]} |"
        for name, logged in sorted(events.items())
    ]
    head = ["| event | level | fields | meaning, and what to do |", "| --- | --- | --- | --- |"]
    return "\n".join(["", f"## {part.title()}", "", *head, *rows, ""])


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                known = function.attr in CALLS and ast.unparse(function.value) in LOGGERS
            else:
                known = isinstance(function, ast.Name) and function.id in CALLS
            if known and ast.unparse(node.args[0]) != "'%s'":  # in `SaveThread.warn`
                yield node


def _names(call: ast.Call, *, where: str) -> Iterator[str]:
    """The names that the first argument can have."""
    texts = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
    for text in texts or [ast.unparse(call)]:
        name = tag[1] if (tag := TAG.fullmatch(str(text))) else str(text)
        if not EVENT.fullmatch(name):
            raise ValueError(f"{where} logs without the name of an event: {text}")
        yield name


def _levels(call: ast.Call, tree: ast.AST) -> list[str]:
    """The level that the call names, directly or by a variable; else the usual one of its kind."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "level"), None)
    if isinstance(given, ast.Name):
        chosen = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
        given = next(
            assign.value for assign in chosen if ast.unparse(assign.targets[0]) == given.id
        )
    if given is not None:
        return re.findall(r"logging\.([A-Z]+)", ast.unparse(given))
    return [CALLS[ast.unparse(call.func).rpartition(".")[2]]]


def _fields(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg == "extra":
            yield from re.findall(
                r"'(\w+)':", ast.unparse(keyword.value).removeprefix("{'fields':")
            )
        elif keyword.arg not in {None, "level", "traceback", "per", "exc_info"}:
            yield str(keyword.arg)
