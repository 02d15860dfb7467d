"""Trains until it is killed, and prints JSON lines with `time.monotonic()` stamps.

`--plain` trains without keepstep. `--wait-for PATH` delays the restore until that file exists, so
that the state is already built and the clock starts with the sidecar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from bench.state import gpt


def main() -> None:
    options = _options()
    state = gpt(options.bytes)
    emit("built")
    checkpointer = None
    first = 0
    if not options.plain:
        from keepstep import Checkpointer

        while options.wait_for is not None and not options.wait_for.exists():
            time.sleep(0.001)
        begun = time.perf_counter()
        checkpointer = Checkpointer(state.components())
        at = checkpointer.restore()
        seconds = time.perf_counter() - begun
        if at is not None:
            first = at.step + 1
            emit("restored", step=at.step, tier=str(at.tier), seconds=seconds)
    for step in itertools.count(first):
        time.sleep(options.step_s)
        state.update(step)
        emit("step", step=step)
        # the first steps are not kept, while the slots are being made
        if checkpointer is not None and checkpointer.save(step):
            for name in options.reach:
                checkpointer.wait(step, name, timeout=120)
                emit(name, step=step)


def emit(event: str, **values: Any) -> None:
    """Print one event as a line of JSON."""
    print(json.dumps({"event": event, "at": time.monotonic(), **values}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--reach", nargs="+", default=(), help="states that each step waits for")
    parser.add_argument("--wait-for", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
