"""Statuses that others overwrote are written again, but only after a while: two writers that
disagree must not make a loop, and a watch that is late is no reason to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from keepstep_operator.journal import warn

Key = TypeVar("Key")

MEND_S: Final = 10.0


class Mends(Generic[Key]):
    """Calls `mend` for a key whose status was not ours for `MEND_S`."""

    def __init__(self, mend: Callable[[Key], None]) -> None:
        self._mend = mend
        self._due: dict[Key, asyncio.TimerHandle] = {}

    def compared(self, key: Key, *, same: bool) -> None:
        """The status of this key was compared with ours."""
        if same:
            self.forget(key)
        elif key not in self._due:
            loop = asyncio.get_running_loop()
            self._due[key] = loop.call_later(MEND_S, self._now, key)

    def forget(self, key: Key) -> None:
        """This key needs no mending (any more)."""
        if (due := self._due.pop(key, None)) is not None:
            due.cancel()

    def _now(self, key: Key) -> None:
        del self._due[key]
        warn("status that others wrote is written over", object=str(key))
        self._mend(key)
