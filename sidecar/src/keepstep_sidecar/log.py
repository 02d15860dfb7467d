"""The sidecar's log. Every line names the run."""

from __future__ import annotations

import logging

from keepstep import log

_journal = log.Journal("keepstep.sidecar")
info, warn = _journal.info, _journal.warn


def configure(run: str, *, level: int = logging.INFO) -> None:
    """Write everything that this process logs to stderr as JSON lines."""
    log.configure(level=level, run=run)


class RareWarning(log.LogLimit):
    """`warn` at a limited rate, with the number of those left out since."""

    def __call__(self, event: str, **fields: object) -> None:
        """Log the event, or count it."""
        suppressed = self.suppressed_count_if_due(event)
        if suppressed is not None:
            warn(event, **fields, **({"lines_suppressed": suppressed} if suppressed else {}))
