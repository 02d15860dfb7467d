"""What a subclass of Trainer and its callbacks know beside Trainer's own state.

Trainer has no place for it, so no checkpoint of Trainer's holds it either. For TRL's trainers, a
table names the attributes to keep. For all others, `Watch` compares attributes between steps, so
that what changes and is not kept is named while the first life still trains.
"""

from __future__ import annotations

import dis
import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_callback import ExportableState

from keepstep.errors import few

log = logging.getLogger("keepstep")

_SUMS = ("_metrics", "_total_train_tokens")
_ROLLOUTS = ("_step", "_buffered_inputs", "_metrics", "_current_train_step_time")
_ENTROPY = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")

TRL = {
    "SFTTrainer": _SUMS,
    "DPOTrainer": _SUMS,
    "KTOTrainer": _SUMS,
    "RewardTrainer": _SUMS,
    "GRPOTrainer": (*_ROLLOUTS, *_ENTROPY),
    "RLOOTrainer": _ROLLOUTS,
}
"""The attributes that a step keeps, by class of TRL: sums for the next line of the log, and the
rollouts of the steps to come."""

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
"""Packages into whose objects `Watch` does not look."""

_DEPTH, _ITEMS, _PARAMETERS, _ELEMENTS = 4, 32, 4, 16
_SHOWN = 8


class OwnState:
    """The attributes of one of TRL's trainers that its next step depends on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.names = tuple(name for name in _names_of(type(trainer)) if hasattr(trainer, name))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self._trainer, name, value)


def reference_model(trainer: Any) -> nn.Module | None:
    """The reference model that TRL's `sync_ref_model` trains along; None if it stays as it is."""
    for one in trainer.callback_handler.callbacks:
        if _is_sync(one):
            model: nn.Module | None = one.ref_model
            return model
    return None


def is_trls(trainer: Any) -> bool:
    """Whether it is a trainer of TRL, or derives from one."""
    return any(one.__module__.partition(".")[0] == "trl" for one in type(trainer).__mro__)


def _is_sync(callback: Any) -> bool:
    return any(kind.__name__ == "SyncRefModelCallback" for kind in type(callback).__mro__)


def _names_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == "trl":
            yield from TRL.get(one.__name__, ())


class Watch:
    """Names once what changes between two steps and is in none of them.

    It compares after 1, 2, 4, 8 ... steps of a life, and the state of a model by a few of its
    elements: a step must not become slower by it.
    """

    def __init__(self, trainer: Any, components: Iterable[Any], *, own: bool) -> None:
        """`components`: what is kept. `own`: look at the trainer's attributes, too, and not only at
        those of callbacks."""
        self._trainer, self._own = trainer, own
        self._components = frozenset(id(one) for one in components)
        self._kept = frozenset(_names_of(type(trainer)))
        self._steps, self._next, self._said = 0, 2, False
        self._first: dict[str, Any] = {}

    def step(self) -> None:
        """One more step was kept."""
        self._steps += 1
        if self._steps == 1:
            self._first = self._look()
        elif self._steps == self._next and not self._said:
            self._next *= 2
            self._say()

    def _say(self) -> None:
        now = self._look()
        changed = sorted(name for name, value in now.items() if self._first.get(name) != value)
        if changed:
            self._said = True
            log.warning(
                "keepstep: %s: changes from step to step, and is in no step: after a restart it"
                " begins as in a new training. Name it in keepstep_components() of a class with"
                " KeepstepTrainerMixin; a callback keeps what its state() holds"
                " (transformers.trainer_callback.ExportableState)",
                few(changed, _SHOWN),
            )

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        look = _Look(self._trainer, self._components)
        if self._own:
            names = vars(self._trainer).keys() - _trainers_own() - self._kept - _INCIDENTAL
            prefix = type(self._trainer).__name__
            found = {f"{prefix}.{name}": look.at(vars(self._trainer)[name]) for name in names}
        for one in self._trainer.callback_handler.callbacks:
            if _library(one) == "transformers" or isinstance(one, ExportableState) or _is_sync(one):
                continue
            for name, value in vars(one).items():
                found[f"{type(one).__name__}.{name}"] = look.at(value)
        return found


class _Look:
    """What can be compared of values that may be anything."""

    def __init__(self, trainer: Any, components: frozenset[int]) -> None:
        self._trained = {id(one) for one in trainer.model.parameters()}
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
            others = [one for one in value.parameters() if id(one) not in self._trained]
            return [self._tensor(one) for one in others[:_PARAMETERS]]
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
        return [self.at(one, depth) for one, _ in zip(values, range(_ITEMS), strict=False)]

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) in self._trained:
            return "trained"
        shape = tuple(tensor.shape)
        if tensor.is_meta or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter):
            return shape
        # not its version: `.data` changes without one
        some = tensor.detach().reshape(-1)[:_ELEMENTS]
        return shape, torch.nan_to_num(some.double()).cpu().tolist()


def _library(one: Any) -> str:
    return type(one).__module__.partition(".")[0]


@functools.cache
def _trainers_own() -> frozenset[str]:
    """The attributes that Trainer's own code assigns."""
    functions = [
        one
        for kind in (Trainer, Seq2SeqTrainer)
        for one in vars(kind).values()
        if hasattr(one, "__code__")
    ]
    return frozenset(
        each.argval
        for one in functions
        for each in dis.get_instructions(one)
        if each.opname == "STORE_ATTR"
    ) | {"_keepstep", "keepstep_options", "callback_handler"}
