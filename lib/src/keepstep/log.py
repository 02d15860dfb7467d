"""The log of the sidecar and of the operator: one JSON line on stderr for each change of state.

An event is named `area.event`, which is a row of scripts/log_events.toml. The trainer does not use
this module, because the trainer's log is the user's. There the library logs only what it must, as
sentences by plain `logging`, with the event's name in brackets at the end.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Final

_SELDOM_S: Final = 10.0
_NOISY: Final = ("aiohttp.server", "asyncio")
"""Loggers of what clients send, and of whatever goes wrong with a connection."""


class Journal:
    """Writes to the logger `name`. `event`: `area.event`, stable. `fields`: JSON members."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def info(self, event: str, *, level: int = logging.INFO, **fields: object) -> None:
        """Log one change of state."""
        if self._log.isEnabledFor(level):
            self._log.log(level, event, extra={"fields": fields})

    def warn(self, event: str, **fields: object) -> None:
        """As `info`, at level WARNING: for what a person should look at."""
        self.info(event, level=logging.WARNING, **fields)

    def crash(self, event: str, **fields: object) -> None:
        """As `info`, at level ERROR and with the traceback of the exception that is being handled:
        for a bug in keepstep."""
        self._log.exception(event, extra={"fields": fields})


class LogLimit:
    """Lets one of each key pass every few seconds, so that clients cannot fill the log.
    Thread-safe."""

    def __init__(self, every_s: float = _SELDOM_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def suppressed_count_if_due(self, key: str) -> int | None:
        """None when it is too soon; else how many were left out since the last one."""
        with self._lock:
            now = time.monotonic()
            if now - self._last.get(key, -self._every_s) < self._every_s:
                self._suppressed[key] = self._suppressed.get(key, 0) + 1
                return None
            self._last[key] = now
            return self._suppressed.pop(key, 0)


class _Few(logging.Filter):
    """The same for another package: by place in its code."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        suppressed = self._limit.suppressed_count_if_due(f"{record.pathname}:{record.lineno}")
        if suppressed:
            record.fields = {"lines_suppressed": suppressed}
        return suppressed is not None


def _event(record: logging.LogRecord) -> dict[str, str]:
    """What happened. The text of another package (aiohttp, kopf) is no event of ours."""
    if record.name.startswith("keepstep."):
        return {"event": record.msg}
    return {"event": "package.logged", "logger": record.name, "message": record.getMessage()}


class _JsonLines(logging.Formatter):
    def __init__(self, always: dict[str, object]) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **_event(record),
            **self._always,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(*, level: int = logging.INFO, **always: object) -> None:
    """Send everything that this process logs to stderr as JSON lines. `always`: members of each
    line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(always))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.ERROR)
    for name in _NOISY:
        logging.getLogger(name).addFilter(_Few())
