"""Follows a real `save()` to *committed*: which source files of ours trainer and sidecar enter.

One trainer of one rank and its sidecar are started under a profiler and save a few steps. A file
counts if it is entered in each of the last saves, between the call of `save` and the end of
`wait(step, "committed")`: what only runs from time to time is left out, and what tells the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAINER, SIDECAR = "trainer", "sidecar"
_FIRST, _COUNTED = 4, 4
_LIMIT_S = 120.0
_PAUSE_S = 0.25
"""Between a commit and the next save: what follows a commit belongs to no save."""


def entered() -> dict[str, list[str]]:
    """The files that a save enters, in the order of the first save, of trainer and sidecar. Raises
    RuntimeError if no step is committed."""
    with tempfile.TemporaryDirectory(prefix="keepstep-house-", dir="/dev/shm") as place:
        home = Path(place)
        memory = home / "memory"
        memory.mkdir(mode=0o700)
        paths = [ROOT, *(ROOT / part / "src" for part in ("lib", "sidecar"))]
        environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith("KEEPSTEP_")},
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "KEEPSTEP_SOCKET": str(memory / "sidecar.sock"),
            "OMP_NUM_THREADS": "1",
        }
        log = home / "log"
        with log.open("w") as out:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.trace_save", role, str(home)],
                    cwd=ROOT,
                    env=environment,
                    stdout=out,
                    stderr=out,
                )
                for role in (SIDECAR, TRAINER)
            ]
        sidecar, trainer = started
        try:
            if trainer.wait(_LIMIT_S):
                raise RuntimeError(f"the traced training failed:\n{log.read_text()[-3000:]}")
            sidecar.send_signal(signal.SIGTERM)
            sidecar.wait(_LIMIT_S)
            windows = json.loads((home / "windows").read_text())
            return {role: _in_each(home / role, windows) for role in (TRAINER, SIDECAR)}
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _in_each(calls: Path, windows: list[tuple[float, float]]) -> list[str]:
    times: dict[str, list[float]] = json.loads(calls.read_text())
    firsts = {
        path: [next((at for at in found if begin <= at <= end), 0.0) for begin, end in windows]
        for path, found in times.items()
    }
    return sorted((path for path in firsts if all(firsts[path])), key=lambda path: firsts[path][0])


class Calls:
    """When each source file of ours was entered, in all threads that start after `begin`."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def begin(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def write(self, path: Path) -> None:
        sys.setprofile(None)
        path.write_text(json.dumps(dict(self.times)))

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        ours = event == "call" and "/src/keepstep" in path
        if ours and frame.f_code.co_name != "<module>" and not _reports():
            self.times[path.split("/src/")[1]].append(time.monotonic())


def _reports() -> bool:
    """Whether this is the sidecar's task that tells the leader."""
    with contextlib.suppress(RuntimeError):  # a thread without a loop
        return getattr(asyncio.current_task(), "get_name", str)() == "report"
    return False


def _sidecar(home: Path) -> None:
    sys.argv = ["keepstep-sidecar", "--run", "house", "--memory-dir", str(home / "memory")]
    sys.argv += ["--volume", str(home / "drive")]
    calls = Calls()
    calls.begin()
    try:
        runpy.run_module("keepstep_sidecar", run_name="__main__")
    finally:
        calls.write(home / SIDECAR)


def _trainer(home: Path) -> None:
    import torch

    import keepstep

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    socket = home / "memory" / "sidecar.sock"
    deadline = time.monotonic() + _LIMIT_S
    while not socket.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the sidecar did not start")
        time.sleep(0.01)
    calls = Calls()
    calls.begin()
    checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
    checkpointer.restore()
    windows = []
    for step in range(_FIRST + _COUNTED):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(_PAUSE_S)
        began = time.monotonic()
        while not checkpointer.save(step):  # no slot is made yet
            time.sleep(0.01)
            began = time.monotonic()
        checkpointer.wait(step, "committed", timeout=_LIMIT_S)
        windows.append((began, time.monotonic()))
    (home / "windows").write_text(json.dumps(windows[_FIRST:]))
    calls.write(home / TRAINER)
    checkpointer.close()


if __name__ == "__main__":
    {TRAINER: _trainer, SIDECAR: _sidecar}[sys.argv[1]](Path(sys.argv[2]))
