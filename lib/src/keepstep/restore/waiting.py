"""Tells in the trainer's own log what a slow `restore` waits for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from keepstep.client.session import Client
from keepstep.errors import KeepstepError

log = logging.getLogger("keepstep")

FIRST_S = 10.0
EVERY_S = 30.0


@contextlib.contextmanager
def telling(path: str, doing: Callable[[], str], *, rank: int) -> Iterator[None]:
    """Log what this rank waits for after 10 s, and every 30 s from then on.

    `path`: the socket of the sidecar, which knows why a rank may not vote yet and what it has
    fetched. `doing`: what the collective is doing. Only rank 0 logs it, because it is the same for
    all ranks.
    """
    if not path:
        yield
        return
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        wait_s = FIRST_S
        while not done.wait(wait_s):
            wait_s = EVERY_S
            text = _text(path, doing() if rank == 0 else "", rank)
            if text and not done.is_set():
                seconds = time.monotonic() - began
                log.warning("keepstep: restore() goes on after %.0f s: %s", seconds, text)

    thread = threading.Thread(target=tell, name="keepstep-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _text(path: str, doing: str, rank: int) -> str:
    from keepstep.wire.status import Status  # a fast restore does not pay for this import

    try:
        with contextlib.closing(Client(path)) as client:
            status = client.get("/v1/status", Status, timeout_s=5.0)
    except KeepstepError as error:
        return f"{doing}; the sidecar: {error}" if doing else ""
    why = next((one.waits for one in status.ranks if one.rank == rank), "")
    if why:
        return f"rank {rank} waits: {why}"
    fetched = sum(one.received_bytes for one in status.depots)
    return f"{doing} ({fetched / 1e6:.0f} MB fetched so far)" if doing and fetched else doing
