"""What the adapters share: one training of a framework, and the steps of a run that are of it.

A run keeps one training. A framework that is asked to train what is trained already does nothing,
without an error. So a step of another training must never be restored: neither that of an earlier
training of this process (folds of a cross-validation, SFT and then DPO), nor that of another kind
of training.

bitsandbytes quantises the frozen part of a model (QLoRA) into layers that give a state dict that
they do not take back. But they do not train: a step needs the rest only, if the next life has the
same frozen part. So a step holds a digest of it, which is compared before anything is restored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from keepstep.checkpointer import Checkpointer, Restored
from keepstep.client import embedded
from keepstep.client.session import fetch_complete_step_numbers
from keepstep.errors import MismatchError, RestoreError, UsageError, few
from keepstep.integrations import is_true_on_any_rank
from keepstep.state.wrappers import Replicated, replication_of, unwrap_module

log = logging.getLogger("keepstep")

_BEGUN: dict[str, str] = {}
"""By the socket of a run: the training that this process has begun there."""

_SCAN_S = 30.0
_SHOWN = 8
_MIB = 1 << 20


class FrameworkTraining:
    """One training of a framework, as its adapter goes through it: `skips_framework_load`,
    `create_checkpointer`, `restore`, and `report_complete` if nothing is left.

    `kept`: what goes into each step beside the framework's objects, refilled in place by a restore.
    `at`: the restored step. `speaks`: whether this rank logs what all ranks know.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, speaks: bool) -> None:
        """`options`: of `Checkpointer`. Raises UsageError if this process has begun a training in
        this run before."""
        self.name, self.speaks, self._options = name, speaks, options
        self.kept: dict[str, Any] = {"training": name, **NOTHING_YET}
        self.checkpointer: Checkpointer | None = None
        self.trainable: TrainableFlags | None = None
        self.at: Restored | None = None
        self._left_alone = ""
        self._components: Mapping[str, Any] = {}
        self._socket_path = embedded.ensure_sidecar(options.get("dir"), options.get("run"))
        if before := _BEGUN.get(self._socket_path):
            again = "again" if before == name else f"and not only {before}"
            raise UsageError(
                f"a run keeps one training, and this process would train {name} {again} in the same"
                " run: it would go on from the other's last step. Give each training of a process a"
                ' run of its own by run= and dir= (as in run="dpo", dir="ckpt"; docs/frameworks.md,'
                " Several trainings in one process), or begin this one in a process and a run of"
                " its own (keepstep run --run NAME)"
            )

    def has_step_on_any_rank(self) -> bool:
        """Whether any rank finds a step of the run. A collective."""
        where = self._socket_path
        return is_true_on_any_rank(
            bool(where and fetch_complete_step_numbers(where, timeout_s=_SCAN_S))
        )

    def skips_framework_load(self, argument: str, path: Any) -> bool:
        """Whether the run holds a step, so that the framework must not load its own checkpoint
        `path`. A collective if there is a path."""
        if not path:
            return False
        if not self.has_step_on_any_rank():
            return False
        log.warning(
            "keepstep: %s=%r is ignored, as this run holds a step [integration.argument_ignored]",
            *(argument, path),
        )
        self._left_alone = f"{argument}={path!r}"
        return True

    def create_checkpointer(
        self, components: Mapping[str, Any], model: nn.Module
    ) -> tuple[int, dict[str, Any]] | None:
        """Make the Checkpointer; returns the step that `restore` will bring back, and what it will
        hold of `kept`.

        Raises MismatchError if it is of another training, or of another frozen base; then nothing
        was changed.
        """
        self.kept["base"] = base = frozen_digest(model)
        self._components = components
        # who trains an adapter of PEFT's leaves what is below it alone
        has_adapter = any(hasattr(module, "peft_config") for module in model.modules())
        self._options = {"frozen_once": has_adapter, **self._options}
        self.checkpointer = Checkpointer(components, **self._options)
        found = self.checkpointer.preview("trainer")
        if found is not None:
            self._check_same(*found)
            check_base(*found, base)
        return found

    def _check_same(self, step: int, kept: Mapping[str, Any]) -> None:
        before = kept.get("training")
        if before == self.name:
            return
        kept_by = f"is of {before}" if before else "was kept by a script's own Checkpointer"
        raise MismatchError(
            f"step {step} of this run {kept_by}, and this is {self.name}; nothing was changed."
            " Train with the code that saved it, or start a new run (keepstep run --run NAME; with"
            " dir=: run=NAME)"
        )

    def restore_newest_step(
        self, model: nn.Module, arguments: Mapping[str, Any]
    ) -> Restored | None:
        """Bring back the run's newest step, but for the random states; None if there is none.

        `arguments`: those on which what is trained depends. Raises as `Checkpointer.restore` does.
        """
        assert self.checkpointer is not None, "look_ahead comes first"
        self.trainable = TrainableFlags(model)
        self.kept["arguments"] = now = _noted(arguments)
        self.at = self.checkpointer.restore(rng="later")
        self.mark_started()
        if self.at is None:
            if self._left_alone:
                raise RestoreError(
                    f"{self._left_alone} was left alone for a step of this run that not all ranks"
                    " hold; start this job again, or a new run"
                )
            if self.speaks and not self._options["frozen_once"]:
                _warn_frozen(self._components.get("model"))
            return None
        if self.speaks:
            _warn_changed(self.kept["arguments"], now, step=self.at.step)
        self.kept["arguments"] = now
        self.trainable.set_flags(self.kept["trainable"])
        return self.at

    def mark_started(self) -> None:
        """From now on this process trains in this run."""
        if self._socket_path:
            _BEGUN[self._socket_path] = self.name

    def record_framework_state(self, **now: Any) -> None:
        """Write the framework's current state, and which parameters train, into `kept`."""
        trainable = {} if self.trainable is None else self.trainable.collect_changed_flags()
        self.kept.update(now, trainable=trainable)

    def end_without_flushing(self, error: KeyboardInterrupt) -> None:
        """End without making anything durable: the user has interrupted the training (Ctrl-C in a
        notebook), and may begin it again here."""
        _BEGUN.pop(self._socket_path, None)
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(error), error, None)

    def report_complete(self, step: int, last: int | None = None) -> None:
        """Log that nothing is left to train."""
        if self.speaks:
            log.warning(
                "keepstep: this run is complete (step %d%s): nothing is trained; for a new"
                " training: keepstep run --run NAME (with dir=: run=NAME) [run.already_complete]",
                *(step, "" if last is None else f" of {last}"),
            )


