"""ultralytics' trainers (YOLO, RT-DETR): every epoch is kept, and a killed run goes on.

    from keepstep.integrations.ultralytics import attach

    model = attach(YOLO("yolo26n.pt"))
    model.train(data=..., epochs=100)

These rules must hold:

- A kill costs its epoch, because the trainer cannot begin in the middle of one.
- Order and augmentation of an epoch follow from its number alone: the loader's workers begin anew
  with each. Otherwise they depend on all epochs before.
- The last epoch is not kept: after it the trainer evaluates, and then nothing may be skipped.
- What a loss counts (YOLO26) is kept as the trainer's own resume has it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, TypeVar

from ultralytics.engine.trainer import BaseTrainer
from ultralytics.utils.torch_utils import unwrap_model

from keepstep.errors import UsageError
from keepstep.integrations import mix_in, require_framework_hooks
from keepstep.integrations._training_identity import FrameworkTraining

T = TypeVar("T")

require_framework_hooks(
    "ultralytics",
    importlib.metadata.version("ultralytics"),
    hooks={
        "ultralytics.engine.trainer:BaseTrainer": (
            *("run_callbacks(event)", "train", "ddp", "world_size", "args", "stop", "start_epoch"),
            *("best_fitness", "model", "ema", "optimizer", "scaler", "scheduler", "stopper"),
            *("train_loader", "epoch", "batch_size"),
        ),
        "ultralytics.engine.model:Model": ("train(trainer)", "_smart_load(key)"),
        "ultralytics.data.build:InfiniteDataLoader": ("reset",),
    },
)

_OF_A_LIFE = ("save_dir", "exist_ok", "resume", "name", "project")


def attach(model: T, **options: Any) -> T:
    """The same `YOLO` or `RTDETR`, changed so that each epoch of its `train()` is kept. `options`:
    the options of `Checkpointer`.

    Raises UsageError for a model that is already attached.
    """
    if isinstance(model, _Attached):
        raise UsageError("this model is attached already")
    mix_in(model, _Attached, options)
    return model


class _Attached:
    keepstep_options: Mapping[str, Any]

    def train(self, trainer: Any = None, **options: Any) -> Any:
        """As the model's own, with a trainer that keeps."""
        kind: Any = trainer or self._smart_load("trainer")  # type: ignore[attr-defined]
        names = {"__module__": kind.__module__, "keepstep_options": self.keepstep_options}
        kept = type(kind.__name__, (KeepstepTrainerMixin, kind), names)
        return super().train(trainer=kept, **options)  # type: ignore[misc]


class KeepstepTrainerMixin(BaseTrainer):  # type: ignore[misc]  # to a checker: Any
    """`class MyTrainer(KeepstepTrainerMixin, DetectionTrainer)`, for `train(trainer=MyTrainer)`;
    see the module. `keepstep_options`: the options of `Checkpointer`."""

    keepstep_options: Mapping[str, Any] = {}
    best_fitness: Any

    def __init__(self, *given: Any, overrides: Any = None, **more: Any) -> None:
        """Raises UsageError for what keepstep cannot follow."""
        self._keepstep = FrameworkTraining(
            f"ultralytics' {type(self).__name__}", self.keepstep_options, speaks=True
        )
        if self._keepstep.has_step_on_any_rank():
            overrides = {**(overrides or {}), "exist_ok": True}  # all lives write to one folder
        super().__init__(*given, overrides=overrides, **more)
        if self.ddp or self.world_size > 1:
            raise UsageError(
                f"device={self.args.device}: keepstep keeps ultralytics' training on one device:"
                " give one, or train without attach()"
            )
        if self.args.time or self.batch_size < 1:
            raise UsageError(
                f"time={self.args.time}, batch={self.args.batch}: what an epoch does would depend"
                " on the machine: give epochs= and a batch= of at least 1, or train without"
                " attach()"
            )

    def train(self) -> Any:
        try:
            return super().train()
        except KeyboardInterrupt as error:
            self._keepstep.end_without_flushing(error)
            raise

    def run_callbacks(self, event: str) -> None:
        if event == "on_train_start":
            self._go_on()
        elif event == "on_train_epoch_start":
            self.train_loader.reset()
            self.train_loader.generator.manual_seed(self.args.seed + self.epoch)
        super().run_callbacks(event)
        if event == "on_fit_epoch_end" and not self.stop:
            self._keep()
        elif event == "on_train_end" and (checkpointer := self._keepstep.checkpointer):
            checkpointer.close()

    def _go_on(self) -> None:
        """Bring back the run's newest epoch."""
        training = self._keepstep
        kept = training.kept
        kept.update(epoch=-1, best_fitness=self.best_fitness, averaged=0, loss=0)
        components = {
            "model": self.model,
            "ema": self.ema.ema,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "scheduler": self.scheduler,
            "stopper": vars(self.stopper),
            "trainer": kept,
        }
        training.create_checkpointer(components, self.model)
        arguments = {
            name: value for name, value in vars(self.args).items() if name not in _OF_A_LIFE
        }
        if training.restore_newest_step(self.model, arguments) is None:
            return
        self.start_epoch, self.ema.updates = kept["epoch"] + 1, kept["averaged"]
        self.best_fitness = kept["best_fitness"]
        if kept["loss"]:
            model = unwrap_model(self.model)
            model.criterion = model.init_criterion()
            model.criterion.updates = kept["loss"] - 1
            model.criterion.update()
        assert training.checkpointer is not None, "prepare has made it"
        training.checkpointer.restore_rng()

    def _keep(self) -> None:
        training = self._keepstep
        training.record_framework_state(
            epoch=self.epoch,
            best_fitness=self.best_fitness,
            averaged=self.ema.updates,
            loss=getattr(unwrap_model(self.model).criterion, "updates", 0),
        )
        assert training.checkpointer is not None, "it was made when the training began"
        training.checkpointer.save(self.epoch)
