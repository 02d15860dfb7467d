"""JSON from files that nobody vouches for: no duplicate keys, no NaN, and never a crash.

Two readers of one duplicate key may see two different images; so nobody may write one. Every way in
which a text can be bad ends in FormatError, the too deeply nested and the too long number included.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from keepstep.errors import FormatError

Pairs = list[tuple[str, Any]]


def loads(data: bytes, *, what: str, hook: Callable[[Pairs], Any] | None = None) -> Any:
    """Parse UTF-8 JSON. `what` names the text in errors; `hook` builds objects, innermost first.

    Raises FormatError. Allocates in proportion to `data`.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=hook or unique,
            parse_constant=_refuse_constant,
        )
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
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _refuse_constant(name: str) -> NoReturn:
    raise FormatError(f"{name} is not JSON")
