"""Hugging Face's Trainer and its subclasses: every step is kept, and a killed run goes on.

    trainer = keepstep.integrations.transformers.attach(Trainer(...))

or `class MyTrainer(KeepstepTrainerMixin, Seq2SeqTrainer)`. Callbacks cannot do this. Trainer
decides where to begin before it wraps the model, and passes that on as arguments. It logs,
evaluates and adds up after the last callback of a step.

These rules must hold:

- A step is kept once Trainer is done with it, including log, evaluation and its own checkpoint. The
  last step of an epoch is kept once the epoch is over.
- Random states are set where Trainer would set them: after the batches that are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_callback import ExportableState

from keepstep.checkpointer import Checkpointer
from keepstep.errors import UsageError, few
from keepstep.image import extras_codec
from keepstep.integrations import (
    find_attributes_set_in_code,
    loaders,
    mix_in,
    require_framework_hooks,
    require_supported_accelerate,
    require_torch_optimizer,
)
from keepstep.integrations._training_identity import (
    FrameworkTraining,
    refuse_sharded_quantized,
    select_saved_module,
)
from keepstep.state import rng

log = logging.getLogger("keepstep")

# --- what a trainer knows beside Trainer's own state ----------------------------------------------
#
# A subclass of Trainer and its callbacks know more. Trainer has no place for it, so no checkpoint
# of Trainer's holds it either. For the trainers of TRL and sentence-transformers, a table names the
# attributes to keep. For all others, `_Watch` compares attributes between steps, so that what
# changes and is not kept is named while the first life still trains.


_SUMS = ("_metrics", "_total_train_tokens")
_ROLLOUTS = ("_step", "_buffered_inputs", "_metrics", "_current_train_step_time")
_ENTROPY = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")

OWN: dict[str, dict[str, tuple[str, ...]]] = {
    "trl": {
        "SFTTrainer": _SUMS,
        "DPOTrainer": _SUMS,
        "KTOTrainer": _SUMS,
        "RewardTrainer": _SUMS,
        "GRPOTrainer": (*_ROLLOUTS, *_ENTROPY),
        "RLOOTrainer": _ROLLOUTS,
    },
    "sentence_transformers": {"BaseTrainer": ("accum_loss_components", "loss")},
}
"""The attributes that a step keeps, by package and class: sums for the next line of the log, the
rollouts of the steps to come, and of a loss what is trained along."""

_INCIDENTAL = frozenset(
    {"_logs", "_last_loaded_step", "_pending_extra_logs", "_pending_metrics", "_signature_columns"}
)
"""Attributes of TRL's trainers that are printed, or made again where they are needed."""

