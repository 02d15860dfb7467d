"""What every training of these tests is told and writes: `python SCRIPT OUT SETTINGS`, the
latter as JSON.

Into OUT goes the loss of every micro-batch as it comes, with step and process. It kills itself
before the optimizer's steps that `kill` names, once each.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

OUT = Path(sys.argv[1])
SETTINGS: dict[str, Any] = json.loads(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))

# of torch's each script sets the seed itself
random.seed(0)
numpy.random.seed(0)


def record(step: int, loss: torch.Tensor) -> None:
    with (OUT / f"losses-{RANK}").open("a") as file:
        file.write(json.dumps([step, loss.item().hex(), os.getpid()]) + "\n")


def digest(state: Any) -> str:
    """Of a state dict, or whatever else of plain values and tensors: every bit of it."""
    hashed = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                hashed.update(repr(key).encode())
                take(item)
        elif isinstance(value, list | tuple):
            for item in value:
                take(item)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            flat = whole.detach().contiguous().reshape(-1)
            hashed.update(flat.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
        else:
            hashed.update(repr(value).encode())

    take(state)
    return hashed.hexdigest()


def divided(engine: Any) -> dict[str, str]:
    """The weights, and this rank's part of what DeepSpeed divides."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        weights = digest([parameter.detach().clone() for parameter in parameters])
    states = engine.optimizer.optimizer.state.items()
    counts = [engine.global_steps, engine.global_samples, engine.micro_steps]
    return {"weights": weights, "optimizer": digest([[*state] for state in states] + counts)}


def random_states() -> str:
    """Of the generators of this process."""
    kept = numpy.random.get_state()  # of the global one, which people still use
    return digest(
        [torch.get_rng_state(), random.getstate(), [*map(str, kept[2:]), kept[1].tolist()]]
    )


def write(result: dict[str, Any]) -> None:
    """All that must be the same in an undisturbed run."""
    (OUT / f"result-{RANK}").write_text(json.dumps(result))


def maybe_kill(step: int) -> None:
    mark = OUT / f"killed-{step}"
    if step in SETTINGS.get("kill", ()) and RANK == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Write each loss as it is passed backward, and kill before this optimizer's steps."""

    def steps() -> int:
        return max((int(value["step"]) for value in optimizer.state.values()), default=0)

    backward = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *args: Any, **options: Any) -> None:
        record(steps(), loss.detach())
        backward(loss, *args, **options)

    torch.Tensor.backward = recorded  # type: ignore[method-assign, assignment]
    optimizer.register_step_pre_hook(lambda *_: maybe_kill(steps()))
