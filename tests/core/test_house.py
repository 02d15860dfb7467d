"""`make check` fails when a figure of the code exceeds its limit, and limits only fall."""

from __future__ import annotations

from pathlib import Path

from scripts import house, trace_save
from scripts.house import Figure


def test_a_figure_above_its_limit_is_named_and_so_is_one_without_the_other() -> None:
    found = [Figure("lines", 11), Figure("words", 5), Figure("new", 1)]
    assert house.exceeded(found, {"lines": 10, "words": 5, "gone": 3}) == ["lines", "new", "gone"]


def test_limits_only_fall() -> None:
    found = [Figure("lines", 11), Figure("words", 5), Figure("new", 1)]
    assert house.tightened(found, {"lines": 10, "words": 7}) == {"lines": 10, "words": 5, "new": 1}


def test_a_circle_is_seen_and_a_chain_is_counted() -> None:
    assert house.cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"]
    assert house.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


def test_methods_and_attributes_of_a_class_are_counted(tmp_path: Path) -> None:
    text = """
class Hub:
    kind: str

    def __init__(self):
        self.one, self.two = 1, 2

    async def go(self):
        self.one += self.kind.upper
        other.three = 3
"""
    (tmp_path / "hub.py").write_text(text)
    assert list(house.classes(tmp_path)) == [("Hub", 2, 2)]


def test_a_real_save_is_followed_from_the_call_to_the_commit() -> None:
    entered = trace_save.entered()
    assert "keepstep/checkpointer.py" in entered[trace_save.TRAINER]
    assert any("/volume/" in path for path in entered[trace_save.SIDECAR])
    assert any("/commit" in path for path in entered[trace_save.SIDECAR])
    assert not any("/archive/" in path for path in entered[trace_save.SIDECAR]), "there is none"
