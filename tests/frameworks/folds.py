"""A cross-validation as people write it: one training for each fold, in one process.

`python folds.py OUT SETTINGS`; `framework`: "transformers" or "lightning"; `named`: each fold has a
run of its own. OUT/folds gets a line for each fold that ends: its number, the optimizer's steps in
this life, its losses and weights.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.frameworks.script import OUT, SETTINGS, digest, maybe_kill

FOLDS, STEPS = 3, 6
KEEP = not SETTINGS.get("bare")


def rows(fold: int) -> torch.Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(fold))


def options(fold: int) -> dict[str, Any]:
    return {"dir": str(OUT / "runs"), "run": f"fold-{fold}"} if SETTINGS.get("named") else {}


class Line(torch.nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).square().mean()}


def with_trainer(fold: int) -> tuple[int, Any, list[float]]:
    import transformers

    from keepstep.integrations.transformers import attach

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        done = 0

        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            maybe_kill(STEPS * fold + state.global_step)
            self.done += 1

    arguments = transformers.TrainingArguments(
        output_dir=str(OUT / "hf"), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    data = [{"x": row} for row in rows(fold)]
    steps = Steps()
    trainer = transformers.Trainer(
        model=Line(), args=arguments, train_dataset=data, callbacks=[steps]
    )
    if KEEP:
        trainer = attach(trainer, **options(fold))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return steps.done, trainer.model, losses


def with_lightning(fold: int) -> tuple[int, Any, list[float]]:
    import lightning

    from keepstep.integrations.lightning import KeepstepCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.line, self.done = Line(), 0

        def training_step(self, batch: torch.Tensor, at: int) -> Any:
            return self.line(batch)["loss"]

        def on_after_backward(self) -> None:
            maybe_kill(STEPS * fold + self.trainer.global_step)
            self.done += 1

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[KeepstepCallback(**options(fold))] if KEEP else [],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(fold), batch_size=4, shuffle=True))
    return module.done, module, []


TRAIN = {"transformers": with_trainer, "lightning": with_lightning}


def main() -> None:
    names = SETTINGS.get("mixed") or [SETTINGS["framework"]] * FOLDS
    for fold, name in enumerate(names):
        done, model, losses = TRAIN[name](fold)
        line = {"fold": fold, "done": done, "losses": losses, "weights": digest(model.state_dict())}
        with (OUT / "folds").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