NOTHING_YET: Mapping[str, Any] = {"arguments": "{}", "trainable": {}, "base": ""}
"""What every training's `kept` has beside its name, before the first step."""


class TrainableFlags:
    """The flags of a model beside those that it had at the beginning of this life: which parameters
    train, where that changes on the way (gradual unfreezing).

    No state dict holds it: a script that unfreezes in the epoch in which it is to happen does not
    do so in a life that begins later.
    """

    def __init__(self, model: nn.Module) -> None:
        places: list[tuple[str, Any, str]] = [
            (name, parameter, "requires_grad") for name, parameter in model.named_parameters()
        ]
        places += [
            (name, norm, "track_running_stats")
            for name, norm in model.named_modules()
            if isinstance(norm, _BatchNorm)
        ]
        self._places = {f"{name}:{flag}": (module, flag) for name, module, flag in places}
        self._first = self._now()

    def _now(self) -> dict[str, bool]:
        return {name: getattr(module, flag) for name, (module, flag) in self._places.items()}

    def collect_changed_flags(self) -> dict[str, bool]:
        """The flags that are others than at the beginning, by name."""
        return dict(self._now().items() - self._first.items())

    def set_flags(self, changed: Mapping[str, bool]) -> None:
        """Set what `changed` gave in an earlier life."""
        for name, value in changed.items():
            if name in self._places:
                module, flag = self._places[name]
                setattr(module, flag, value)


def _noted(arguments: Mapping[str, Any]) -> str:
    """The arguments of a training, as a step keeps them: those that JSON can hold."""
    plain = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, bool | int | float | str | None)
    }
    return json.dumps(plain, sort_keys=True)


