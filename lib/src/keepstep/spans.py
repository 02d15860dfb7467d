"""Sets of numbers as short texts like `0-3,8`, for people and for status fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

LONGEST = 4096
"""The characters that the schema allows for such a field."""
MOST = 65_536
_LONGEST_NUMBER = 10


def format_spans(numbers: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8. Numbers that do not fit into `LONGEST` are left out at the end."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found)
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(",")[0]


def is_in_spans(text: str, number: int) -> bool:
    """Whether the number is in the set. Parts that cannot be read count as empty."""
    return any(a <= number <= b for a, b in map(_ends, text.split(",")))


def parse_number_set(text: str) -> Iterator[int]:
    """The numbers of the set, at most `MOST`. Parts that cannot be read count as empty."""
    found = (number for a, b in map(_ends, text.split(",")) for number in range(a, b + 1))
    return islice(found, MOST)


def _ends(part: str) -> tuple[int, int]:
    first, _, last = part.partition("-")
    ends = first, last or first
    if not all(end.isascii() and end.isdigit() and len(end) < _LONGEST_NUMBER for end in ends):
        return 1, 0
    return int(ends[0]), int(ends[1])
