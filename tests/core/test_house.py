"""The sidecar's packages import each other without cycles and in few layers; few files are in its
root."""

from __future__ import annotations

import pytest

from scripts import house


@pytest.mark.parametrize("name", ["floors", "cycles", "files"])
def test_the_house_stands(name: str) -> None:
    for figure in house.figures():
        if figure.name.startswith(name):
            assert figure.met, f"{figure.value} {figure.name}, at most {figure.most}"


def test_a_circle_is_seen_and_a_chain_is_counted() -> None:
    assert house.cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"]
    assert house.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3