def _warn_changed(before: str, now: str, *, step: int) -> None:
    """Log which arguments are others than at the restored step."""
    old, new = json.loads(before), json.loads(now)
    changed = [
        f"{name} {_shown(old, name)} -> {_shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if _shown(old, name) != _shown(new, name)
    ]
    if changed:
        log.warning(
            "keepstep: settings differ from step %d: %s. The values of the step are used (learning"
            " rates, schedules, random states); for a new training: keepstep run --run NAME"
            " [integration.settings_overridden]",
            *(step, few(changed, _SHOWN)),
        )


def _shown(arguments: Mapping[str, Any], name: str) -> str:
    return json.dumps(arguments[name]) if name in arguments else "(none)"


def _warn_frozen(model: object) -> None:
    """Log that most of each step does not train. `model`: what is kept of it; a script's own object
    knows best."""
    if not isinstance(model, nn.Module):
        return
    sizes = [
        (parameter.numel() * parameter.element_size(), parameter.requires_grad)
        for parameter in model.parameters()
    ]
    frozen = sum(size for size, trains in sizes if not trains)
    # an optimizer has two tensors for each parameter that trains
    trained = 3 * sum(size for size, trains in sizes if trains)
    if frozen > trained:
        log.warning(
            "keepstep: %.3g of about %.3g MiB of each step do not train, but are copied and written"
            " with it: frozen_once=True keeps them once; see"
            " docs/frameworks.md#lora-and-frozen-models [save.frozen_copied]",
            *(frozen / _MIB, (frozen + trained) / _MIB),
        )


_LAYERS = frozenset({"Linear4bit", "Linear8bitLt"})


class TrainedParameters(nn.Module):
    """The parameters of a model that train, and its buffers, under their names there. The tensors
    are the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        kept = model.state_dict(keep_vars=True)
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._parameters.update(trained)
        buffers = {name: tensor for name, tensor in model.named_buffers() if name in kept}
        self._buffers.update(buffers)


def is_quantized(model: nn.Module) -> bool:
    """Whether a layer of bitsandbytes is in it."""
    return any(_is_layer(module) for module in model.modules())


def _is_layer(module: nn.Module) -> bool:
    return any(
        kind.__name__ in _LAYERS and kind.__module__.partition(".")[0] == "bitsandbytes"
        for kind in type(module).__mro__
    )


def refuse_sharded_quantized(model: nn.Module) -> None:
    """Raise UsageError for a quantised model that FSDP divides."""
    if is_quantized(model):
        raise UsageError("keepstep keeps quantised models without FSDP only: use one rank, or DDP")


def select_saved_module(model: nn.Module) -> nn.Module:
    """What is kept of a model, which may be wrapped by DistributedDataParallel:
    `TrainedParameters` if it is quantised, else the model. Raises UsageError where a quantised
    layer trains itself."""
    inner = unwrap_module(model)
    if not is_quantized(inner):
        return model
    for name, module in inner.named_modules():
        if (
            _is_layer(module)
            and getattr(module, "weight", None) is not None
            and module.weight.requires_grad
        ):
            raise UsageError(
                f"{name} is quantised and trains, which keepstep cannot keep: freeze it, and train"
                " an adapter (LoRA)"
            )
    replication = replication_of(model)
    part = TrainedParameters(inner)
    return part if replication is None else Replicated(part, replication.ranks)


def frozen_digest(model: Any) -> str:
    """Of all that `select_saved_module` leaves out; '' if it leaves out nothing. Reads it all
    once."""
    if not is_quantized(model):
        return ""
    kept = TrainedParameters(model).state_dict().keys()
    hashed = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name in kept:
            continue
        hashed.update(name.encode())
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(plain.numpy().data)
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


def check_base(step: int, kept: Mapping[str, Any], base: str) -> None:
    """Raise MismatchError if the frozen part is another one than when the step was kept."""
    if kept.get("base", "") != base:
        raise MismatchError(
            f"step {step} was trained on another frozen base: it holds only what trains, beside"
            " the quantised weights of bitsandbytes, and those that this script has loaded are not"
            " the same (another model, other quantisation, other frozen layers); nothing was"
            " changed. Load the same base, or start a new run (keepstep run --run NAME)"
        )
