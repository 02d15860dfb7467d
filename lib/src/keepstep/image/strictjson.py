"""JSON from untrusted files: no duplicate keys, no NaN, and never a crash.

Duplicate keys are refused, because two readers could then see two different images. Every bad text
ends in FormatError, including one that is nested too deeply or has a number that is too long.

Python objects take up to 40 times the bytes of their JSON (`[],[],[],...`). So a text that may be
large and that a sidecar reads is read by a `Reader`. A `Reader` holds one small value at a time,
and its caller keeps what it needs of each.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from keepstep.errors import FormatError

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
        return json.loads(text, object_pairs_hook=hook or unique, parse_constant=_refuse_constant)
    except FormatError as error:
        raise FormatError(f"{what}: {error.reason}") from None
    except RecursionError:
        raise FormatError(f"{what}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{what}: not JSON: {error}") from None


def unique(pairs: Pairs) -> dict[str, Any]:
    """A dict of `pairs`. Raises FormatError for a key that comes twice."""
    built = dict(pairs)
    if len(built) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise FormatError(f"the key {twice[:80]!r} comes twice")
    return built


def is_text(value: str) -> bool:
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
        if not is_text(self._text):
            self._refuse("not JSON: half a character")
        if len(self._text) > _MOST_WIDE and _is_wide(self._text):
            self._refuse("too long to hold characters beyond U+FFFF: each takes four bytes for all")
        self._at = _end(_SPACE.match(self._text))
        self._left = _FREE_NAMES + len(self._text) // _CHARS_PER_NAME
        self._large = _MOST_LARGE

    def members(self, known: Mapping[str, object] | None = None) -> Iterator[str]:
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

    def items(self) -> Iterator[int]:
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


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_refuse_constant)
_SCAN = _DECODER.scan_once  # type: ignore[attr-defined]
