"""JSON from files that nobody vouches for: no duplicate keys, no NaN, and never a crash.

Two readers of one duplicate key may see two different images; so nobody may write one. Every way in
which a text can be bad ends in FormatError, the too deeply nested and the too long number included.

Python's objects take up to 40 times the bytes of their JSON (`[],[],[],...`). What may be large and
is read by a sidecar is therefore read by a `Reader`, which holds one small value at a time: its
caller keeps of each what it needs.
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
"""Where somebody raised Python's recursion limit beyond this, deeper JSON would overflow the stack
of the C code that parses it, and end the process."""

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
    """Parse UTF-8 JSON. `what` names the text in errors; `hook` builds objects, innermost first.

    Raises FormatError. Allocates at most 40 bytes for each of `data`.
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
    """A dict of `pairs`. Raises FormatError at a key that comes twice."""
    built = dict(pairs)
    if len(built) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise FormatError(f"the key {twice[:80]!r} comes twice")
    return built


def is_text(value: str) -> bool:
    """Whether JSON gives it back: two lone surrogates would be joined to one character."""
    return value.isascii() or _SURROGATE.search(value) is None


class Reader:
    """One JSON text, read from its beginning to its end as the caller asks.

        for key in reader.members():
            values[key] = reader.value()
        reader.end()

    Every method raises FormatError. A text has room for as many names and items as its length makes
    plausible, so that what a caller keeps of each takes no more than some times the text.
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
        """Keys of the object that comes next. The caller reads the value of each in between.

        `known`: where the caller puts them, so that they need not be remembered here as well.
        """
        text, seen = self._text, set[str]()
        goes_on = self._opens("{", "}")
        while goes_on:
            if match := _KEY.match(text, self._at):
                key = match[1]
            else:  # it has escapes, or is none
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
        """Numbers of the items of the array that comes next; as `members`."""
        number, goes_on = 0, self._opens("[", "]")
        while goes_on:
            yield number
            number += 1
            goes_on = self._goes_on("]")

    def comes(self, mark: str) -> bool:
        """Whether this character comes next."""
        return self._text.startswith(mark, self._at)

    def value(self) -> Any:
        """Whatever comes next, of at most a megabyte; and few that are not small."""
        try:
            value, used = _SCAN(self._text[self._at : self._at + _SMALL], 0)
        except FormatError as error:
            self._refuse(error.reason)
        except (ValueError, StopIteration, RecursionError):
            used = _SMALL
        if used == _SMALL:  # cut off, or no JSON
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
        """Pass over whatever comes next."""
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
        """That nothing follows."""
        if _end(_SPACE.match(self._text, self._at)) != len(self._text):
            self._refuse("not JSON: something follows its end")

    def _opens(self, first: str, last: str) -> bool:
        """Pass over the opening bracket. Whether anything is in it."""
        if not self.comes(first):
            self._refuse("not a JSON object" if first == "{" else "not a JSON array")
        self._at = _end(_SPACE.match(self._text, self._at + 1))
        if self.comes(last):
            self._at += 1
            return False
        return True

    def _goes_on(self, last: str) -> bool:
        """Pass over the comma, or the closing bracket `last`. Whether it was a comma."""
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
    """Whether a character, escaped or not, makes Python take four bytes for each."""
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
