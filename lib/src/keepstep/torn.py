"""Live tensors that an attempt to restore has begun to fill.

An attempt can fail half-way, on this rank or on another: a chunk that is damaged everywhere, a
sidecar that is gone. Then some tensors hold a mixture of what was there before and of a step that
is not used. The next attempt, at another step, must fill every one of them; and when there is no
next one, they are made useless, so that nobody trains on such a mixture, not even a script that
goes on after the error: every floating point number in them becomes NaN.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from keepstep.errors import RestoreError
from keepstep.steps import StepId

log = logging.getLogger("keepstep")

_Place = tuple[torch.device, int, int]


class Torn:
    """Of one rank, for the time of one `restore()`: whoever leaves it with an error leaves nothing
    in the tensors to train on."""

    def __init__(self) -> None:
        self._begun: dict[_Place, Tensor] = {}

    def __enter__(self) -> Torn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is not None and self._begun:
            self._spoil()

    def begin(self, targets: Iterable[Tensor]) -> None:
        """These are being filled from now on."""
        self._begun.update({_place(one): one for one in targets if one.numel()})

    def check(self, id: StepId, live: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
        """Raises RestoreError when step `id` would leave a live tensor as an earlier attempt at
        another step has left it. `targets`: what it fills."""
        stale = self._begun.keys() - {_place(one) for one in targets}
        left = [one for one in live if _place(one) in stale]
        if left:
            shapes = ", ".join(str(list(one.shape)) for one in left[:4])
            raise RestoreError(
                f"step {id} does not hold {len(left)} tensors (of shapes {shapes}) that a newer"
                " step, which failed while it was restored, has changed already; restart this job,"
                " so that the model is built anew"
            )

    def _spoil(self) -> None:
        with torch.no_grad():
            for one in self._begun.values():
                if one.is_floating_point() or one.is_complex():
                    with contextlib.suppress(RuntimeError):  # a dtype that cannot be filled
                        one.fill_(float("nan"))
        log.error(
            "keepstep: the restore failed while tensors were being filled; %d of them hold NaN now."
            " Do not train on: restart this job, so that the model is built anew",
            len(self._begun),
        )


def _place(tensor: Tensor) -> _Place:
    return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()
