"""The sidecar's log. Every line names the run."""

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
"""They log what strangers send and everything that goes wrong with a connection."""


def configure(run: str, *, level: int = logging.INFO) -> None:
    """Write everything that this process logs to stderr as JSON lines."""
    log.configure(level=level, run=run)
    for name in _NOISY:
        logging.getLogger(name).addFilter(_Few())


class Seldom:
    """`warn` at a limited rate, so that strangers cannot fill the log: each event at most every few
    seconds, with the number of those left out since. Thread-safe."""

    def __init__(self, every_s: float = _SELDOM_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, event: str, **fields: object) -> None:
        """Log the event, or count it."""
        left_out = self.due(event)
        if left_out is not None:
            warn(event, **fields, **({"left_out": left_out} if left_out else {}))

    def due(self, event: str) -> int | None:
        """None when it is too soon; else how many were left out since the last logged one."""
        with self._lock:
            now = time.monotonic()
            if now - self._last.get(event, -self._every_s) < self._every_s:
                self._left_out[event] = self._left_out.get(event, 0) + 1
                return None
            self._last[event] = now
            return self._left_out.pop(event, 0)


class _Few(logging.Filter):
    """The same limit for libraries: one record every few seconds for each place in their code."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._seldom.due(f"{record.pathname}:{record.lineno}") is not None
