"""A new life must not join the rendezvous of the last one.

Where each rank is a container of its own, rank 0's process sees the death of another one some
seconds late, and its store answers until it ends. A rank that is back within half a second would
find the old store, join what is dying there, and wait for it as long as torch's timeout: half an
hour. A cold start is too slow to meet it.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("keepstep")

PATIENCE_S = 30.0
_PAUSE_S = 0.05
_ANSWER_S = 2.0


def await_new_store(environment: Mapping[str, str] = os.environ) -> None:
    """Return when `MASTER_ADDR` has no store, or one in which nobody has met yet.

    For torch's `env://`, and not for rank 0, whose the store is, nor for torchrun's workers, whose
    agent keeps it from life to life.
    """
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    rank = environment.get("RANK", "0")
    if not address or not port.isdecimal() or rank == "0" or "TORCHELASTIC_RUN_ID" in environment:
        return
    deadline = time.monotonic() + PATIENCE_S
    while _was_used(address, int(port)):
        if time.monotonic() >= deadline:
            log.warning(
                "keepstep: the store at %s:%s is in use for %.0f s; joining it",
                address,
                port,
                PATIENCE_S,
            )
            return
        time.sleep(_PAUSE_S)


def _was_used(address: str, port: int) -> bool:
    """Whether ranks have met in the store there. One that waits for them has a single key, the
    number of those that came."""
    try:
        # without torch, which tries again and says so when nobody listens
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=_ANSWER_S)
    try:
        store = TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False)
        return store.num_keys() > 1
    except RuntimeError:  # it ended meanwhile, or is no store
        return False
