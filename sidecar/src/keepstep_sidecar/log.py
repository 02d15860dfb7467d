"""The sidecar's log, with its run in every line."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from keepstep import log

_journal = log.Journal("keepstep.sidecar")
say, warn = _journal.say, _journal.warn

_SELDOM_S: Final = 10.0
_NOISY: Final = ("aiohttp.server", "asyncio")
"""What they log is what strangers send, and whatever goes wrong with a connection."""


def configure(run: str, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to stderr as JSON lines."""
    log.configure(level=level, run=run)
    for name in _NOISY:
        logging.getLogger(name).addFilter(_Few())


class Seldom:
    """`warn`, but what strangers can cause fills no log: each event at most every few seconds, with
    how often it came since. Thread-safe."""

    def __init__(self, every_s: float = _SELDOM_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, event: str, **fields: object) -> None:
        """Log it, or count it."""
        left_out = self.due(event)
        if left_out is not None:
            warn(event, **fields, **({"left_out": left_out} if left_out else {}))

    def due(self, event: str) -> int | None:
        """None when it is too soon; else how many were left out since the last one."""
        with self._lock:
            now = time.monotonic()
            if now - self._last.get(event, -self._every_s) < self._every_s:
                self._left_out[event] = self._left_out.get(event, 0) + 1
                return None
            self._last[event] = now
            return self._left_out.pop(event, 0)


class _Few(logging.Filter):
    """The same for libraries: one record every few seconds of each place in their code."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._seldom.due(f"{record.pathname}:{record.lineno}") is not None
