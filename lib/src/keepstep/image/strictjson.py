"""Untrusted JSON: no duplicate keys, no NaN, never a crash; and checks of its values.

Duplicate keys are refused, because two readers could then see two different images. Every bad text
ends in FormatError, including one that is nested too deeply or has a number that is too long.

Python objects take up to 40 times the bytes of their JSON (`[],[],[],...`). So a text that may be
large and that a sidecar reads is read by a `Reader`. A `Reader` holds one small value at a time,
and its caller keeps what it needs of each. Each check of a value returns the value, or raises
FormatError; its `what` names the value in the message.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from keepstep.errors import FormatError, VersionError

Pairs = list[tuple[str, Any]]

MAX_DEPTH = 5000
"""The depth limit if Python's recursion limit was raised above this value. Deeper JSON would
overflow the stack of the C code that parses it, which ends the process."""

_SMALL = 4096
_LARGE = 1 << 20
_MOST_WIDE = 4 << 20
_MOST_LARGE = 32
_FREE_NAMES = 50_000
_CHARS_PER_NAME = 30

_KEY = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*([,\]}])[ \t\n\r]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH = re.compile(r"\\u[dD][89abAB]")
_BRACKET = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def loads(
    data: bytes | bytearray | memoryview | str,
    *,
    what: str,
    hook: Callable[[Pairs], Any] | None = None,
) -> Any:
    """Parse UTF-8 JSON. `what` names the text in errors. `hook` builds objects, innermost first.

    Raises FormatError. Allocates at most 40 bytes for each byte of `data`.
    """
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
        _check_depth(text)
        return json.loads(
            text, object_pairs_hook=hook or dict_of_unique_keys, parse_constant=_refuse_constant
        )
    except FormatError as error:
        raise FormatError(f"{what}: {error.reason}") from None
    except RecursionError:
        raise FormatError(f"{what}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{what}: not JSON: {error}") from None


def dict_of_unique_keys(pairs: Pairs) -> dict[str, Any]:
    """A dict of `pairs`. Raises FormatError for a key that comes twice."""
    built = dict(pairs)
    if len(built) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise FormatError(f"the key {twice[:80]!r} comes twice")
    return built


def has_no_surrogates(value: str) -> bool:
    """Whether JSON gives this string back unchanged: it has no surrogates. JSON would join two lone
    surrogates to one character."""
    return value.isascii() or _SURROGATE.search(value) is None


class Reader:
    """One JSON text, read from its beginning to its end as the caller asks.

        for key in reader.members():
            values[key] = reader.value()
        reader.end()

    Every method raises FormatError. The number of names and items is limited in proportion to the
    length of the text. So what a caller keeps of each takes at most a few times the text's memory.
    """

    def __init__(self, data: bytes | bytearray | memoryview | str, *, what: str) -> None:
        self._what = what
        try:
            self._text = data if isinstance(data, str) else str(data, "utf-8")
        except ValueError as error:
            self._refuse(f"not JSON: {error}")
        if not has_no_surrogates(self._text):
            self._refuse("not JSON: half a character")
        if len(self._text) > _MOST_WIDE and _is_wide(self._text):
            self._refuse("too long to hold characters beyond U+FFFF: each takes four bytes for all")
        self._at = _end(_SPACE.match(self._text))
        self._left = _FREE_NAMES + len(self._text) // _CHARS_PER_NAME
        self._large = _MOST_LARGE

    def iterate_keys(self, known: Mapping[str, object] | None = None) -> Iterator[str]:
        """The keys of the object that comes next. After each key the caller must read its value.

        `known`: a mapping into which the caller puts each key, so that this method need not
        remember the keys to find duplicates.
        """
        text, seen = self._text, set[str]()
        goes_on = self._opens("{", "}")
        while goes_on:
            if match := _KEY.match(text, self._at):
                key = match[1]
            else:  # the key has escapes, or there is no key
                key = self.string()
                match = _COLON.match(text, self._at)
            if match is None:
                self._refuse(f"not JSON: no ':' at character {self._at}")
            if key in (seen if known is None else known):
                self._refuse(f"the key {key[:80]!r} comes twice")
            if known is None:
                seen.add(key)
            self._at = match.end()
            yield key
            goes_on = self._goes_on("}")

    def iter_item_indices(self) -> Iterator[int]:
        """The indices of the items of the array that comes next. After each index the caller must
        read the item."""
        number, goes_on = 0, self._opens("[", "]")
        while goes_on:
            yield number
            number += 1
            goes_on = self._goes_on("]")

    def comes(self, mark: str) -> bool:
        """Whether this character comes next."""
        return self._text.startswith(mark, self._at)

    def value(self) -> Any:
        """The value that comes next, of at most `_LARGE` characters. At most `_MOST_LARGE` values
        may be longer than `_SMALL`."""
        try:
            value, used = _SCAN(self._text[self._at : self._at + _SMALL], 0)
        except FormatError as error:
            self._refuse(error.reason)
        except (ValueError, StopIteration, RecursionError):
            used = _SMALL
        if used == _SMALL:  # the value was cut off, or is not JSON
            return self._large_value()
        self._at += used
        return value

    def _large_value(self) -> Any:
        self._large -= 1
        if self._large < 0:
            self._refuse(f"too many values of more than {_SMALL} characters, or not JSON")
        piece = self._text[self._at : self._at + _LARGE]
        try:
            _check_depth(piece)
            value, used = _DECODER.raw_decode(piece)
        except FormatError as error:
            self._refuse(error.reason)
        except RecursionError:
            self._refuse("nested too deeply")
        except ValueError as error:
            self._refuse(f"not JSON: {error}")
        if used == _LARGE:
            self._refuse(f"a value of more than {_LARGE} characters")
        self._at += used
        return value

    def skip(self) -> None:
        """Skip the value that comes next."""
        if self.comes('"'):
            self.string()
        else:
            self.value()

    def string(self) -> str:
        """The string that comes next, of any length."""
        if not self.comes('"'):
            self._refuse("a string is needed")
        try:
            value, self._at = scanstring(self._text, self._at + 1)
        except ValueError as error:
            self._refuse(f"not JSON: {error}")
        return str(value)

    def end(self) -> None:
        """Check that nothing follows."""
        if _end(_SPACE.match(self._text, self._at)) != len(self._text):
            self._refuse("not JSON: something follows its end")

    def _opens(self, first: str, last: str) -> bool:
        """Skip the opening bracket, and the closing one if nothing is between. Returns whether
        anything is."""
        if not self.comes(first):
            self._refuse("not a JSON object" if first == "{" else "not a JSON array")
        self._at = _end(_SPACE.match(self._text, self._at + 1))
        if self.comes(last):
            self._at += 1
            return False
        return True

    def _goes_on(self, last: str) -> bool:
        """Skip the comma, or the closing bracket `last`. Returns whether it was a comma."""
        match = _COMMA.match(self._text, self._at)
        if match is None or match[1] not in (",", last):
            self._refuse(f"not JSON: no ',' or '{last}' at character {self._at}")
        self._at = match.end()
        self._left -= 1
        if self._left < 0:
            self._refuse(f"too many names for {len(self._text)} characters")
        return match[1] == ","

    def _refuse(self, why: str) -> NoReturn:
        raise FormatError(f"{self._what}: {why}") from None


def _is_wide(text: str) -> bool:
    """Whether some character, escaped or not, makes Python use four bytes for every character."""
    return sys.getsizeof(text) > 3 * len(text) or _HIGH.search(text) is not None


def _end(match: re.Match[str] | None) -> int:
    return 0 if match is None else match.end()


def _check_depth(text: str) -> None:
    if sys.getrecursionlimit() <= MAX_DEPTH or text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth, quoted = 0, False
    for match in _BRACKET.finditer(text):
        mark = match[0]
        if mark == '"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if mark in "[{" else -1 if mark in "]}" else 0
            if depth > MAX_DEPTH:
                raise FormatError("nested too deeply")


def _refuse_constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=dict_of_unique_keys, parse_constant=_refuse_constant)
_SCAN = _DECODER.scan_once  # type: ignore[attr-defined]


MAX_BYTES = 1 << 62
"""No image is larger. So sums of values that passed as sizes stay small integers."""

_MAX_DIMENSIONS = 64
_FEW = 8
_SMALL_SIZE = 1 << 16
_HEX = frozenset("0123456789abcdef")


def as_mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{quote_text(what)} is not a JSON object")
    return value


def as_array(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{quote_text(what)}: {quote_text(value)} is not a JSON array")
    return value


def as_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what} is not a string")
    return value


def as_integer(value: object, what: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{what}: {quote_text(value)} is not an integer from {low} to {high}")
    return value


def as_time(value: object, what: str) -> float:
    """A time in unix seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1 << 62:  # type: ignore[operator]
        raise FormatError(f"{what}: {quote_text(value)} is not a time")
    return float(value)  # type: ignore[arg-type]