_LIBRARIES = frozenset(
    {
        *("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "keepstep"),
        *("tqdm", "rich", "logging", "threading", "_thread", "_io", "builtins", "wandb", "vllm"),
    }
)
"""Packages into whose objects `_Watch` does not look."""

_DEPTH, _ITEMS, _PARAMETERS, _ELEMENTS = 4, 32, 4, 16
_SHOWN = 8


class _OwnState:
    """The attributes of a trainer in `OWN` that its next step depends on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        names = (name for name in _names_of(type(trainer)) if hasattr(trainer, name))
        self.names = tuple(name for name in names if name != "loss")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self._trainer, name, value)


def _is_sync(callback: Any) -> bool:
    """Whether it trains a reference model along: TRL's `sync_ref_model`."""
    return any(kind.__name__ == "SyncRefModelCallback" for kind in type(callback).__mro__)


def _names_of(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        yield from OWN.get(base.__module__.partition(".")[0], {}).get(base.__name__, ())


def _weights_of_loss(trainer: Any) -> dict[str, Tensor]:
    """The parameters of the loss of a trainer of sentence-transformers that are not the model's."""
    if "loss" not in _names_of(type(trainer)):
        return {}
    losses = trainer.loss if isinstance(trainer.loss, dict) else {"": trainer.loss}
    parameters = nn.ModuleDict({f"of {name}": loss for name, loss in losses.items()})
    models = {id(parameter) for parameter in trainer.model.parameters()}
    named = parameters.named_parameters()
    return {
        name: parameter
        for name, parameter in named
        if parameter.requires_grad and id(parameter) not in models
    }


class _Watch:
    """Names once what changes between two steps and is in none of them.

    It compares after 1, 2, 4, 8 ... steps of a life, and the state of a model by a few of its
    elements: a step must not become slower by it.
    """

    def __init__(self, trainer: Any, components: Iterable[Any], *, own: bool) -> None:
        """`components`: what is kept. `own`: look at the trainer's attributes, too, and not only at
        those of callbacks."""
        self._trainer, self._own = trainer, own
        self._components = frozenset(id(component) for component in components)
        self._kept = frozenset(_names_of(type(trainer)))
        self._steps, self._next, self._warned = 0, 2, False
        self._first: dict[str, Any] = {}

    def step(self) -> None:
        """One more step was kept."""
        self._steps += 1
        if self._steps == 1:
            self._first = self._observe()
        elif self._steps == self._next and not self._warned:
            self._next *= 2
            self._warn()

    def _warn(self) -> None:
        now = self._observe()
        changed = sorted(name for name, value in now.items() if self._first.get(name) != value)
        if changed:
            self._warned = True
            log.warning(
                "keepstep: %s: changes from step to step, and is in no step: after a restart it"
                " begins as in a new training. Name it in keepstep_components() of a class with"
                " KeepstepTrainerMixin; a callback keeps what its state() holds"
                " (transformers.trainer_callback.ExportableState) [integration.state_not_saved]",
                few(changed, _SHOWN),
            )

    def _observe(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        observed = _TrainerState(self._trainer, self._components)
        if self._own:
            names = vars(self._trainer).keys() - _trainers_own() - self._kept - _INCIDENTAL
            prefix = type(self._trainer).__name__
            found = {f"{prefix}.{name}": observed.at(vars(self._trainer)[name]) for name in names}
        for callback in self._trainer.callback_handler.callbacks:
            if (
                _library(callback) == "transformers"
                or isinstance(callback, ExportableState)
                or _is_sync(callback)
            ):
                continue
            for name, value in vars(callback).items():
                found[f"{type(callback).__name__}.{name}"] = observed.at(value)
        return found


class _TrainerState:
    """What can be compared of values that may be anything."""

    def __init__(self, trainer: Any, components: frozenset[int]) -> None:
        self._trained = {id(parameter) for parameter in trainer.model.parameters()}
        self._seen = set(components)

    def at(self, value: Any, depth: int = _DEPTH) -> Any:
        if isinstance(value, float):
            return value if value == value else "nan"
        if value is None or isinstance(value, bool | int | complex | str | bytes):
            return value
        if id(value) in self._seen or depth == 0:
            return type(value).__name__
        if isinstance(value, Tensor):
            return self._tensor(value)
        self._seen.add(id(value))
        try:
            return self._inside(value, depth - 1)
        finally:
            self._seen.discard(id(value))

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Module):
            others = [
                parameter for parameter in value.parameters() if id(parameter) not in self._trained
            ]
            return [self._tensor(parameter) for parameter in others[:_PARAMETERS]]
        if isinstance(value, dict):
            return len(value), self._items(value.values(), depth), self._items(value, depth)
        if isinstance(value, list | tuple | deque | set | frozenset):
            return len(value), self._items(list(value)[-_ITEMS:], depth)
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # an array of numpy
            return value.shape, value.tobytes()[: 8 * _ELEMENTS]
        if isinstance(value, Trainer) or callable(value) or _library(value) in _LIBRARIES:
            return type(value).__name__
        inside = getattr(value, "__dict__", {})
        return type(value).__name__, self._items(list(inside.items()), depth)

    def _items(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.at(value, depth) for value, _ in zip(values, range(_ITEMS), strict=False)]

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) in self._trained:
            return "trained"
        shape = tuple(tensor.shape)
        if tensor.is_meta or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter):
            return shape
        # not its version: `.data` changes without one
        some = tensor.detach().reshape(-1)[:_ELEMENTS]
        return shape, torch.nan_to_num(some.double()).cpu().tolist()


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


@functools.cache
def _trainers_own() -> frozenset[str]:
    """The attributes that Trainer's own code assigns."""
    own = {"_keepstep", "keepstep_options", "callback_handler"}
    return find_attributes_set_in_code(Trainer) | find_attributes_set_in_code(Seq2SeqTrainer) | own


