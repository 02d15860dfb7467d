"""The operator's log. Every line names the component."""

from __future__ import annotations

import logging
import time
from typing import Final

from keepstep import log

_journal = log.Journal("keepstep.operator")
say, warn, crash = _journal.say, _journal.warn, _journal.crash

_SELDOM_S: Final = 10.0
_NOISY: Final = ("aiohttp.server", "asyncio")
"""Loggers of what strangers send, and of whatever goes wrong with a connection."""


class _Few(logging.Filter):
    """Lets one record every few seconds pass from each place in a library's code, with the number
    of those that were left out. Otherwise any client of a port could fill the node's log with
    tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._last.get(place, -_SELDOM_S) < _SELDOM_S:
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return False
        self._last[place] = now
        if left_out := self._left_out.pop(place, 0):
            record.fields = {"left_out": left_out}
        return True


def configure(component: str, *, level: str = "info") -> None:
    """Send what this process logs, from `level` on, to stderr as JSON lines."""
    log.configure(level=logging.getLevelNamesMapping()[level.upper()], component=component)
    for name in _NOISY:
        logging.getLogger(name).addFilter(_Few())
