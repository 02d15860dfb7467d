"""The loops of docs/recipes, as their pages say them, killed where it hurts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.frameworks.conftest import LIGHTNING, TRAINER, assert_same, drawn, losses, python

VISION = (
    *("tests.frameworks.vision_on_cpu", "timm.data", "timm.optim", "ultralytics.models.yolo"),
    *("ultralytics.engine.trainer", "ultralytics.utils.callbacks.raytune", "mlflow"),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_nanogpt_recipe_resumes_bit_equal(lives, ranks):
    loop = lives("recipe.py", *LIGHTNING)
    plain = loop.undisturbed(ranks=ranks, page="nanogpt")
    kept, output = loop.kept(ranks=ranks, page="nanogpt", kill=drawn(range(1, 6), range(6, 13)))
    assert "restored step" in output
    assert_same(plain, kept, kills=2, ranks=ranks)
    assert len(next(iter(losses(kept)[0]))) == 2, "two micro-batches a step"


@pytest.mark.parametrize("lora", [False, True])
def test_the_diffusers_recipe_resumes_bit_equal(lives, lora):
    loop = lives("recipe.py", "diffusers", "diffusers.training_utils", *TRAINER)
    plain = loop.undisturbed(page="diffusers", lora=lora)
    kill = [*drawn(range(1, 5)), 5, *drawn(range(6, 10))]
    kept, output = loop.kept(page="diffusers", lora=lora, kill=kill)
    assert "restored step" in output
    assert_same(plain, kept, kills=3)


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_timm_recipe_resumes_bit_equal(lives, prefetch):
    """Killed in an evaluation, too."""
    loop = lives("recipe.py", *VISION)
    plain = loop.undisturbed(page="timm", prefetch=prefetch)
    kill = [*drawn(range(1, 6)), -1, *drawn(range(7, 17))]
    kept, output = loop.kept(page="timm", prefetch=prefetch, kill=kill)
    assert "restored step" in output
    assert_same(plain, kept, kills=3)


@pytest.mark.parametrize("yolo", ["yolo11n.yaml", "yolo26n.yaml"])
def test_the_ultralytics_recipe_resumes_bit_equal(lives, yolo):
    """Beside the same lines undisturbed: the page says why. The loss of YOLO26 counts epochs."""
    loop = lives("recipe.py", *VISION)
    plain = loop.undisturbed(page="ultralytics", bare=False, yolo=yolo)
    kept, output = loop.kept(page="ultralytics", yolo=yolo, kill=drawn(range(3, 6), range(6, 9)))
    assert "restored step" in output
    assert_same(plain, kept, kills=2)
    assert "was never tested" not in output


REFUSALS = """
import tests.frameworks.vision_on_cpu
from ultralytics import YOLO

from keepstep.errors import UsageError
from keepstep.integrations.ultralytics import attach

data = __import__("tests.frameworks.recipes.ultralytics", fromlist=["images"]).images(OUT / "data")
model = attach(YOLO("yolo11n.yaml"))
for again in (
    lambda: attach(model),
    lambda: model.train(data=data, time=0.1, device="cpu", project=str(OUT)),
    lambda: model.train(data=data, batch=-1, device="cpu", project=str(OUT)),
):
    try:
        again()
    except UsageError as error:
        print("refused:", error)
"""


def test_unsupported_ultralytics_options_are_refused_by_name(tmp_path):
    script = f"from pathlib import Path\nOUT = Path({str(tmp_path)!r})\n{REFUSALS}"
    printed = subprocess.run(
        [python(*VISION), "-c", script, str(tmp_path), "{}"],
        **{"capture_output": True, "text": True, "cwd": tmp_path, "check": True},
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    refused = [line for line in printed.splitlines() if line.startswith("refused:")]
    for line, reason in zip(refused, ("attached", "time=0.1", "batch=-1"), strict=True):
        assert reason in line
