"""Values of parsed JSON that must have a type: each check returns it, or raises FormatError.

`what` names the value in the message.
"""

from __future__ import annotations

from typing import Any

from keepstep.errors import FormatError

MAX_BYTES = 1 << 62
"""No image is larger; so sums of what passed as a size stay small numbers."""

_MAX_DIMENSIONS = 64


def mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{quoted(what)} is not a JSON object")
    return value


def array(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{quoted(what)}: {quoted(value)} is not a JSON array")
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what} is not a string")
    return value


def integer(value: object, what: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{what}: {quoted(value)} is not an integer from {low} to {high}")
    return value


def sizes(value: object, name: str) -> tuple[int, ...]:
    found = array(value, name)
    if len(found) > _MAX_DIMENSIONS or not all(
        type(size) is int and 0 <= size <= MAX_BYTES for size in found
    ):
        raise FormatError(f"{quoted(name)}: {quoted(value)} is not a row of sizes")
    return tuple(found)


def quoted(value: object) -> str:
    """For messages: what a hostile file says, but not more than fits a line."""
    if isinstance(value, list):
        value = value[:20]
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."
