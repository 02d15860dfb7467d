"""Checks of values from parsed JSON: each check returns the value, or raises FormatError.

`what` names the value in the message.
"""

from __future__ import annotations

import functools
import reprlib
from typing import Any

from keepstep.errors import FormatError, VersionError

MAX_BYTES = 1 << 62
"""No image is larger. So sums of values that passed as sizes stay small integers."""

_MAX_DIMENSIONS = 64
_FEW = 8
_SMALL = 1 << 16
_HEX = frozenset("0123456789abcdef")


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


def time(value: object, what: str) -> float:
    """A time in unix seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1 << 62:  # type: ignore[operator]
        raise FormatError(f"{what}: {quoted(value)} is not a time")
    return float(value)  # type: ignore[arg-type]


def digest(value: object, what: str) -> str:
    """An xxh3_128 digest in lower-case hex."""
    found = text(value, what)
    if len(found) != 32 or not set(found) <= _HEX:
        raise FormatError(f"{what}: {quoted(value)} is not a digest")
    return found


def sizes(value: object, name: str) -> tuple[int, ...]:
    found = array(value, name)
    fits = len(found) <= _MAX_DIMENSIONS
    for size in found[:_MAX_DIMENSIONS]:
        if type(size) is not int or not 0 <= size <= MAX_BYTES:
            fits = False
    if not fits:
        raise FormatError(f"{quoted(name)}: {quoted(value)} is not a row of sizes")
    if len(found) > _FEW:
        numbers = _numbers()
        found = [numbers[size] if size < _SMALL else size for size in found]
    return tuple(found)


@functools.cache
def _numbers() -> tuple[int, ...]:
    """Shared objects for small integers, so that a hostile header that consists only of dimensions
    takes little memory."""
    return tuple(range(_SMALL))


def version(value: object, newest: int) -> None:
    """Raises VersionError if a newer keepstep wrote this, FormatError if `value` is not a possible
    version."""
    if integer(value, "format_version", 1, 1 << 31) > newest:
        raise VersionError(
            f"format version {value}, but this keepstep reads only up to {newest}:"
            " read it with a newer one"
        )


def quoted(value: object) -> str:
    """A value of a possibly hostile file, shortened to one line for a message. Never raises."""
    try:
        shown = _SHORT.repr(value)
    except Exception:  # an integer of too many digits, a foreign object's own __repr__
        return f"a {type(value).__name__}"
    return shown if len(shown) <= 100 else shown[:97] + "..."


def reason(error: Exception) -> str:
    """The text of an error, at most 200 characters. Never raises."""
    try:
        return str(error)[:200]
    except Exception:  # its text may show the hostile value, whose own `__repr__` may raise
        return type(error).__name__


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100
