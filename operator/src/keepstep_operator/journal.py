"""The operator's log: one JSON line on stderr per change of state."""

from __future__ import annotations

import json
import logging
import sys
import time

_log = logging.getLogger("keepstep.operator")


def say(event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one change of state. `event` is a stable short name, `fields` become JSON members."""
    if _log.isEnabledFor(level):
        _log.log(level, event, extra={"fields": fields})


def warn(event: str, **fields: object) -> None:
    """`say`, for what somebody should look at."""
    say(event, level=logging.WARNING, **fields)


def crash(event: str, **fields: object) -> None:
    """`say`, with the traceback of the exception that is being handled: a bug of ours."""
    _log.exception(event, extra={"fields": fields})


class _JsonLines(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "component": self._component,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(component: str, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(component))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.ERROR)