T = TypeVar("T", bound=Trainer)

require_framework_hooks(
    "transformers",
    transformers.__version__,
    hooks={
        "transformers:Trainer": (
            "set_initial_training_values(args, dataloader)",
            "_inner_training_loop",
            "_init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs,"
            " resume_from_checkpoint, trial)",
            "_prepare_for_training(resume_from_checkpoint)",
            "_run_epoch(epoch, train_dataloader, epochs_trained, resume_from_checkpoint,"
            " steps_trained_in_current_epoch, num_update_steps_per_epoch)",
            *("_evaluate", "_load_rng_state(checkpoint)", "_maybe_log_save_evaluate"),
            "_finalize_training(trial, num_train_samples, start_time)",
            *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos"),
            "_initial_global_step",
        )
    },
)
require_supported_accelerate()

_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The progress in TrainerState. Everything else in it follows from the arguments, or belongs to
this process."""

_FREE = (
    *("output_dir", "logging_", "eval_", "save_", "hub_", "push_to_hub", "report_to", "run_name"),
    *("disable_tqdm", "log_", "dataloader_num_workers", "resume_from_checkpoint", "do_", "project"),
    *("local_rank", "ddp_", "trackio_", "include_", "use_cpu", "load_best", "metric_for_best"),
)
"""What the names of arguments begin with that another life may change: nothing trained depends on
them."""

_RESUMED = "keepstep"
"""Stands for the directory of a checkpoint in Trainer's epoch."""


def attach(trainer: T, **options: Any) -> T:
    """The same trainer, changed so that every step of its `train()` is kept. `options`: the options
    of `Checkpointer`.

    Raises UsageError for a trainer that is already attached.
    """
    if isinstance(trainer, KeepstepTrainerMixin):
        raise UsageError("this trainer is attached already, or has KeepstepTrainerMixin")
    mix_in(trainer, KeepstepTrainerMixin, options)
    return trainer


class _Training(FrameworkTraining):
    """One `train()`. In `kept`: `epoch` and the step that it `begun_at`; `epoch_rng`: random states
    at that moment; `own`: those of generators that the loader and its samplers have of their own,
    then, or between two epochs; `fresh`: whether the loader's iterator was made then; `stopped`:
    the step count to which training was to go when it stopped. It already has the tensors, so that
    the layout has a place for them from the start.

    `logged`: the entries of the log that are in `kept`; `logged_bytes`: of the tensor there that
    holds them. `evaluated`: names that Trainer gives the loaders of evaluations which earlier lives
    have begun.
    """

    def __init__(self, trainer: KeepstepTrainerMixin) -> None:
        speaks = trainer.is_world_process_zero()
        super().__init__(_name(trainer), trainer.keepstep_options, speaks=speaks)
        self.kept.update(
            epoch=0,
            begun_at=0,
            epoch_rng={},
            own=[],
            fresh=True,
            stopped=0,
            log=torch.zeros(extras_codec.capacity_for(0), dtype=torch.uint8, device="cpu"),
            state={},
            callbacks=[],
            loss=torch.tensor(0.0, device=trainer.args.device),
            total_loss=0.0,
            logged_at=0,
            began_at=0,
            flos=0.0,
            evaluated=[],
            seconds=0.0,
        )
        self.loader: Any = None
        self.prepared: Any = None
        self.watch: _Watch | None = None
        self.taken_up = self.epoch_over = False
        self.updates_per_epoch = self.logged = self.logged_bytes = 0
        self.seconds_before, self.started = 0.0, time.monotonic()
        self.evaluated: frozenset[str] = frozenset()


