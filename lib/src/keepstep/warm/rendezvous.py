"""Keeps a new life from joining the rendezvous of the last one.

If each rank is a container of its own, rank 0's process notices the death of another rank some
seconds late, and its store answers until it ends. A rank that is back within half a second would
find the old store, join the dying rendezvous, and wait there for torch's timeout, half an hour. A
cold start is too slow to meet the old store.
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
    """Return when there is no store at `MASTER_ADDR`, or one in which no ranks have met yet.

    This is for torch's `env://`. It does nothing for rank 0, which has the store itself, and for
    torchrun's workers, whose agent keeps the store from life to life. After 30 s, it logs a warning
    and returns.
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
    """Whether ranks have met in the store there. A store that still waits for them has a single
    key: the number of ranks that came.
    """
    try:
        # a plain connection first, because torch retries and logs if nothing listens
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=_ANSWER_S)
    try:
        store = TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False)
        return store.num_keys() > 1
    except RuntimeError:  # the store has ended meanwhile, or it is not a store
        return False
