"""Lightning's Trainer: every step is kept, and a killed `fit` goes on.

    Trainer(callbacks=[KeepstepCallback()])

It works with `lightning` and with `pytorch_lightning`. Callback hooks are not enough. What must be
restored exists only between the last hook before training and the first hook in it. A resumed epoch
has no hook at its beginning. A step is validated and logged after the last hook of its batch. So
the callback wraps methods of the trainer's loops for the time of one `fit`.

These rules must hold:

- A step is kept once Lightning is done with it, including log and validation. The last step of an
  epoch is kept once the epoch is over.
- Callbacks get their states where Lightning gives them, before `on_fit_start`: some of them build
  parameter groups there. At that point the optimizers do not exist yet, so the states are read
  ahead of the restore (`Checkpointer.preview`).
- The loops are told that they resume only while they get ready. Lightning's own checkpoints may be
  of any moment, so its loops then leave some things out; this module does these things.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from keepstep.checkpointer import Checkpointer
from keepstep.errors import RestoreError, UsageError
from keepstep.integrations import (
    loaders,
    require_framework_hooks,
    require_torch_optimizer,
)
from keepstep.integrations._training_identity import (
    NOTHING_YET,
    FrameworkTraining,
    refuse_sharded_quantized,
    select_saved_module,
)
from keepstep.state import rng

log = logging.getLogger("keepstep")


def _package() -> Any:
    """`lightning.pytorch` or `pytorch_lightning`, whichever is installed. A callback of one package
    works in a trainer of the other; the trainer's own modules show which package it is from."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise UsageError("there is no Lightning here: pip install lightning")


def _package_of(trainer: Any) -> str:
    return str(type(trainer.fit_loop).__module__.rpartition(".loops.")[0])


_CONNECTORS = "trainer.connectors"
_HOOKS = {
    "loops.fit_loop:_FitLoop": (
        *("on_advance_start", "on_advance_end", "epoch_loop", "_combined_loader"),
        *("_load_combined_loader_states", "_combined_loader_states_to_load"),
        *("_last_train_dl_reload_epoch", "_restarting", "_resuming_from_checkpoint"),
    ),
    "loops.training_epoch_loop:_TrainingEpochLoop": (
        *("reset", "on_run_start(data_fetcher)", "on_advance_end(data_fetcher)", "_results"),
    ),
    "loops.evaluation_loop:_EvaluationLoop": ("setup_data",),
    f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector": (
        *("_restore_modules_and_callbacks", "restore_training_state"),
    ),
    f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector": (
        *("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter"),
    ),
    f"{_CONNECTORS}.logger_connector.result:": (
        *("_Metadata(fx, name, reduce_fx)", "_Sync(_should, fn, rank_zero_only)"),
        "_ResultMetric(metadata, is_tensor)",
    ),
}
"""What the callback calls, replaces or reads, by owner within the package."""


def _require(package: str) -> None:
    version = importlib.import_module(package).__version__
    hooks = {f"{package}.{owner}": names for owner, names in _HOOKS.items()}
    require_framework_hooks(package.partition(".")[0], version, hooks=hooks)


_lightning: Any = _package()
_require(_lightning.__name__)

_REFUSED = {
    "FSDPStrategy": "keepstep keeps FSDP2, not FSDP1: use ModelParallelStrategy, and fully_shard in"
    " configure_model()",
    "StochasticWeightAveraging": "StochasticWeightAveraging has weights of its own, which keepstep"
    " cannot follow: use WeightAveraging",
    "ModelPruning": "ModelPruning changes the model while it trains, which keepstep cannot follow:"
    " prune it afterwards",
    "LearningRateFinder": "LearningRateFinder trains within a training, which keepstep cannot"
    " follow: call Tuner(trainer).lr_find() in a process of its own",
    "BatchSizeFinder": "BatchSizeFinder trains within a training, which keepstep cannot follow:"
    " call Tuner(trainer).scale_batch_size() in a process of its own",
}
"""What is refused and why, by the name of a strategy or a callback; for both packages."""

_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
"""The values in the metadata of what was logged; its other fields are functions."""

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch"


