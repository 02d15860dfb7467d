"""The loops of docs/recipes, as their pages say them, killed where it hurts."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import assert_same, drawn, losses

VISION = (
    *("tests.frameworks.vision_on_cpu", "timm.data", "timm.optim", "ultralytics.models.yolo"),
    *("ultralytics.engine.trainer", "ultralytics.utils.callbacks.raytune"),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nanogpt(lives, ranks):
    loop = lives("recipe.py", "lightning.fabric", "accelerate", "torchdata.stateful_dataloader")
    plain = loop.undisturbed(ranks=ranks, page="nanogpt")
    kept, said = loop.kept(ranks=ranks, page="nanogpt", kill=drawn(range(1, 6), range(6, 13)))
    assert "restored step" in said
    assert_same(plain, kept, kills=2, ranks=ranks)
    assert len(next(iter(losses(kept)[0]))) == 2, "two micro-batches a step"


@pytest.mark.parametrize("lora", [False, True])
def test_diffusers(lives, lora):
    loop = lives("recipe.py", "diffusers", "diffusers.training_utils", "accelerate", "peft")
    plain = loop.undisturbed(page="diffusers", lora=lora)
    kill = [*drawn(range(1, 5)), 5, *drawn(range(6, 10))]
    kept, said = loop.kept(page="diffusers", lora=lora, kill=kill)
    assert "restored step" in said
    assert_same(plain, kept, kills=3)


@pytest.mark.parametrize("prefetch", [False, True])
def test_timm(lives, prefetch):
    """Killed in an evaluation, too."""
    loop = lives("recipe.py", *VISION)
    plain = loop.undisturbed(page="timm", prefetch=prefetch)
    kill = [*drawn(range(1, 6)), -1, *drawn(range(7, 17))]
    kept, said = loop.kept(page="timm", prefetch=prefetch, kill=kill)
    assert "restored step" in said
    assert_same(plain, kept, kills=3)


def test_ultralytics(lives):
    """Beside the same callbacks undisturbed: the page says why."""
    loop = lives("recipe.py", *VISION)
    plain = loop.undisturbed(page="ultralytics", bare=False)
    kept, said = loop.kept(page="ultralytics", kill=drawn(range(3, 6), range(6, 9)))
    assert "restored step" in said
    assert_same(plain, kept, kills=2)
