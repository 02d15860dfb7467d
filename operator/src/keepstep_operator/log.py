"""The operator's log. Every line names the component."""

from __future__ import annotations

import logging

from keepstep import log

_journal = log.Journal("keepstep.operator")
info, warn, crash = _journal.info, _journal.warn, _journal.crash


def configure(component: str, *, level: str = "info") -> None:
    """Send what this process logs, from `level` on, to stderr as JSON lines."""
    log.configure(level=logging.getLevelNamesMapping()[level.upper()], component=component)
