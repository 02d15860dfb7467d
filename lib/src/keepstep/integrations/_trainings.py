"""Which training the steps of a run are of. A run keeps one training.

A framework that is asked to train what is trained already does nothing, without an error. So a
step of another training must never be restored: neither that of an earlier training of this
process (folds of a cross-validation, SFT and then DPO), nor that of another kind of training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from keepstep.errors import MismatchError, UsageError, few

log = logging.getLogger("keepstep")

_BEGUN: dict[str, str] = {}
"""By the socket of a run: the training that this process has begun there."""

_SHOWN = 8
_MIB = 1 << 20


def check_first(socket_path: str, training: str) -> None:
    """Raise UsageError if this process has begun a training in this run before."""
    if before := _BEGUN.get(socket_path):
        again = "again" if before == training else f"and not only {before}"
        raise UsageError(
            f"a run keeps one training, and this process would train {training} {again} in the same"
            " run: it would go on from the other's last step. Give each training of a process a run"
            ' of its own by run= and dir= (as in run="dpo", dir="ckpt"; docs/frameworks.md,'
            " Several trainings in one process), or begin this one in a process and a run of its"
            " own (keepstep run --run NAME)"
        )


def begin(socket_path: str, training: str) -> None:
    """From now on this process trains in this run."""
    if socket_path:
        _BEGUN[socket_path] = training


def interrupted(socket_path: str) -> None:
    """The user has interrupted the training (Ctrl-C in a notebook), and may begin it again here."""
    _BEGUN.pop(socket_path, None)


def check_same(found: tuple[int, Mapping[str, Any]] | None, training: str) -> None:
    """Raise MismatchError if the step is of another kind of training. `found`: what
    `Checkpointer.preview` gave.
    """
    if found is None:
        return
    step, kept = found
    before = kept.get("training")
    if before == training:
        return
    kept_by = f"is of {before}" if before else "was kept by a script's own Checkpointer"
    raise MismatchError(
        f"step {step} of this run {kept_by}, and this is {training}; nothing was changed. Train"
        " with the code that saved it, or start a new run (keepstep run --run NAME; with dir=:"
        " run=NAME)"
    )


def noted(arguments: Mapping[str, Any]) -> str:
    """The arguments of a training, as a step keeps them: those that JSON can hold."""
    plain = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, bool | int | float | str | None)
    }
    return json.dumps(plain, sort_keys=True)


def say_changed(before: str, now: str, *, step: int) -> None:
    """Log which arguments are others than at the restored step."""
    old, new = json.loads(before), json.loads(now)
    changed = [
        f"{name} {_shown(old, name)} -> {_shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if _shown(old, name) != _shown(new, name)
    ]
    if changed:
        log.warning(
            "keepstep: not as when step %d was kept: %s. What the step holds counts (learning"
            " rates, schedules, random states); for a new training: keepstep run --run NAME",
            *(step, few(changed, _SHOWN)),
        )


def say_complete(step: int, last: int | None = None) -> None:
    """Log that nothing is left to train."""
    log.warning(
        "keepstep: this run is complete (step %d%s): nothing is trained; for a new training:"
        " keepstep run --run NAME (with dir=: run=NAME)",
        *(step, "" if last is None else f" of {last}"),
    )


def say_frozen(model: nn.Module) -> None:
    """Log that most of each step does not train."""
    sizes = [(one.numel() * one.element_size(), one.requires_grad) for one in model.parameters()]
    frozen = sum(size for size, trains in sizes if not trains)
    # an optimizer has two tensors for each parameter that trains
    trained = 3 * sum(size for size, trains in sizes if trains)
    if frozen > trained:
        log.warning(
            "keepstep: %.3g of about %.3g MiB of each step do not train: they are copied and"
            " written with every step all the same; see docs/frameworks.md#lora-and-frozen-models",
            *(frozen / _MIB, (frozen + trained) / _MIB),
        )


def _shown(arguments: Mapping[str, Any], name: str) -> str:
    return json.dumps(arguments[name]) if name in arguments else "(none)"
