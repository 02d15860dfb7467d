"""The JSON patch (RFC 6902) from one object to another, small where injection works.

Lists of objects are compared by `name`: what was put before or behind the old ones is added, the
old ones are compared one by one. A list that was changed in any other way is replaced whole, which
is always right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keepstep_operator.bodies import Body


def json_patch(old: Body, new: Body) -> list[Body]:
    """Operations that make `new` of `old`; empty when they are equal."""
    return list(_changes("", old, new))


def _changes(path: str, old: Any, new: Any) -> Iterator[Body]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _in_object(path, old, new)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _in_list(path, old, new)
    else:
        yield {"op": "replace", "path": path, "value": new}


def _in_object(path: str, old: Body, new: Body) -> Iterator[Body]:
    for name in old.keys() - new.keys():
        yield {"op": "remove", "path": _below(path, name)}
    for name, value in new.items():
        if name not in old:
            yield {"op": "add", "path": _below(path, name), "value": value}
        else:
            yield from _changes(_below(path, name), old[name], value)


def _in_list(path: str, old: list[Any], new: list[Any]) -> Iterator[Body]:
    """Insertions first, so that the paths of what follows are those of the new list."""
    start = _start(old, new)
    if start is None:
        yield {"op": "replace", "path": path, "value": new}
        return
    for index in range(start):
        yield {"op": "add", "path": f"{path}/{index}", "value": new[index]}
    for index, one in enumerate(old, start):
        yield from _changes(f"{path}/{index}", one, new[index])
    for one in new[start + len(old) :]:
        yield {"op": "add", "path": f"{path}/-", "value": one}


def _start(old: list[Any], new: list[Any]) -> int | None:
    """Where in `new` the elements of `old` stand one after the other; None when they do not."""
    names = [_identity(one) for one in new]
    wanted = [_identity(one) for one in old]
    for start in range(len(new) - len(old) + 1):
        if names[start : start + len(old)] == wanted:
            return start
    return None


def _identity(element: Any) -> Any:
    """A mount's name may stand twice, its path may not."""
    if isinstance(element, dict) and "name" in element:
        return (element["name"], element.get("mountPath"))
    return element


def _below(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
