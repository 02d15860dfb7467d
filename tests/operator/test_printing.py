"""What pods wrote, in objects and Events: one line, bounded, and nothing for a terminal to obey."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep_operator.api.run import cut
from keepstep_operator.printing import printable


@given(st.text())
def test_a_printable_text_stays_and_every_other_character_becomes_a_mark(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(new in (old, "\ufffd") for old, new in zip(text, shown, strict=True))


@given(st.text(), st.integers(10, 50))
def test_what_is_cut_is_printable_and_of_one_line(text: str, longest: int) -> None:
    shown = cut(text, longest=longest)
    assert shown.isprintable()
    assert len(shown) <= longest


def test_lines_and_tabs_stay_where_lines_are_printed() -> None:
    assert printable("a\tb\n\x1b[2Jc\r", lines=True) == "a\tb\n\ufffd[2Jc\ufffd"
