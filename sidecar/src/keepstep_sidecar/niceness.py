"""Threads that step back behind the training."""

from __future__ import annotations

import os
import threading


def yield_to_others(niceness: int) -> None:
    """Give this thread at least that niceness; on Linux a nice value is a thread's own.

    A process that is nicer already stays so, as only root may take that back.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
