"""The sidecar's log, with its run in every line."""

from __future__ import annotations

import logging

from keepstep import journal

_journal = journal.Journal("keepstep.sidecar")
say, warn = _journal.say, _journal.warn


def configure(run: str, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to stderr as JSON lines."""
    journal.configure(level=level, run=run)
