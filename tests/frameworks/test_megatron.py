"""Megatron-core with components(): killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Lives, assert_same, drawn, result

STEPS = 14


@pytest.fixture
def loop(lives) -> Lives:
    return lives("megatron_loop.py", "tests.frameworks.megatron_on_cpu")


def kills() -> list[int]:
    return drawn(range(1, STEPS // 2), range(STEPS // 2, STEPS))


LAYOUTS = {
    "tensor parallel": {"tp": 2},
    "pipeline": {"pp": 2},
    "data parallel": {},
    "distributed optimizer": {"distributed": True},
    "distributed optimizer, float16": {"distributed": True, "precision": "fp16", "overflow": 4},
    "experts": {"ep": 2, "distributed": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_gone_on_with_bit_by_bit(loop, layout):
    options = LAYOUTS[layout]
    plain = loop.undisturbed(ranks=2, **options)
    kept, said = loop.kept(ranks=2, **options, kill=kills())
    assert "restored step" in said
    assert "discarded" not in said
    assert_same(plain, kept, kills=2, ranks=2)
    if "overflow" in options:
        assert result(plain)["progress"]["skipped"] == 1