class KeepstepTrainerMixin(Trainer):  # type: ignore[misc]  # to a checker without transformers: Any
    """`class MyTrainer(KeepstepTrainerMixin, Trainer)`; see the module.

    `keepstep_options`: the options of `Checkpointer`. `checkpointer`: set during and after
    `train()`, for `stats`, `wait` and `mutating`.
    """

    keepstep_options: dict[str, Any] = {}  # noqa: RUF012
    _keepstep: _Training | None = None

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The Checkpointer of the last `train()`."""
        return self._keepstep.checkpointer if self._keepstep is not None else None

    def keepstep_components(self) -> dict[str, Any]:
        """The components to keep, by name, once everything is prepared.

        Override it to add anything else that the next step depends on. Raises UsageError for an
        optimizer that is not a torch optimizer, and for what keepstep cannot keep of DeepSpeed.
        """
        if self.is_deepspeed_enabled:
            from keepstep.integrations import deepspeed

            components = deepspeed.components(self.model_wrapped)
        else:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # AcceleratedOptimizer
            require_torch_optimizer(optimizer)
            components = {"model": select_saved_module(self.model_wrapped), "optimizer": optimizer}
        others = {
            "scheduler": self.lr_scheduler,
            "scaler": self.accelerator.scaler,
            "reference": next(
                (
                    callback.ref_model
                    for callback in self.callback_handler.callbacks
                    if _is_sync(callback)
                ),
                None,
            ),
            "own": own if (own := _OwnState(self)).names else None,
            "loss": _weights_of_loss(self) or None,
        }
        return {name: other for name, other in others.items() if other is not None} | components

    # --- Trainer's methods, in the order in which it calls them ----------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Like Trainer's, but goes on from the run's newest step. `resume_from_checkpoint` counts
        only if the run holds no step."""
        _refuse(self)
        self._keepstep = training = _Training(self)
        if training.skips_framework_load("resume_from_checkpoint", resume_from_checkpoint):
            resume_from_checkpoint = None
        try:
            return super().train(resume_from_checkpoint, *args, **options)
        except KeyboardInterrupt as error:
            training.end_without_flushing(error)
            raise

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        self._now.loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Where to begin. Everything that is restored must exist by then, so it is prepared and
        restored first."""
        if trial is not None:
            raise UsageError("keepstep keeps one training, and no search of hyperparameters")
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._prepare_for_training(max_steps, self._now.loader, resume_from_checkpoint)
        training, kept = self._now, self._now.kept
        components = {**self.keepstep_components(), "trainer": kept}
        training.create_checkpointer(components, self.model)
        at = training.restore_newest_step(self.model, _arguments(self))
        if self.checkpointer is not None and self.checkpointer.epoch is not None:
            if training.speaks:
                mine = type(self).keepstep_components is KeepstepTrainerMixin.keepstep_components
                training.watch = _Watch(self, components.values(), own=mine)
            loaders.warn_of_draws(_torchs(training.loader))
        if at is None:
            kept.update(epoch=begin[0], begun_at=begin[0] * num_update_steps_per_epoch)
            return begin
        self._take_up_state()
        step = self.state.global_step
        if step >= max_steps or kept["stopped"] == max_steps:
            training.report_complete(step, max_steps)
            return num_train_epochs, 0
        if self.args.ignore_data_skip:
            kept["begun_at"] = step
        return kept["epoch"], (step - kept["begun_at"]) * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        if self._now.prepared is None:
            self._now.prepared = super()._prepare_for_training(*args, **options)
        return self._now.prepared

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        if self._now.at is not None and not self._now.taken_up:
            return None  # `eval_on_start`: this training already started in an earlier life
        return super()._evaluate(*args, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As Trainer's. Workers that outlive an evaluation draw no seed in a later one, in whatever
        life that is."""
        loader = super().get_eval_dataloader(eval_dataset)
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if self._keepstep is not None and name in self._keepstep.evaluated:
            loaders.begin_workers(_torchs(loader))
        return loader

    def _run_epoch(
        self,
        *,
        epoch: int,
        epochs_trained: int,
        resume_from_checkpoint: Any,
        steps_trained_in_current_epoch: int,
        num_update_steps_per_epoch: int,
        **others: Any,
    ) -> None:
        self._take_up_sums()
        training, kept = self._now, self._now.kept
        first, skipped = epoch == epochs_trained, steps_trained_in_current_epoch
        loader = _torchs(others["train_dataloader"])
        seeding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if first and training.at is not None:
            resume_from_checkpoint = _RESUMED
            loaders.restore_generator_states(kept["own"], [loader])
        if first and skipped and training.at is not None:
            # samplers and workers draw the seeds that they drew when this epoch began
            rng.apply_generators(kept["epoch_rng"])
            if not kept["fresh"]:
                seeding = loaders.seeds_drawn_aside(loader)
        else:
            if training.at is not None:
                loaders.begin_workers(loader)
            if first and not skipped:
                self._load_rng_state(resume_from_checkpoint)  # as Trainer does again
            kept.update(
                epoch_rng=rng.capture_all_generators(),
                own=loaders.capture_loader_generators([loader]),
                fresh=loaders.is_next_iterator_new(loader),
            )
        training.epoch_over = False
        training.updates_per_epoch = num_update_steps_per_epoch
        with seeding:
            super()._run_epoch(
                epoch=epoch,
                epochs_trained=epochs_trained,
                resume_from_checkpoint=resume_from_checkpoint,
                steps_trained_in_current_epoch=skipped,
                num_update_steps_per_epoch=num_update_steps_per_epoch,
                **others,
            )
        if training.epoch_over:
            own = loaders.capture_loader_generators([loader])
            kept.update(epoch=epoch + 1, begun_at=self.state.global_step, own=own)
        self._keep()

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _RESUMED:
            super()._load_rng_state(checkpoint)
        elif (checkpointer := self.checkpointer) is not None:
            checkpointer.restore_rng()

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **options)
        training, control = self._now, self.control
        training.epoch_over |= (
            self.accelerator.gradient_state.end_of_dataloader
            or self.state.global_step - training.kept["begun_at"] >= training.updates_per_epoch
            or control.should_epoch_stop
        )
        # the epoch's last step is kept once the epoch is over: its log and evaluation are still to
        # come
        if not (training.epoch_over or control.should_training_stop):
            self._keep()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Make the last step durable before `load_best_model_at_end` changes the weights. If that
        fails, the error is raised once Trainer is done."""
        self._take_up_sums()
        self._load_rng_state(_RESUMED if self._now.at is not None else None)
        self._note()
        try:
            if (checkpointer := self.checkpointer) is not None:
                checkpointer.close()
        finally:
            start_time -= self._now.seconds_before
            output = super()._finalize_training(trial, num_train_samples, start_time)
        return output

    # --- state beside model and optimizer ------------------------------------------------------

    @property
    def _now(self) -> _Training:
        if self._keepstep is None:
            raise UsageError("a Trainer with keepstep trains by train()")
        return self._keepstep

    def _keep(self) -> None:
        checkpointer, step = self.checkpointer, self.state.global_step
        if checkpointer is not None:
            if checkpointer.should_save(step):
                self._note()
                if self._now.watch is not None:
                    self._now.watch.step()
            checkpointer.save(step)

    def _note(self) -> None:
        """Write Trainer's current state into `kept`. Nothing here waits for a GPU."""
        training, state = self._now, self.state
        self._note_log()
        training.record_framework_state(
            state={name: getattr(state, name) for name in _PROGRESS},
            callbacks=[
                [_name(callback), callback.state()] for callback in self._stateful_callbacks()
            ],
            stopped=state.max_steps if self.control.should_training_stop else 0,
            loss=self._tr_loss,
            total_loss=self._total_loss_scalar,
            logged_at=self._globalstep_last_logged,
            began_at=self._initial_global_step,
            flos=self.current_flos,
            evaluated=sorted(training.evaluated.union(getattr(self, "_eval_dataloaders", ()))),
            seconds=training.seconds_before + time.monotonic() - training.started,
        )

    def _note_log(self) -> None:
        """Add the new entries of the log to `kept`, as bytes of a tensor, which a save copies.

        A save would write text as JSON, the whole log at each step. For a long log, that takes
        longer than the rest of a save.
        """
        training, entries = self._now, self.state.log_history
        if len(entries) < training.logged:
            training.kept["log"].zero_()
            training.logged = training.logged_bytes = 0
        new = "".join(
            f"{json.dumps(entry, default=_plain)}\n" for entry in entries[training.logged :]
        )
        if new:
            training.kept["log"] = _appended(training.kept["log"], training.logged_bytes, new)
            training.logged, training.logged_bytes = len(entries), training.logged_bytes + len(new)

    def _stateful_callbacks(self) -> list[Any]:
        """The callbacks that have a state. Trainer restores them only on request, and makes new
        objects. Here the same objects stay, with the script's arguments."""
        return [
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        ]

    def _take_up_state(self) -> None:
        training, kept = self._now, self._now.kept
        for name, value in kept["state"].items():
            setattr(self.state, name, value)
        self.state.log_history = _entries(kept["log"])
        training.logged = len(self.state.log_history)
        training.logged_bytes = int(kept["log"].count_nonzero())
        left = list(kept["callbacks"])
        for callback in self._stateful_callbacks():
            named = next((entry for entry in left if entry[0] == _name(callback)), None)
            if named is not None:
                left.remove(named)
                for attribute, value in named[1].get("attributes", {}).items():
                    setattr(callback, attribute, value)
        self.current_flos = kept["flos"]
        training.evaluated = frozenset(kept["evaluated"])
        training.seconds_before = kept["seconds"]

    def _take_up_sums(self) -> None:
        """Restore the sums that Trainer resets in each `train()`, once it has reset them."""
        training, kept = self._now, self._now.kept
        if training.at is not None and not training.taken_up:
            self._tr_loss += kept["loss"]
            self._total_loss_scalar = kept["total_loss"]
            self._globalstep_last_logged = kept["logged_at"]
            self._initial_global_step = kept["began_at"]
        training.taken_up = True