def as_digest(value: object, what: str) -> str:
    """A digest of 16 bytes in lower-case hex."""
    found = as_text(value, what)
    if len(found) != 32 or not set(found) <= _HEX:
        raise FormatError(f"{what}: {quote_text(value)} is not a digest")
    return found


def as_sizes(value: object, name: str) -> tuple[int, ...]:
    found = as_array(value, name)
    fits = len(found) <= _MAX_DIMENSIONS
    for size in found[:_MAX_DIMENSIONS]:
        if type(size) is not int or not 0 <= size <= MAX_BYTES:
            fits = False
    if not fits:
        raise FormatError(f"{quote_text(name)}: {quote_text(value)} is not a row of sizes")
    if len(found) > _FEW:
        numbers = _numbers()
        found = [numbers[size] if size < _SMALL_SIZE else size for size in found]
    return tuple(found)


@functools.cache
def _numbers() -> tuple[int, ...]:
    """Shared objects for small integers, so that a hostile header that consists only of dimensions
    takes little memory."""
    return tuple(range(_SMALL_SIZE))


def check_newest_version(value: object, newest: int) -> None:
    """Raises VersionError if a newer keepstep wrote this, FormatError if `value` is not a possible
    version."""
    if as_integer(value, "format_version", 1, 1 << 31) > newest:
        raise VersionError(
            f"format version {value}, but this keepstep reads only up to {newest}:"
            " read it with a newer one"
        )


def quote_text(value: object) -> str:
    """A value of a possibly hostile file, shortened to one line for a message. Never raises."""
    try:
        shown = _SHORT.repr(value)
    except Exception:  # an integer of too many digits, a foreign object's own __repr__
        return f"a {type(value).__name__}"
    return shown if len(shown) <= 100 else shown[:97] + "..."


def error_text(error: Exception) -> str:
    """The text of an error, at most 200 characters. Never raises."""
    try:
        return str(error)[:200]
    except Exception:  # its text may show the hostile value, whose own `__repr__` may raise
        return type(error).__name__


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100
