"""A rank that is back at once does not join what its last life was in."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.warm import process
from tests.harness import eventually, free_port

_SECOND = datetime.timedelta(seconds=1)

# rank 0's process: a store that waits for a second rank, as init_process_group makes it
_WAITS = """
import datetime, sys
from torch.distributed import TCPStore
TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, timeout=datetime.timedelta(seconds=60))
"""


def environment(port: int, **more: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", **more}


def used_store(port: int) -> Any:
    store = TCPStore("127.0.0.1", port, 1, True, timeout=_SECOND)
    store.set("default_pg/0//1//cpu//0/rank_1", "an address of a life that has ended")
    return store


def test_a_warm_start_waits_until_the_rendezvous_store_of_the_previous_start_is_closed() -> None:
    port = free_port()
    old = [used_store(port)]
    waiting = threading.Thread(target=process.await_new_store, args=(environment(port),))
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    old.clear()  # rank 0's process ends
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_a_new_rendezvous_store_is_joined_at_once() -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", _WAITS, str(port)]) as rank_0:
        try:
            eventually(lambda: _answers(port), within_s=60)
            began = time.monotonic()
            process.await_new_store(environment(port))
            assert time.monotonic() - began < process.PATIENCE_S / 2
            TCPStore("127.0.0.1", port, 2, False, timeout=10 * _SECOND)
            assert rank_0.wait(30) == 0, "both have met there"
        finally:
            rank_0.kill()


def _answers(port: int) -> bool:
    try:
        TCPStore("127.0.0.1", port, None, False, timeout=_SECOND, wait_for_workers=False)
    except RuntimeError:
        return False
    return True
