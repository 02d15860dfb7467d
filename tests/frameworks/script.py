"""What every training of these tests is told and writes: `python SCRIPT OUT SETTINGS`, the
latter as JSON.

Into OUT goes the loss of every micro-batch as it comes, with step and process. It kills itself
before the optimizer's steps that `kill` names, once each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

OUT = Path(sys.argv[1])
SETTINGS: dict[str, Any] = json.loads(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))


def record(step: int, loss: torch.Tensor) -> None:
    with (OUT / f"losses-{RANK}").open("a") as file:
        file.write(json.dumps([step, loss.item().hex(), os.getpid()]) + "\n")


def maybe_kill(step: int) -> None:
    mark = OUT / f"killed-{step}"
    if step in SETTINGS.get("kill", ()) and RANK == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
