"""One subject, measured in a process of its own: prints one JSON object as its last line.

`python -m bench.worker "torch.save + fsync" --bytes 67108864 --dir D --measures blocked,durable`
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from bench import measures
from bench.gpt import TrainingState
from bench.ours import OURS
from bench.peers import PEERS
from bench.savers import Saver

MEMCPY, DISK, LIVES, IMPORTS, PEER, ARCHIVE = (
    "memcpy",
    "disk",
    "lives",
    "imports",
    "peer",
    "archive",
)
# by subject, module and function; only what is measured is imported
_PARTS = {MEMCPY: "floors.memcpy", DISK: "floors.disk", LIVES: "lives.measure"}
_PARTS |= {IMPORTS: "imports.measure", PEER: "tiers.peers", ARCHIVE: "tiers.archive"}


def main() -> int:
    options = _options()
    try:
        result: dict[str, Any] = {"figures": _measure(options)}
    except Exception as error:
        known = type(error).__name__ == "PeerMissing"
        print(traceback.format_exc(), file=sys.stderr)
        result = {"missing" if known else "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    return 0


def _measure(options: argparse.Namespace) -> dict[str, float]:
    if options.subject not in _PARTS:
        return _measure_saver(options)
    module, _, function = _PARTS[options.subject].partition(".")
    measure = getattr(importlib.import_module(f"bench.{module}"), function)
    figures: dict[str, float] = measure(options.bytes, options.dir)
    return figures


def _measure_saver(options: argparse.Namespace) -> dict[str, float]:
    kinds = {one.name: one for one in (*OURS, *PEERS)}
    saver = kinds[options.subject](TrainingState(options.bytes), options.dir)
    try:
        return _measure_all(saver, options) | saver.extra()
    finally:
        saver.close()


def _measure_all(saver: Saver, options: argparse.Namespace) -> dict[str, float]:
    steps = measures.Steps()
    # longer than the copy, as the bar requires
    gap_s = 0.1 + 0.45 * options.bytes / (1 << 30)
    if saver.blocking:
        # a blocking save leaves nothing behind, so the other figures follow from this one
        figures = measures.once(saver, steps, gap_s=0.0, size_bytes=options.bytes)
        blocked_s = figures["blocked_s"]
        return figures | {"lost_s": blocked_s, "ratio": 1 + blocked_s / options.wait}
    figures = measures.warm_up(saver, steps, saves=1 if isinstance(saver, PEERS) else 4)
    for measure in options.measures.split(","):
        if measure == "once":
            figures |= measures.once(saver, steps, gap_s=gap_s, size_bytes=options.bytes)
        elif measure == "blocked":
            figures |= measures.blocked(saver, steps, gap_s=gap_s)
        elif measure == "durable":
            figures |= measures.durable(saver, steps, size_bytes=options.bytes)
        elif measure == "inflation":
            figures |= measures.inflation(saver, steps, wait_s=options.wait, count=options.steps)
        elif measure == "busy":
            figures |= measures.busy(saver, steps, step_s=options.wait, count=options.steps)
        elif measure == "lost":
            figures |= measures.lost(saver, steps, step_s=0.02, quiet_s=options.wait)
        else:
            raise ValueError(f"no such measure: {measure}")
    return figures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--measures", default="blocked,durable")
    parser.add_argument("--wait", type=float, default=1.0, help="seconds of a step's compute")
    parser.add_argument("--steps", type=int, default=4, help="steps per loop")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
