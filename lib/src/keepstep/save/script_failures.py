"""Decides which errors are the script's own failures, and reports those that end the process.

A failure counts against the step from which a life began, because the state of that step may have
caused it. What comes from outside counts against no step: a signal or an OOM kill raises nothing,
and an error about a lost peer, the network, storage, memory, a lost device or keepstep itself is
not the script's. Neither is anything that is raised once the process was asked to end. A process
that lost a peer must end, though, so that its next life can begin.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import os
import re
import signal
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from keepstep.client.uncaught import iter_error_chain, watch_uncaught_errors
from keepstep.errors import KeepstepError

_DIST_ERRORS: tuple[type[BaseException], ...] = (
    (torch.distributed.DistError,) if hasattr(torch.distributed, "DistError") else ()
)
_NOT_OWN: tuple[type[BaseException], ...] = (
    KeepstepError,
    ConnectionError,
    TimeoutError,
    EOFError,
    MemoryError,
    torch.OutOfMemoryError,
    *_DIST_ERRORS,
)
_OF_PEERS = ("gloo", "NCCL", "ProcessGroup", "closed by peer", "reset by peer")
"""Marks in the bare RuntimeError that a collective raises when another rank is gone."""

_OF_DEVICES = ("CUDA error", "CUDA driver error", "HIP error", "XPU error", "device lost")
_OF_KERNELS = ("device-side assert", "illegal memory access", "misaligned", "invalid ")
"""What code and values may cause on a device that is whole."""

_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_OF_WORKERS = ("DataLoader worker (pid",)
"""Marks of a loader's worker that ended, and not of an error inside one."""

