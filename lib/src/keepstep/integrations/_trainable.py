"""Which parameters of a model train, where that changes on the way (gradual unfreezing).

No state dict holds it: a script that unfreezes in the epoch in which it is to happen does not do
so in a life that begins later.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Trainable:
    """The flags of a model beside those that it had at the beginning of this life."""

    def __init__(self, model: nn.Module) -> None:
        places: list[tuple[str, Any, str]] = [
            (name, one, "requires_grad") for name, one in model.named_parameters()
        ]
        places += [
            (name, one, "track_running_stats")
            for name, one in model.named_modules()
            if isinstance(one, _BatchNorm)
        ]
        self._places = places
        self._first = self._now()

    def _now(self) -> list[bool]:
        return [getattr(one, flag) for _, one, flag in self._places]

    def changed(self) -> dict[str, bool]:
        """The flags that are others than at the beginning, by name."""
        now = self._now()
        if now == self._first:
            return {}
        pairs = zip(self._places, now, self._first, strict=True)
        return {f"{name}:{flag}": new for (name, _, flag), new, old in pairs if new != old}

    def take_up(self, changed: dict[str, bool]) -> None:
        """Set what `changed` gave in an earlier life."""
        for name, one, flag in self._places:
            if (value := changed.get(f"{name}:{flag}")) is not None:
                setattr(one, flag, value)
