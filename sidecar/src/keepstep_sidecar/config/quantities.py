"""Sizes and durations as people write them, and back.

Sizes follow Kubernetes: `Ki Mi Gi Ti` are powers of 1024, `K M G T` powers of 1000. Durations are
`90s`, `15m`, `2h`, `1d` or a sequence of them (`1h30m`). Pure; knows nothing of click.
"""

from __future__ import annotations

import re
from typing import Final

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?$", re.IGNORECASE)
_DURATION = re.compile(r"^(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+$")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PREFIXES: Final = "KMGTP"
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes of `512Mi`, `32Gi`, `10G` or `4096`. Raises ValueError that says what is expected."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 512Mi, 32Gi or 10G")
    return round(float(match[1]) * _unit_bytes(match[2] or ""))


def _unit_bytes(unit: str) -> int:
    if not unit:
        return 1
    base = 1024 if unit[1:] else 1000
    return int(base ** (_PREFIXES.index(unit[0].upper()) + 1))


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `15m`, `2h`, `1h30m`, or of a bare number. Raises ValueError."""
    text = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 15m or 2h")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def format_size(size_bytes: int) -> str:
    """Three significant digits with a binary unit: `512 B`, `1.50 GiB`."""
    value, unit = float(size_bytes), "B"
    for prefix in _PREFIXES:
        if value < 1024:
            break
        value, unit = value / 1024, f"{prefix}iB"
    if unit == "B":
        return f"{size_bytes} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_duration(seconds: float) -> str:
    """The two largest units, zeros left out: `0.4s`, `12s`, `3m20s`, `2h05m`, `3d04h`, `15m`."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for size, unit, smaller, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}" + (f"{rest:02d}{name}" if rest else "")
    return f"{whole}s"