_ERRNO_NAMES = (
    # storage
    *("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "ENODEV", "ENXIO", "EREMOTEIO", "EUCLEAN"),
    *("EFBIG", "ENOMEDIUM", "ENOLCK", "EBUSY", "ETXTBSY"),
    # network
    *("EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH", "ENETDOWN", "ENETRESET", "ENOTCONN"),
    *("EADDRINUSE", "EADDRNOTAVAIL", "EPROTO", "ENONET", "ENOLINK", "ECOMM", "ENOTUNIQ"),
    # memory, descriptors, processes
    *("ENOMEM", "ENOBUFS", "EMFILE", "ENFILE", "EAGAIN", "EINTR"),
)
_ERRNOS = frozenset(getattr(errno, name) for name in _ERRNO_NAMES if hasattr(errno, name))

_CLIENTS = frozenset(
    (
        *("socket", "ssl", "_ssl", "urllib", "http", "urllib3", "requests", "aiohttp", "httpx"),
        *("httpcore", "websockets", "grpc", "botocore", "boto3", "s3transfer", "aiobotocore"),
        *("s3fs", "gcsfs", "adlfs", "fsspec", "obstore", "google", "azure", "huggingface_hub"),
        *("wandb", "mlflow", "comet_ml", "neptune", "clearml", "redis", "pymongo", "psycopg2"),
    )
)
"""Packages that reach over the network. They are not imported here."""

_OF_THE_REQUEST = frozenset({400, 404, 405, 406, 410, 411, 413, 414, 415, 416, 422})


_ENDS_WITHIN_S = 30.0
"""The longest time from an uncaught error about a lost peer to the end of the process."""


def is_script_failure(error: BaseException | None) -> bool:
    """Whether the script itself failed.

    True for an `Exception` if neither it nor any error in its chain (its causes, or errors that
    were being handled) comes from outside, and the process was not asked to end before.
    """
    if not isinstance(error, Exception) or _ENDING.was_asked():
        return False
    return not any(map(_comes_from_outside, iter_error_chain(error, contexts=True)))


def _comes_from_outside(error: BaseException) -> bool:
    return (
        _names_a_peer(error)
        or isinstance(error, _NOT_OWN)
        or is_raised_by_signal_handler(error)
        or (isinstance(error, OSError) and _errno_of(error) in _ERRNOS)
        or (isinstance(error, RuntimeError) and _names_a_device(str(error)))
        or _is_of_a_client(error)
    )


def _errno_of(error: OSError) -> int | None:
    """The number of the error; of one that a loader's worker raised, only the text is left."""
    if error.errno is not None or not (found := re.findall(r"\[Errno (\d+)\]", str(error))):
        return error.errno
    return int(found[-1])


def _names_a_device(text: str) -> bool:
    if any(mark in text for mark in _OF_MEMORY + _OF_WORKERS):
        return True
    of_a_device = any(mark in text for mark in _OF_DEVICES)
    return of_a_device and not any(mark in text for mark in _OF_KERNELS)


def _is_of_a_client(error: BaseException) -> bool:
    """Whether a network client raised it, and not because of what the script asked for."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(error).__mro__)
    if not any(kind in _CLIENTS for kind in kinds):
        return False
    if (status := _http_status(error)) is not None:
        return status not in _OF_THE_REQUEST
    return isinstance(error, OSError) or not isinstance(error, (ValueError, TypeError, LookupError))


def _http_status(error: Any) -> int | None:
    """The status of the answer, as the common clients name it."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        about = answer.get("ResponseMetadata")
        found = about.get("HTTPStatusCode") if isinstance(about, dict) else None
    else:
        found = getattr(answer, "status_code", None)
        for name in ("status", "code"):
            found = getattr(error, name, None) if found is None else found
    return found if isinstance(found, int) else None


def is_raised_by_signal_handler(error: BaseException) -> bool:
    """Whether the handler of a signal raised it, in the middle of whatever was running."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, handler.__call__) if callable(handler) else ():
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


class _Ending:
    """Whether the process was asked to end by a signal for which the script has a handler.

    The interpreter writes the number of each such signal to a descriptor, unless a library (an
    event loop) has its own descriptor there. Then only the errors that a handler raises are known.
    """

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._asked = False

    def watch(self) -> None:
        """Begin; once per process, in its main thread (elsewhere it does nothing)."""
        with contextlib.suppress(ValueError, OSError):
            if (theirs := signal.set_wakeup_fd(-1)) != -1:
                signal.set_wakeup_fd(theirs)
                return
            self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def was_asked(self) -> bool:
        with contextlib.suppress(OSError):
            while self._reader >= 0 and (numbers := os.read(self._reader, 512)):
                self._asked = self._asked or bool({*numbers} & {signal.SIGTERM, signal.SIGINT})
        return self._asked

    def forget(self) -> None:
        """In a forked child: the descriptor is the parent's."""
        if self._writer >= 0:
            self._reader = self._writer = -1
            with contextlib.suppress(ValueError, OSError):
                signal.set_wakeup_fd(-1)


_ENDING = _Ending()
os.register_at_fork(after_in_child=_ENDING.forget)


def _names_a_peer(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OF_PEERS):
        return True
    return isinstance(error, _DIST_ERRORS)


def watch_uncaught(report: Callable[[BaseException], None]) -> None:
    """Call `report` with an uncaught error of the script that ends this process.

    The previous excepthook still runs, and runs first. Errors that `report` raises are ignored.
    After an error about a lost peer, the process ends in time, with status 1 and all stacks
    printed, even if Python's own end hangs.
    """
    _ENDING.watch()

    def note(error: BaseException) -> None:
        with contextlib.suppress(Exception):
            if is_script_failure(error):
                report(error)
            elif any(map(_names_a_peer, iter_error_chain(error, contexts=True))):
                # Python's end joins gloo's thread, and that thread may still wait for the lost
                # peer, by default for half an hour. This timer is a thread of C, so it also runs
                # while the interpreter ends.
                faulthandler.dump_traceback_later(_ENDS_WITHIN_S, exit=True, file=2)

    watch_uncaught_errors(note)