class KeepstepCallback(_lightning.Callback):  # type: ignore[misc]  # to a checker without it: Any
    """`Trainer(callbacks=[KeepstepCallback()])`. `options`: the options of `Checkpointer`.

    `checkpointer`: set from the beginning of training on, for `stats`, `wait` and `mutating`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.checkpointer: Checkpointer | None = None
        self._fit: _Fit | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: scripts copy `trainer.callbacks` while they train."""
        return {**vars(self), "checkpointer": None, "_fit": None}

    def keepstep_components(self, trainer: Any) -> dict[str, Any]:
        """The components to keep, by name, once everything is prepared.

        Override it to add anything else that the next step depends on. Raises UsageError for an
        optimizer that is not a torch optimizer, and for what keepstep cannot keep of DeepSpeed.
        """
        components: dict[str, Any] = {}
        if "DeepSpeedStrategy" in _kinds(trainer.strategy):
            from keepstep.integrations import deepspeed

            components = deepspeed.components(trainer.strategy.model)
        else:
            components["model"] = select_saved_module(trainer.strategy.model)
            for at, optimizer in enumerate(trainer.strategy.optimizers):
                require_torch_optimizer(optimizer)
                components[f"optimizer{at or ''}"] = optimizer
        for at, average in enumerate(_averages(trainer)):
            components[f"average{at or ''}"] = average._average_model
        for at, config in enumerate(trainer.lr_scheduler_configs):
            components[f"scheduler{at or ''}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others = {"scaler": scaler, "datamodule": trainer.datamodule}
        return components | {name: other for name, other in others.items() if other is not None}

    # --- Lightning's hooks, in the order in which it calls them ----------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to follow a `fit`. Other stages, and the `fit` of a tuner, are left alone.

        Raises UsageError for features that keepstep cannot follow, and for a second training.
        """
        if stage != "fit" or trainer.fast_dev_run or any(map(_tunes, trainer.callbacks)):
            return
        _require(_package_of(trainer))
        _refuse(trainer)
        self._fit = _Fit(self, trainer, type(pl_module).__name__)
        self._fit.follow()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let another `fit` of this process go on where the user interrupted this one."""
        if self._fit is not None and isinstance(exception, KeyboardInterrupt):
            self._fit.end_without_flushing(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the last step durable while the model is still where it was trained."""
        if self._fit is not None:
            self._fit.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the last step durable if nothing was left to train: Lightning then does not call
        `on_train_end`."""
        if stage == "fit" and self._fit is not None:
            self._fit.end()


class _Fit(FrameworkTraining):
    """One `fit()`. In `kept`: `begun`, how the epoch began, is empty between two epochs;
    `validated`: whether workers of the validation that outlive it were begun, which draws a seed.

    `components`: what is kept; complete once everything is prepared. `previewed`: the step of which
    the callbacks have their states. `before_iterator`: the state of the generators when the
    loaders' iterators were made. `metrics`: the torchmetrics in the module.
    """

    def __init__(self, callback: KeepstepCallback, trainer: Any, name: str) -> None:
        super().__init__(name, callback.options, speaks=trainer.is_global_zero)
        self.callback, self.trainer = callback, trainer
        self.components: dict[str, Any] = {}
        self.previewed: int | None = None
        self.last = 0
        self.before_iterator: dict[str, Any] = {}
        self.metrics: list[tuple[str, Any]] = []
        self.undo: list[tuple[Any, str]] = []
        self._held: dict[str, Any] = {}

    # --- wrapping the trainer's methods --------------------------------------------------------

    def follow(self) -> None:
        loop, epoch = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        connector = self.trainer._checkpoint_connector

        def leave_alone(original: Callable[..., Any], path: Any = None, *args: Any) -> Any:
            original(None if self.skips_framework_load("ckpt_path", path) else path, *args)
            self._load_callbacks()

        def restore(original: Callable[..., Any]) -> Any:
            original()
            self._restore()

        def load_states(original: Callable[..., Any]) -> Any:
            if self._resumes and not self._own_states():
                loop._combined_loader_states_to_load = []
            original()
            self.before_iterator = loaders.capture_generators(self._loaders)

        def begin_epoch(original: Callable[..., Any]) -> Any:
            if self._resumes:
                self._go_on()
            return original()

        def reset(original: Callable[..., Any]) -> Any:
            with warnings.catch_warnings():
                if self._resumes:
                    warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
                return original()

        def begin_batches(original: Callable[..., Any], fetcher: Any) -> Any:
            if self._resumes:
                self._leave_out(fetcher)
                # the loops must not know of a checkpoint from here on: see the module
                _restarting(loop, False)
                original(fetcher)
                self._checkpointer.restore_rng()
            else:
                iterator = fetcher.combined_loader._iterator
                before = loaders.capture_generators(self._loaders)
                original(fetcher)
                if fetcher.combined_loader._iterator is not iterator:
                    self.before_iterator = before
                self.kept["begun"] = {
                    "before": self.before_iterator,
                    "first": rng.capture_all_generators(),
                }
            self.at = None

        def begin_validation(original: Callable[..., Any]) -> Any:
            original()
            if self.kept.get("validated") and not self.trainer.reload_dataloaders_every_n_epochs:
                for loader in self._validation_loaders:
                    loaders.begin_workers(loader)

        def end_step(original: Callable[..., Any], fetcher: Any) -> Any:
            original(fetcher)
            # the epoch's last step is kept once the epoch is over: its log and hooks are still to
            # come
            if not epoch.done:
                self._keep()

        def end_epoch(original: Callable[..., Any]) -> Any:
            original()
            self.kept["begun"] = {}
            self._keep()

        def end_first(original: Callable[..., Any], *args: Any) -> Any:
            self.end()
            original(*args)

        wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
            (connector, "_restore_modules_and_callbacks", leave_alone),
            (connector, "restore_training_state", restore),
            (loop, "_load_combined_loader_states", load_states),
            (loop, "on_advance_start", begin_epoch),
            (epoch, "reset", reset),
            (epoch, "on_run_start", begin_batches),
            (epoch.val_loop, "setup_data", begin_validation),
            (epoch, "on_advance_end", end_step),
            (loop, "on_advance_end", end_epoch),
        ]
        wrapped += [(average, "on_train_end", end_first) for average in _averages(self.trainer)]
        for owner, name, around in wrapped:
            setattr(owner, name, functools.partial(around, getattr(owner, name)))
            self.undo.append((owner, name))

    def end(self) -> None:
        """Make the last step durable, and undo the wrapping of the trainer's methods."""
        if not self.undo:
            return
        self._undo()
        if (checkpointer := self.checkpointer) is not None:
            if self.at is not None:
                self.report_complete(self.at.step)
                checkpointer.restore_rng()
            else:
                self._note()  # with --stage-every, `close` may stage the last step only now
            checkpointer.close()
            if self.at is not None:
                for average in _averages(self.trainer):  # Lightning does not call it
                    average.on_train_end(self.trainer, self.trainer.lightning_module)

    def end_without_flushing(self, error: KeyboardInterrupt) -> None:
        """End without making anything durable."""
        self._undo()
        super().end_without_flushing(error)

    def _undo(self) -> None:
        for owner, name in self.undo:
            delattr(owner, name)
        self.undo = []

    # --- going on ------------------------------------------------------------------------------

    @property
    def _checkpointer(self) -> Checkpointer:
        assert self.checkpointer is not None
        return self.checkpointer

    @property
    def _resumes(self) -> bool:
        """Whether this life resumes and has not reached its first batch."""
        return self.at is not None

    @property
    def _loaders(self) -> list[Any]:
        return _loaders_in(self.trainer.fit_loop)

    @property
    def _validation_loaders(self) -> list[Any]:
        return _loaders_in(self.trainer.fit_loop.epoch_loop.val_loop)

    def _load_callbacks(self) -> None:
        """Give callbacks the states of the step that will be restored."""
        if "ModelParallelStrategy" in _kinds(self.trainer.strategy):
            refuse_sharded_quantized(self.trainer.lightning_module)
        self._nothing_yet()
        self.components["trainer"] = self.kept
        try:
            found = self.create_checkpointer(self.components, self.trainer.lightning_module)
        finally:
            self.callback.checkpointer = self.checkpointer
        if found is None:
            return
        self.previewed, kept = found
        for callback in self.trainer.callbacks:
            if (state := kept["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(state)

    def _restore(self) -> None:
        loop = self.trainer.fit_loop
        # they are in a module's `state_dict` only when asked for
        modules = self.trainer.lightning_module.named_modules()
        self.metrics = [
            (name, module) for name, module in modules if hasattr(module, "metric_state")
        ]
        components = self.callback.keepstep_components(self.trainer)
        self.components.update({**components, "trainer": self.kept})
        self._nothing_yet()
        at = self.restore_newest_step(self.trainer.lightning_module, _arguments(self.trainer))
        if (step := at.step if at is not None else None) != self.previewed:
            raise RestoreError(
                f"callbacks have their states of step {self.previewed}, but step {step} was"
                " restored, as the newer one cannot be read; start this job again"
            )
        if at is None:
            self.last = self.trainer.global_step
            return
        loop.load_state_dict(self.kept["loops"])
        self.last = self.trainer.global_step
        if not self.kept["begun"]:
            # an epoch begins next: it begins like any other, with a new iterator
            _restarting(loop, False)
            loop._resuming_from_checkpoint = False
        loop.epoch_loop.val_loop._restarting = True  # no sanity check
        self.trainer.should_stop = self.kept["should_stop"]

    def _go_on(self) -> None:
        """Runs after Lightning's own work at the start of each `fit`."""
        loop, kept = self.trainer.fit_loop, self.kept
        loop._last_train_dl_reload_epoch = kept["reloaded"]
        self._take_up_log()
        for name, metric in self.metrics:
            state, count = kept["metrics"].get(name, ({}, 0))
            for attribute, value in state.items():
                setattr(metric, attribute, value)
            metric._update_count, metric._computed = count, None
        if not kept["begun"]:
            self.at = None
            self._checkpointer.restore_rng()
            loaders.restore_generator_states(kept["generators"], self._loaders)

    def _leave_out(self, fetcher: Any) -> None:
        """Begin the epoch as it was begun, and leave out the batches that were done."""
        begun, done = self.kept["begun"], self.trainer.fit_loop.epoch_loop.batch_progress
        batches = done.current.ready
        if self._own_states():
            return
        if not all(map(loaders.can_skip_by_index, self._loaders)):
            loaders.apply_generators(begun["before"], self._loaders)
            iter(fetcher)
            rng.apply_generators(begun["first"])
            for _ in range(batches):
                next(fetcher)
        else:
            if any(len(loader) < batches for loader in self._loaders):
                log.warning(
                    "keepstep: a loader that is shorter than the epoch restarted within it: its"
                    " batches until the epoch's end are not those of an undisturbed run"
                    " [loader.epoch_wrapped]"
                )
            with loaders.skip_batches_in_iterators(
                self._loaders, batches, begun["before"]
            ) as samplers:
                iter(fetcher)
            rng.apply_generators(begun["first"])
            for sampler in samplers:
                sampler.skip()
        fetcher.fetched = 0  # Lightning adds the batches that were done

    def _own_states(self) -> bool:
        """Whether all loaders keep their own position. A loader of unknown length does not count:
        Lightning fetches a batch ahead from such loaders."""
        return all(
            hasattr(loader, "state_dict")
            and not loaders.can_skip_by_index(loader)
            and _has_length(loader)
            for loader in self._loaders
        )

    # --- state beside model and optimizer ------------------------------------------------------

    def _keep(self) -> None:
        step = self.trainer.global_step
        if self.checkpointer is None or step <= self.last:
            return  # gradients are accumulated
        self.last = step
        if self._checkpointer.should_save(step):
            self._note()
        self._checkpointer.save(step)

    def _nothing_yet(self) -> None:
        """Set `kept` to what it is before the first step."""
        self.kept.update(
            {**NOTHING_YET, "base": self.kept["base"]},
            begun={},
            loops=self.trainer.fit_loop.state_dict(),
            should_stop=False,
            callbacks={},
            generators=[],
            reloaded=0,
            validated=False,
            results={},
            metrics={},
            log={"callback": {}, "logged": {}, "bar": {}},
        )

    def _note(self) -> None:
        """Write Lightning's current state into `kept`. Nothing here waits for a GPU."""
        trainer = self.trainer
        connector = trainer._logger_connector
        states = ((callback.state_key, callback.state_dict()) for callback in trainer.callbacks)
        between, loops = not self.kept["begun"], trainer.fit_loop.state_dict()
        if not self._own_states():
            loops["state_dict"].pop("combined_loader", None)
        tensors = {
            "results": dict(_logged(trainer.fit_loop.epoch_loop._results)),
            "metrics": {
                name: (metric.metric_state, metric._update_count) for name, metric in self.metrics
            },
            "log": {
                "callback": connector._callback_metrics,
                "logged": connector._logged_metrics,
                "bar": connector._progress_bar_metrics,
            },
        }
        with torch.no_grad():
            self._held = _in_place(tensors, self._held)
        self.record_framework_state(
            loops=loops,
            should_stop=trainer.should_stop,
            callbacks={key: state for key, state in states if state},
            generators=loaders.capture_loader_generators(self._loaders) if between else [],
            reloaded=trainer.fit_loop._last_train_dl_reload_epoch,
            validated=self.kept.get("validated", False)
            or not all(map(loaders.is_next_iterator_new, self._validation_loaders)),
            **self._held,
        )

    def _take_up_log(self) -> None:
        connector, kept = self.trainer._logger_connector, self.kept
        connector._callback_metrics = dict(kept["log"]["callback"])
        connector._logged_metrics = dict(kept["log"]["logged"])
        connector._progress_bar_metrics = dict(kept["log"]["bar"])
        results = self.trainer.fit_loop.epoch_loop._results
        for key, result in kept["results"].items():
            results[key] = _made(result, self.trainer)
        if kept["begun"]:
            # the next batch is not the epoch's first: the sums over the epoch must not begin anew
            connector._first_loop_iter = True


def _in_place(tree: Any, held: Any) -> Any:
    """The same tree, of copies: where `held` has a tensor that suits, that one takes the value. A
    save takes a third of the time as long as all tensors stay the same."""
    if type(tree) is torch.Tensor:
        if isinstance(held, torch.Tensor) and _form(held) == _form(tree):
            return held.copy_(tree)
        return tree.detach().clone()
    if type(tree) is dict:
        held = held if isinstance(held, dict) else {}
        return {key: _in_place(value, held.get(key)) for key, value in tree.items()}
    if type(tree) is tuple:
        held = held if isinstance(held, tuple) and len(held) == len(tree) else [None] * len(tree)
        return tuple(map(_in_place, tree, held))
    return tree  # a list of a metric's grows: it stays as it is


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _logged(results: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `self.log` accumulates over an epoch. The metrics of torchmetrics keep this
    themselves."""
    for key, result in results.items():
        if result.is_tensor and result.meta.on_epoch:
            yield (
                key,
                {
                    "meta": {name: getattr(result.meta, name) for name in _META},
                    "reduce": result.meta.reduce_fx.__name__,
                    "sync": result.meta.sync.should,
                    "rank_zero_only": result.meta.sync.rank_zero_only,
                    "value": result.value,
                    "size": getattr(result, "cumulated_batch_size", 0),
                    "last": result._forward_cache,
                    "has_reset": result.has_reset,
                },
            )


def _made(progress: dict[str, Any], trainer: Any) -> Any:
    """A new object from what `_logged` returned for it."""
    kinds = sys.modules[f"{_package_of(trainer)}.trainer.connectors.logger_connector.result"]
    meta = kinds._Metadata(**progress["meta"], reduce_fx=progress["reduce"])
    meta.sync = kinds._Sync(
        _should=progress["sync"],
        fn=trainer.strategy.reduce,
        rank_zero_only=progress["rank_zero_only"],
    )
    metric = kinds._ResultMetric(meta, is_tensor=True)
    metric.value, metric._forward_cache = progress["value"], progress["last"]
    if meta.is_mean_reduction:
        metric.cumulated_batch_size = progress["size"]
    metric.has_reset, metric._update_count = progress["has_reset"], 1
    return metric


def _arguments(trainer: Any) -> dict[str, Any]:
    """The arguments on which what is trained depends, and the sizes of the data."""
    found = {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
    }
    for at, optimizer in enumerate(trainer.strategy.optimizers):
        found[f"optimizer{at or ''}"] = type(optimizer).__name__
        defaults = getattr(optimizer, "defaults", {})  # DeepSpeed's have none
        found |= {f"optimizer{at or ''}.{key}": default for key, default in defaults.items()}
    given = dict(getattr(trainer.lightning_module, "hparams", {}))
    return found | {f"hparams.{key}": value for key, value in given.items()}


def _restarting(loop: Any, value: bool) -> None:
    """Set `_restarting` on a loop and all loops in it. The public setter would do more than
    that."""
    loop._restarting = value
    for name, var in vars(loop).items():
        if name != "trainer" and hasattr(var, "_restarting"):
            _restarting(var, value)


def _loaders_in(loop: Any) -> list[Any]:
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def _averages(trainer: Any) -> list[Any]:
    """The callbacks that average the weights. At the end they write the average into the model."""
    return [callback for callback in trainer.callbacks if "WeightAveraging" in _kinds(callback)]


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def _kinds(value: Any) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}


def _tunes(callback: Any) -> bool:
    """Whether `Tuner` added this callback: it trains for a while, and then resets everything."""
    finders = {"LearningRateFinder", "BatchSizeFinder"}
    return bool(finders & _kinds(callback)) and bool(getattr(callback, "_early_exit", False))


def _refuse(trainer: Any) -> None:
    """Raise UsageError for what was never tested, or cannot be followed."""
    for hooked in (trainer.strategy, *trainer.callbacks):
        for name in _kinds(hooked) & _REFUSED.keys():
            raise UsageError(_REFUSED[name])
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            "training_step(dataloader_iter) fetches as it likes, which keepstep cannot follow: take"
            " a batch"
        )
    for hooked in (module, trainer.datamodule, *trainer.callbacks):
        hook = getattr(type(hooked), "on_save_checkpoint", None)
        if hook is not None and not hook.__module__.startswith(_package_of(trainer)):
            log.warning(
                "keepstep: %s.on_save_checkpoint is not called, and what it adds is not kept: name"
                " it in keepstep_components(), or give it a state_dict"
                " [integration.hook_not_called]",
                type(hooked).__name__,
            )
