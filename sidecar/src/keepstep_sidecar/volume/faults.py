"""Fault points: named places where a test can kill this process or make a system call fail.

`KEEPSTEP_FAULTS="write.data:kill@3,write.control:eio"` kills the process (SIGKILL, so nothing is
cleaned up) before it writes the third chunk, and fails the first write of a control page with EIO.
Without the variable, `point` does nothing. A point stands *before* the call that it names. The
points of one operation are listed in the order in which they are passed.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FAULTS_ENV = "KEEPSTEP_FAULTS"

POINTS = (
    "write.create",
    "spare.unseal",
    "spare.sync",
    "write.allocate",
    "write.data",
    "write.table",
    "write.data-sync",
    "write.control",
    "write.control-sync",
    "write.rename",
    "write.directory-sync",
    "write.done",
    "publish.rename",
    "publish.sync",
    "unpublish.rename",
    "unpublish.sync",
    "retire.rename",
    "retire.sync",
    "retire.unlink",
    "retire.done",
    "quarantine.rename",
    "history.write",
    "record.create",
    "record.data",
    "record.data-sync",
    "record.rename",
    "record.directory-sync",
    "load.read",
    "load.control",
    "peer.create",
    "peer.allocate",
    "peer.data",
    "peer.table",
    "peer.data-sync",
    "peer.control",
    "peer.control-sync",
    "peer.rename",
    "peer.directory-sync",
    "peer.done",
)
"""All fault points. While faults are armed, `point` refuses other names."""

KINDS = ("kill", "eio", "enospc", "hang")
"""`hang`: the call never returns, as on a network volume that cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens at the `hit`-th time (from 1) that `point` is passed."""

    point: str
    kind: str
    hit: int = 1


def parse(text: str) -> tuple[Fault, ...]:
    """Read `point:kind[@hit]` separated by commas. Raises ValueError naming the bad part."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(part: str) -> Fault:
    name, _, rest = part.partition(":")
    kind, _, hit = rest.partition("@")
    if name not in POINTS or kind not in KINDS or not (hit or "1").isdigit():
        raise ValueError(f"{FAULTS_ENV}: not a fault: {part!r} (point:kill|eio|enospc|hang[@n])")
    return Fault(point=name, kind=kind, hit=int(hit or 1))


class _Armed:
    """Counts the passes of every point, and triggers the faults."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = {(fault.point, fault.hit): fault.kind for fault in faults}
        self._hits = dict.fromkeys(POINTS, 0)
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            self._hits[name] += 1
            kind = self._faults.get((name, self._hits[name]))
            if kind == "kill":  # under the lock: meanwhile no other thread gets any further
                os.kill(os.getpid(), signal.SIGKILL)
        if kind is None:
            return
        os.write(2, f"{name}: {kind} (injected)\n".encode())
        if kind == "hang":
            threading.Event().wait()
        else:
            code = {"eio": errno.EIO, "enospc": errno.ENOSPC}[kind]
            raise OSError(code, f"{os.strerror(code)} (injected at {name})")


def _nothing(name: str) -> None:
    pass


point: Callable[[str], None] = _nothing
"""Call as `faults.point("write.data")`, through the module: `arm` replaces it."""


def arm(faults: tuple[Fault, ...]) -> None:
    """Trigger these faults from now on; with none, disarm."""
    global point
    point = _Armed(faults) if faults else _nothing


def arm_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Arm the faults of `KEEPSTEP_FAULTS`. Raises ValueError when it cannot be parsed."""
    arm(parse(environment.get(FAULTS_ENV, "")))


arm_from_environment()
