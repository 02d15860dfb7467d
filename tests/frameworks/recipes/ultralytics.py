"""What a script on ultralytics starts from, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy
from ultralytics import YOLO

from tests.frameworks.script import OUT, SETTINGS, watch

COMPARED = ("trained", "ema", "optimizer", "scheduler", "fitness", "updates", "stopper", "loss")


def images(folder: Path) -> str:
    """Twelve squares on noise, each with its label. Returns the path of the data's description."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    drawn = numpy.random.RandomState(0)
    for at in range(12):
        image = drawn.randint(0, 256, (64, 64, 3), dtype=numpy.uint8)
        x, y = drawn.randint(8, 40, 2)
        image[y : y + 16, x : x + 16] = 255
        cv2.imwrite(str(folder / "images" / f"{at}.png"), image)
        label = f"0 {(x + 8) / 64} {(y + 8) / 64} 0.25 0.25\n"
        (folder / "labels" / f"{at}.txt").write_text(label)
    text = f"path: {folder.absolute()}\ntrain: images\nval: images\nnames: [square]\n"
    (folder / "data.yaml").write_text(text)
    return str(folder / "data.yaml")


def made() -> dict[str, Any]:
    names: dict[str, Any] = {}

    def begin(trainer: Any) -> None:
        watch(trainer.optimizer)

    def end(trainer: Any) -> None:
        names.update(
            trained=trainer.model, ema=trainer.ema.ema, optimizer=trainer.optimizer,
            scheduler=trainer.scheduler, fitness=trainer.best_fitness,
            updates=trainer.ema.updates, stopper=vars(trainer.stopper),
            loss=getattr(trainer.model.criterion, "updates", None),
        )  # fmt: skip

    class Watched(YOLO):
        def __init__(self, name: str) -> None:
            super().__init__(SETTINGS.get("yolo", name))

        def train(self, **options: Any) -> Any:
            self.add_callback("on_train_start", begin)  # after those of the page
            self.add_callback("on_train_end", end)
            return super().train(**options)

    settings = {
        "imgsz": 64, "batch": 4, "nbs": 4, "optimizer": "AdamW", "workers": 2, "device": "cpu",
        "amp": False, "plots": False, "verbose": False, "project": str(OUT.absolute()),
    }  # fmt: skip
    names.update(YOLO=Watched, data=images(OUT / "data"), settings=settings)
    return names