def _torchs(loader: Any) -> Any:
    """The torch loader inside a loader of accelerate."""
    return getattr(loader, "base_dataloader", loader)


def _appended(log: torch.Tensor, size_bytes: int, text: str) -> torch.Tensor:
    """Append `text` to `log`, whose first `size_bytes` are lines of ASCII text, followed by
    zeros."""
    end = size_bytes + len(text)
    if end > log.numel():
        # a tensor of another shape costs a new layout, so there is room for many lines
        log = torch.cat(
            (log[:size_bytes], log.new_zeros(extras_codec.capacity_for(end) - size_bytes))
        )
    log[size_bytes:end] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return log


def _entries(log: torch.Tensor) -> list[Any]:
    """The entries that were given to `_appended`, one per line."""
    return [json.loads(line) for line in log.numpy().tobytes().rstrip(b"\0").splitlines()]


def _name(value: Any) -> str:
    """The name of a callback's or a trainer's class. An attached trainer has that of its own."""
    return type(value).__name__


def _arguments(trainer: Any) -> dict[str, Any]:
    """The arguments on which what is trained depends, and the size of the data."""
    args, rows = trainer.args, trainer.train_dataset
    found = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(args)
        if not field.name.startswith(_FREE)
    }
    names = {name: str(found[name]) for name in ("lr_scheduler_type", "optim") if name in found}
    sizes = {"world_size": args.world_size, "rows": len(rows) if hasattr(rows, "__len__") else None}
    return found | names | sizes


