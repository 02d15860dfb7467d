"""Applies a JSON patch (RFC 6902: add, remove, replace), as the API server does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


def apply(document: Any, patch: list[dict[str, Any]]) -> Any:
    """The patched document. Raises KeyError or IndexError where a path does not exist."""
    result = deepcopy(document)
    for operation in patch:
        *parents, last = [_unescaped(one) for one in operation["path"].split("/")[1:]]
        target = result
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target[name]
        _OPERATIONS[operation["op"]](target, last, deepcopy(operation.get("value")))
    return result


def _add(target: Any, name: str, value: Any) -> None:
    if isinstance(target, list):
        index = len(target) if name == "-" else int(name)
        if index > len(target):
            raise IndexError(name)
        target.insert(index, value)
    else:
        target[name] = value


def _replace(target: Any, name: str, value: Any) -> None:
    place = int(name) if isinstance(target, list) else name
    target[place]  # must exist
    target[place] = value


def _remove(target: Any, name: str, value: Any) -> None:
    del target[int(name) if isinstance(target, list) else name]


_OPERATIONS = {"add": _add, "replace": _replace, "remove": _remove}


def _unescaped(name: str) -> str:
    return name.replace("~1", "/").replace("~0", "~")
