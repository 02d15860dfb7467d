"""How threads wait for each other, without a lock that an exception could leave taken.

A signal handler may raise at any point of the training thread (Ctrl-C, an alarm, a preemption
notice). `threading.Condition` and `Event` are Python code: an exception inside them may leave their
lock taken, and the agent thread would wait for ever. `SimpleQueue` is C code that is safe against
this. Here it only wakes threads; the condition itself is on plain attributes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Changes:
    """Wakes the threads that wait for a condition on plain attributes."""

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Something changed: every waiting thread checks its condition again."""
        for bell in tuple(self._waiting):
            if bell.empty():
                bell.put(None)

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float | None) -> bool:
        """Wait until the condition is true, for at most `timeout_s` (None: for any time). Returns
        whether it became true in time."""
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
    """An event that is set once and stays set."""

    def __init__(self) -> None:
        self._open = False
        self._changes = Changes()

    def is_set(self) -> bool:
        return self._open

    def set(self) -> None:
        self._open = True
        self._changes.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is set. Returns whether it was set in time."""
        return self._changes.wait_for(self.is_set, timeout_s=timeout_s)
