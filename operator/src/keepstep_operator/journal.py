"""The operator's log, with the component in every line."""

from __future__ import annotations

import logging

from keepstep import log

_journal = log.Journal("keepstep.operator")
say, warn, crash = _journal.say, _journal.warn, _journal.crash


def configure(component: str, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to stderr as JSON lines."""
    log.configure(level=level, component=component)
