"""Kubernetes quantities (`32Gi`, `100m`, `1e9`, a number) and durations (`10m`), and back.

The grammar is that of apimachinery's `resource.Quantity` and of the CRDs' durations. Values below
one byte, or one millicore, are rounded up, as Kubernetes does. Pure.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

Written = str | int | float
"""A quantity as an object has it: int-or-string (YAML may make a float of `1.5`)."""

_QUANTITY = re.compile(
    r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?$"
)
_DURATION = re.compile(r"^(?:\d+[smh])+$")
_DURATION_PART = re.compile(r"(\d+)([smh])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL: Final = {"n": -3, "u": -2, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def parse_bytes(written: Written) -> int:
    """Bytes, rounded up. Raises ValueError saying what is expected."""
    return _ceiling(_parse(written, example="512Mi, 32Gi or 10G"))


def parse_millicores(written: Written) -> int:
    """Thousandths of a CPU, rounded up. Raises ValueError saying what is expected."""
    return _ceiling(_parse(written, example="100m, 0.5 or 2") * 1000)


def format_bytes(size_bytes: int) -> str:
    """Exactly this many bytes in the shortest canonical form: `1Gi`, `1536Mi`, `1000`."""
    for suffix, power in reversed(_BINARY.items()):
        count, rest = divmod(size_bytes, 1024**power)
        if count and not rest:
            return f"{count}{suffix}"
    return str(size_bytes)


def format_millicores(millicores: int) -> str:
    """`100m`, or `2` for whole CPUs."""
    whole, rest = divmod(millicores, 1000)
    return f"{millicores}m" if rest else str(whole)


def parse_duration(text: str) -> int:
    """Seconds of `90s`, `15m`, `1h30m`. Raises ValueError saying what is expected."""
    if not isinstance(text, str) or not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 15m or 2h")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def _parse(written: Written, *, example: str) -> Decimal:
    match = None if isinstance(written, bool) else _QUANTITY.fullmatch(str(written))
    if not match:
        raise ValueError(f"{written!r} is not a quantity; write it like {example}")
    number, suffix, exponent = match.groups()
    if exponent:
        return Decimal(number).scaleb(int(exponent))
    if suffix in _BINARY:
        return Decimal(number) * (1 << 10 * _BINARY[suffix])
    return Decimal(number).scaleb(3 * _DECIMAL.get(suffix, 0))


def _ceiling(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_CEILING))
