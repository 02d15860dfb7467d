"""torchtitan's Trainer: every step is kept, and a killed run goes on.

    from keepstep.integrations.torchtitan import KeepstepCheckpointManager

    checkpoint=KeepstepCheckpointManager.Config(enable=True)    # for CheckpointManager.Config

These rules must hold:

- A step of the run takes precedence over everything else that torchtitan could load. If the run has
  no step, torchtitan's own manager loads what it would load without keepstep.
- Random states are set once the loader's iterator exists, because making it draws from them.
- torchtitan's own manager also writes the last step, as its options say, so that other programs can
  read it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    CheckpointManager,
)

from keepstep.checkpointer import Checkpointer
from keepstep.client import embedded
from keepstep.errors import UsageError
from keepstep.integrations import require_framework_hooks
from keepstep.integrations._training_identity import FrameworkTraining

log = logging.getLogger("keepstep")

require_framework_hooks(
    "torchtitan",
    importlib.metadata.version("torchtitan"),
    hooks={
        "torchtitan.components.checkpointer:CheckpointManager": (
            *("_load(step)", "_save(curr_step, last_step)", "_should_save(curr_step, last_step)"),
            *("_close", "states", "exclude_from_loading", "load_only"),
        ),
        "torch.distributed.pipelining.schedules:_PipelineSchedule": (
            "_initialize_pp_stages(stages, args, kwargs, target, fwd_initialized, bwd_initialized)",
        ),
    },
)


class KeepstepCheckpointManager(CheckpointManager):  # type: ignore[misc]  # to a checker: Any
    """See the module. `checkpointer`: keepstep's Checkpointer, for `stats`, `wait` and
    `mutating`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Like torchtitan's own. `load_step`, `exclude_from_loading` and `initial_load_*` apply
        only if the run holds no step; `last_save_*` and `folder` say how the last step is written.
        """

        interval: int = 1
        """The number of steps from one step that keepstep keeps to the next."""

    def __init__(self, config: Config, **given: Any) -> None:
        if config.enable and config.async_mode != "disabled":
            raise UsageError(
                f"checkpoint.async_mode={config.async_mode}: keepstep copies beside the training"
                " by itself, and torchtitan writes the last step only: leave it out"
            )
        super().__init__(config, **given)
        if not self.enable:
            if embedded.ensure_sidecar(None):
                log.warning(
                    "keepstep: checkpoint.enable is False, so no step is kept [save.disabled]"
                )
            return
        components = dict(self.states)
        _spread(components, MODEL, given["model_parts"])
        _spread(components, OPTIMIZER, list(given["optimizers"]))
        if components[DATALOADER] is None:
            del components[DATALOADER]
        if (schedule := getattr(components["train_state"], "pp_schedule", None)) is not None:
            _infer_aside(schedule, given["model_parts"])
        self._training = FrameworkTraining("torchtitan's Trainer", {}, speaks=False)
        self.checkpointer = Checkpointer(components)

    def _load(self, step: int = -1) -> bool:
        at = self.checkpointer.restore(rng="later")
        self._training.mark_started()
        if at is None:
            return bool(super()._load(step))
        if step != -1 or self.exclude_from_loading:
            log.warning(
                "keepstep: checkpoint.load_step=%d and exclude_from_loading=%s are ignored: this"
                " run holds step %d [integration.argument_ignored]",
                *(step, self.exclude_from_loading, at.step),
            )
        loader = self.states[DATALOADER]
        if loader is None:
            self.checkpointer.restore_rng()
        else:
            _after_iter(loader, self.checkpointer)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only:
            return False
        kept = False
        if self.checkpointer.epoch is not None and self._should_save(curr_step, last_step):
            kept = self.checkpointer.save(curr_step)
        if last_step:
            return bool(super()._save(curr_step, last_step))
        return kept

    def _close(self) -> None:
        # after an error, do not wait for work that the other ranks will no longer do
        if sys.exc_info()[0] is None and hasattr(self, "checkpointer"):
            self.checkpointer.close()
        super()._close()

    def __del__(self) -> None:
        """Like torchtitan's own, which calls `close()`, but without closing keepstep's
        Checkpointer: an error may be what ends this process."""
        if getattr(self, "enable", False):
            super()._close()


def _spread(components: dict[str, Any], name: str, parts: list[Any]) -> None:
    """Make each part of a model or optimizer a component of its own, because keepstep looks into
    modules and optimizers."""
    del components[name]
    for number, part in enumerate(parts):
        components[name if len(parts) == 1 else f"{name}-{number}"] = part


def _after_iter(loader: Any, checkpointer: Checkpointer) -> None:
    """Set the random states once the trainer has made this loader's iterator."""
    kind = type(loader)

    class Resumed(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            checkpointer.restore_rng()
            return iterator  # type: ignore[no-any-return]

    Resumed.__name__, Resumed.__qualname__ = kind.__name__, kind.__qualname__
    Resumed.__module__ = kind.__module__
    loader.__class__ = Resumed


def _infer_aside(schedule: Any, parts: list[Any]) -> None:
    """Undo what the pass that infers shapes does to buffers. A pipeline has it in the first step of
    each life, on memory with any content, and experts count their tokens there."""
    infer = schedule._initialize_pp_stages

    def inferred(*args: Any, **options: Any) -> Any:
        if args[4] and args[5] == schedule._has_backward:
            return infer(*args, **options)
        buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
        done = infer(*args, **options)
        for buffer, before in buffers:
            buffer.copy_(before)
        return done

    schedule._initialize_pp_stages = inferred
