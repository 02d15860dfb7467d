"""How threads wait for each other here: without a lock that an exception could leave taken.

A signal handler may raise in the middle of anything that the training thread does (Ctrl-C, an
alarm, a preemption notice). `threading.Condition` and `Event` are Python code: an exception inside
leaves their lock taken, and the agent thread would stand still for ever. A `SimpleQueue` is C code
that is made for that; here it only wakes, and what is waited for is a plain attribute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Changes:
    """Wakes whoever waits for a condition on plain attributes."""

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Something changed: every waiter looks again."""
        for bell in tuple(self._waiting):
            if bell.empty():
                bell.put(None)

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float | None) -> bool:
        """Whether the condition became true in time; None waits for as long as it takes."""
        if condition():
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            self._waiting.add(bell)
            while not condition():
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                try:
                    bell.get(timeout=left_s)
                except Empty:
                    return bool(condition())
            return True
        finally:
            self._waiting.discard(bell)


class Gate:
    """Opens once, and stays open."""

    def __init__(self) -> None:
        self._open = False
        self._changes = Changes()

    def is_set(self) -> bool:
        return self._open

    def set(self) -> None:
        self._open = True
        self._changes.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was opened in time."""
        return self._changes.wait_for(self.is_set, timeout_s=timeout_s)
