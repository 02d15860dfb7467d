"""Decides which errors are the script's own failures, and reports those that end the process.

Failures from outside count against no step: a signal or an OOM kill raises nothing, and an error
about a lost peer, the network or keepstep itself is not the script's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from keepstep.errors import KeepstepError

_NOT_OWN: tuple[type[BaseException], ...] = (
    KeepstepError,
    ConnectionError,
    TimeoutError,
    getattr(torch.distributed, "DistError", KeepstepError),
)
_OF_PEERS = ("gloo", "NCCL", "ProcessGroup", "closed by peer", "reset by peer")
"""Marks in the bare RuntimeError that a collective raises when another rank is gone."""


def is_own(error: BaseException | None) -> bool:
    """Whether the script itself failed.

    True for an `Exception` if neither it nor any error in its chain (its causes, or errors that
    were being handled) points to peers, the network or keepstep.
    """
    return isinstance(error, Exception) and not any(map(_tells_of_others, _chain(error)))


def _tells_of_others(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OF_PEERS):
        return True
    return isinstance(error, _NOT_OWN)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def on_uncaught(tell: Callable[[BaseException], None]) -> None:
    """Call `tell` with an uncaught error of the script that ends this process.

    The previous excepthook still runs, and runs first. Errors that `tell` raises are ignored.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        try:
            before(kind, error, at)
        finally:
            with contextlib.suppress(Exception):
                if is_own(error):
                    tell(error)

    sys.excepthook = hook
