"""Background tasks: every one has a name and an owner, and none takes the process down.

A failure is logged and the state it left is seen again by the next event; training goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from keepstep.errors import KeepstepError
from keepstep_sidecar.journal import warn

_log = logging.getLogger("keepstep.sidecar")


class Tasks:
    """Owns the background tasks of the process; an asynchronous context."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

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


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except KeepstepError as error:
        warn("task failed", task=name, reason=str(error))
    except Exception:
        _log.exception("task failed", extra={"fields": {"task": name}})