def _plain(value: Any) -> Any:
    """A number of numpy or torch in the log, as a plain value."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    return item() if item is not None else str(value)


def _refuse(trainer: Any) -> None:
    """Raise UsageError for what was never tested, or cannot be followed."""
    kind: Any = type(trainer)
    beneath: Any = super(KeepstepTrainerMixin, trainer)
    for name, own in {
        "_inner_training_loop": kind._inner_training_loop,
        "_run_epoch": beneath._run_epoch.__func__,
    }.items():
        if own is not getattr(Trainer, name):
            raise UsageError(
                f"{kind.__name__} has a {name} of its own, which keepstep cannot follow"
            )
    for package, names in OWN.items():
        kinds = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == package]
        own = {f"{kind.__module__}:{kind.__name__}": names.get(kind.__name__, ()) for kind in kinds}
        if own:
            version = importlib.metadata.version(package)
            require_framework_hooks(package, version, hooks=own)
    if trainer.is_fsdp_enabled:
        refuse_sharded_quantized(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise UsageError("keepstep keeps FSDP2, not FSDP1: set fsdp_version: 2")
    config, rows = trainer.accelerator.dataloader_config, trainer.train_dataset
    dispatches = config.dispatch_batches and not config.split_batches
    if dispatches and trainer.args.world_size > 1 and not isinstance(rows, IterableDataset):
        raise UsageError(
            "with dispatch_batches on several ranks accelerate leaves out too little of an epoch"
            " that is gone on with: leave it out of accelerator_config"
        )
    if trainer.args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=True: Trainer then begins the training again with half the batch"
            " size when memory is short, which keepstep cannot follow. Find the size once, then set"
            " per_device_train_batch_size and auto_find_batch_size=False"
        )
