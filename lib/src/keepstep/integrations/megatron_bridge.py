"""Megatron-Bridge: keepstep saves and loads in place of its checkpoint manager.

    from keepstep.integrations.megatron_bridge import manage

    manage(config.checkpoint)    # the CheckpointConfig, before pretrain()

These rules must hold:

- A step of the run takes precedence over everything else that Megatron-Bridge could load. If the
  run has no step, its own manager loads `load` or `pretrained_checkpoint`, as without keepstep.
- Its own files (`latest_train_state.pt`, `run_config.yaml`) are not written.
- What it asks for is done at once and in any order: it finishes pending saves at each step, and
  ends several times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from keepstep.checkpointer import Checkpointer
from keepstep.errors import UsageError
from keepstep.integrations.megatron import components

_PACKAGE: Final = "keepstep."


def manage(checkpoint_config: Any) -> None:
    """Have keepstep save and load where Megatron-Bridge asks for it, every `save_interval` steps.

    `checkpoint_config`: the `CheckpointConfig`, whose `save` must be set, since Megatron-Bridge
    saves nothing else. The same in a YAML file is `custom_manager_class:
    keepstep.integrations.megatron_bridge.KeepstepCheckpointManager`, with this module imported
    before.
    """
    if not checkpoint_config.save:
        raise UsageError("checkpoint.save is not set, so Megatron-Bridge never saves: set it")
    kind = KeepstepCheckpointManager
    checkpoint_config.custom_manager_class = f"{kind.__module__}.{kind.__qualname__}"
    _allow()


def _allow() -> None:
    """Newer versions take classes of known packages only."""
    try:
        from megatron.bridge.utils import instantiate_utils
    except ImportError:
        return
    if hasattr(instantiate_utils, "register_allowed_target_prefix"):
        instantiate_utils.register_allowed_target_prefix(_PACKAGE)


_allow()


class KeepstepCheckpointManager:
    """A `CheckpointManager` of Megatron-Bridge's. `checkpointer`: keepstep's Checkpointer, for
    `stats`, `wait` and `mutating`; None before `load`."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self.checkpointer: Checkpointer | None = None

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Megatron-Bridge calls `load` where its own directory has a checkpoint, or where this has
        a manager of local ones that has found any."""
        return {"local_checkpoint_manager": self}

    def find_latest(self) -> int:
        """Whether there is something to load is known to `load` only."""
        return 0

    def load(self, ctx: Any) -> tuple[int, int]:
        """Restore the newest step into the training. Returns its iteration and the floating-point
        operations until then; (0, 0) if there is nothing to load."""
        _refuse(ctx)
        kept = components(ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        self.checkpointer = Checkpointer({**kept, "train_state": _TrainState(ctx.state)})
        if self.checkpointer.restore() is None:
            return self._load_own(ctx)
        return _counts(ctx.state)

    def _load_own(self, ctx: Any) -> tuple[int, int]:
        config = self.checkpoint_config
        places = (config.load, config.pretrained_checkpoint)
        if not any(place is not None and Path(place).exists() for place in places):
            return 0, 0
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        found: tuple[int, int] = DefaultCheckpointManager(config).load(ctx)
        return found

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Keep this step. Returns at once, and never waits for a disk."""
        del callback_manager
        if self.checkpointer is None:
            raise UsageError(
                "Megatron-Bridge did not call load(), so a restart would silently begin at step 0."
                " With an adapter (peft) it only does where checkpoint.load has a checkpoint"
            )
        state = ctx.state.train_state
        state.floating_point_operations_so_far = ctx.num_floating_point_operations_so_far
        self.checkpointer.save(state.step)

    def finalize_async_saves(
        self, state: Any, blocking: bool = False, terminate: bool = False
    ) -> None:
        """At the end (`terminate`), return once the last step is durable on every rank."""
        del state, blocking
        if terminate and self.checkpointer is not None:
            self.checkpointer.close()


class _TrainState:
    """The counts of the training, which Megatron-Bridge puts into a new object at a load."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state.train_state.state_dict()

    def load_state_dict(self, kept: Any) -> None:
        self._state.train_state.load_state_dict(kept)


def _counts(state: Any) -> tuple[int, int]:
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    counts = state.train_state
    update_num_microbatches(consumed_samples=counts.consumed_train_samples, verbose=True)
    return int(counts.step), int(counts.floating_point_operations_so_far)


def _refuse(ctx: Any) -> None:
    """Raise UsageError for what keepstep cannot keep."""
    config = ctx.state.cfg
    for refused, what, instead in (
        (ctx.optimizer is None, "a training without an optimizer", "leave keepstep out"),
        (ctx.skip_load_to_model_and_opt, "use_torch_fsdp2", "take use_distributed_optimizer"),
        (getattr(ctx, "module_name", None), "several modules (MIMO)", "leave keepstep out"),
        (config.dist.use_decentralized_pg, "use_decentralized_pg", "leave it out"),
        (
            getattr(config.dataset, "dataloader_save", None),
            "the state of an Energon loader (dataset.dataloader_save)",
            "take a dataset that begins at consumed_train_samples",
        ),
    ):
        if refused:
            raise UsageError(f"keepstep cannot keep {what} under Megatron-Bridge: {instead}")
