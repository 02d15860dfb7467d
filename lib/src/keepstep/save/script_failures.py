"""Decides which errors are the script's own failures, and reports those that end the process.

Failures from outside count against no step: a signal or an OOM kill raises nothing, and an error
about a lost peer, the network or keepstep itself is not the script's. A process that lost a peer
must end, though, so that its next life can begin.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from keepstep.errors import KeepstepError

_DIST_ERRORS: tuple[type[BaseException], ...] = (
    (torch.distributed.DistError,) if hasattr(torch.distributed, "DistError") else ()
)
_NOT_OWN: tuple[type[BaseException], ...] = (
    KeepstepError,
    ConnectionError,
    TimeoutError,
    *_DIST_ERRORS,
)
_OF_PEERS = ("gloo", "NCCL", "ProcessGroup", "closed by peer", "reset by peer")
"""Marks in the bare RuntimeError that a collective raises when another rank is gone."""

_ENDS_WITHIN_S = 30.0
"""The longest time from an uncaught error about a lost peer to the end of the process."""


def is_own(error: BaseException | None) -> bool:
    """Whether the script itself failed.

    True for an `Exception` if neither it nor any error in its chain (its causes, or errors that
    were being handled) points to peers, the network or keepstep.
    """
    return isinstance(error, Exception) and not any(map(_tells_of_others, _chain(error)))


def _tells_of_others(error: BaseException) -> bool:
    return _tells_of_a_peer(error) or isinstance(error, _NOT_OWN)


def _tells_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OF_PEERS):
        return True
    return isinstance(error, _DIST_ERRORS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def on_uncaught(tell: Callable[[BaseException], None]) -> None:
    """Call `tell` with an uncaught error of the script that ends this process.

    The previous excepthook still runs, and runs first. Errors that `tell` raises are ignored. After
    an error about a lost peer, the process ends in time even if Python's own end hangs.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        try:
            before(kind, error, at)
        finally:
            with contextlib.suppress(Exception):
                if is_own(error):
                    tell(error)
                elif any(map(_tells_of_a_peer, _chain(error))):
                    _end_in_time()

    sys.excepthook = hook


def _end_in_time() -> None:
    """End the process with status 1 after a while, unless it has ended by then. All stacks are
    printed before.

    Python's end joins gloo's thread, and that thread may still wait for the lost peer, by default
    for half an hour. This timer is a thread of C, so it also runs while the interpreter ends.
    """
    faulthandler.dump_traceback_later(_ENDS_WITHIN_S, exit=True, file=2)
