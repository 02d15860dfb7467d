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

from bench import measures
from bench.floors import CopyAndFio
from bench.ours import OURS
from bench.peers import PEERS, PeerMissing
from bench.state import gpt

PARTS = {
    "memcpy": "floors.memcpy",
    "disk": "floors.disk",
    "lives": "lives.measure",
    "imports": "imports.measure",
    "peer": "tiers.peers",
    "archive": "tiers.archive",
}
"""What is measured beside savers: module and function by subject. Only one of them is imported."""


_STEP_S = 1.0


def main() -> None:
    options = _options()
    try:
        result: dict[str, object] = {"figures": _measure(options)}
    except PeerMissing as error:
        result = {"missing": str(error)}
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)


def _measure(options: argparse.Namespace) -> dict[str, float]:
    if part := PARTS.get(options.subject):
        module, _, function = part.partition(".")
        measure = getattr(importlib.import_module(f"bench.{module}"), function)
        return dict(measure(options.bytes, options.dir))
    kinds = {saver.name: saver for saver in (*OURS, CopyAndFio, *PEERS)}
    saver = kinds[options.subject](gpt(options.bytes), options.dir)
    ours = isinstance(saver, (*OURS, CopyAndFio))
    steps, size = measures.Steps(), options.bytes
    # longer than the copy, as the bar requires
    gap_s = 0.1 + 0.45 * size / (1 << 30)
    of = {
        "blocked": lambda: measures.blocked(saver, steps, gap_s=gap_s, repeats=2 if ours else 1),
        "durable": lambda: measures.durable(
            saver, steps, size_bytes=size, repeats=6 if ours else 1
        ),
        "inflation": lambda: measures.inflation(saver, steps, wait_s=_STEP_S, count=options.steps),
        "busy": lambda: measures.busy(saver, steps, step_s=_STEP_S, count=options.steps),
        "lost": lambda: measures.lost(saver, steps, step_s=0.02, quiet_s=_STEP_S),
    }
    figures: dict[str, float] = {}
    try:
        if saver.blocking:
            # a blocking save leaves nothing behind, so the other figures follow from this one
            figures = of["durable"]()
            save_s = figures["durable_s"]
            return figures | {"blocked_s": save_s, "lost_s": save_s, "ratio": 1 + save_s / _STEP_S}
        measures.warm_up(saver, steps, saves=4 if ours else 1)
        for measure in options.measures.split(","):
            figures |= of[measure]()
        return figures | saver.extra()
    finally:
        saver.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--measures", default="blocked,durable")
    parser.add_argument("--steps", type=int, default=4, help="steps per loop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
