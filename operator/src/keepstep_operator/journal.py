"""The operator's log, with the component in every line."""

from __future__ import annotations

import logging

from keepstep import journal

_journal = journal.Journal("keepstep.operator")
say, warn, crash = _journal.say, _journal.warn, _journal.crash


def configure(component: str, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to stderr as JSON lines."""
    journal.configure(level=level, component=component)
