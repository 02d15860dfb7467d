"""Texts that others wrote, for terminals, logs and objects.

A terminal obeys control sequences: it can be made to rename its window, to hide what stands there,
or worse. So nothing that a pod wrote is passed on before this module has seen it. Pure.
"""

from __future__ import annotations


def replace_unprintable(text: str, *, lines: bool = False) -> str:
    """The text with U+FFFD in place of each character that is not printable, like control and
    format characters. `lines`: line ends and tabs stay."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else "\ufffd" for char in text)
