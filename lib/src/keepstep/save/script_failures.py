"""Which errors of a process are its script's own failures, and hearing of those that end it.

What others do to it is held against no step: a signal or an OOM kill raises nothing, and an error
that tells of a lost peer, of the network or of keepstep itself is not the script's.
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
"""In what a collective raises as a bare RuntimeError when another rank is gone."""


def is_own(error: BaseException | None) -> bool:
    """Whether the script failed by itself: an `Exception`, and nothing that it came from or that
    was being handled tells of others."""
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
    """Call `tell` with what ends this process uncaught and is the script's own. Whoever was to hear
    of it still does, first; nothing that `tell` raises changes that."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        try:
            before(kind, error, at)
        finally:
            with contextlib.suppress(Exception):
                if is_own(error):
                    tell(error)

    sys.excepthook = hook
