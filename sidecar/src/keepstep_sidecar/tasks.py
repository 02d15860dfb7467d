"""Background tasks: every one has a name and an owner, and none takes the process down.

A failure is logged and the state it left is seen again by the next event; training goes on. What
watches or works for as long as the process lives begins again: `keep`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from keepstep.errors import KeepstepError
from keepstep_sidecar.journal import warn

_LONGEST_PAUSE_S = 30.0
_log = logging.getLogger("keepstep.sidecar")


class Tasks:
    """Owns the background tasks of the process; an asynchronous context."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[bool]] = set()

    async def __aenter__(self) -> Tasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._group.__aexit__(*exception)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` beside everything else, until it ends or the process does."""
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `work()` as `spawn` does; if it fails, once more, less and less often."""
        self.spawn(_again(work, name), name)


async def _again(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    for failures in itertools.count():
        if await _guarded(work(), name):
            return
        await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE_S))


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> bool:
    """Whether it ended without an error."""
    try:
        await work
    except KeepstepError as error:
        warn("task failed", task=name, reason=str(error))
        return False
    except Exception:
        _log.exception("task failed", extra={"fields": {"task": name}})
        return False
    return True
