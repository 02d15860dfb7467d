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


CHANGES = [
    ({"tp": 2}, {"pp": 2}),
    ({"pp": 2}, {"tp": 2}),
    ({"distributed": True}, {"pp": 2, "distributed": True}),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_another_layout_gets_what_megatrons_own_checkpoint_gives_it(loop, before, after):
    loop.kept(ranks=2, **before, steps=4, out="before")
    own = loop.undisturbed(ranks=2, **after, own=True, steps=4, seed=2)
    kept, _ = loop.kept(ranks=2, **after, steps=4, seed=2, out="after")
    for rank in range(2):
        name = f"restored-{rank}"
        assert (kept / name).read_text() == (own / name).read_text()
    one, _ = loop.kept(**({"distributed": True} if "distributed" in before else {}), out="one")
    assert result(one)["progress"]["iteration"] == STEPS


def test_another_tensor_parallel_size_of_the_distributed_optimizer_is_refused(loop):
    loop.kept(ranks=2, tp=2, distributed=True, steps=2)
    kept, _ = loop.kept(ranks=2, distributed=True, steps=2, out="other")
    said = (kept / "refused-0").read_text()
    assert "megatron (distributed optimizer, tensor parallel size 2): in the checkpoint" in said
    assert "nothing was changed" in said
