"""Everything in a state that is no tensor, as JSON that gives back the same types.

JSON holds what it can hold exactly; anything else is an object with one key that begins with `!`:
`{"!tuple": [1, 2]}`. A dict that would look like that, or has keys that are no strings, is a list of
pairs under `!dict`. So no text has two meanings, and reading runs no code: pickle is a tag too, and
refused unless the caller trusts the file. Shared references become copies; OrderedDict and
defaultdict become dict.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
import pickle
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from keepstep.errors import FormatError
from keepstep.image import arrays, strictjson

MAX_DEPTH = 100
"""Nesting beyond this is taken for a tree that contains itself."""

_BIG = 1 << 63
_SAFE = (bool, type(None))


def encode(value: Any, *, trusted: bool = False) -> bytes:
    """JSON of `value`; ASCII. `trusted`: pickle what nothing else holds.

    Raises FormatError that names the place in the tree of what cannot be held.
    """
    tree = _Encoder(trusted).encode(value, MAX_DEPTH)
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode(data: bytes | memoryview, *, trusted: bool = False) -> Any:
    """Inverse of `encode`; arrays are new and writable.

    Raises FormatError for anything that `encode` cannot have made, and for pickles unless `trusted`.
    """
    return strictjson.loads(bytes(data), what="extras", hook=_Decoder(trusted).build)


class _Unheld(Exception):
    """What could not be encoded; collects its place in the tree on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place: list[str] = []
