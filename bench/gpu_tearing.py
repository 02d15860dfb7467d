"""Does an image ever hold two steps? Tensors are changed right after `save()` returns.

Every element of step k is k, so a shard that was sealed for step k must only hold k. First an
optimizer changes the tensors, which the fence covers. Then they are changed in place without an
optimizer: the image has to be discarded or whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.processes import Sidecar

_TENSORS, _ROWS = 16, 512


def measure(device: str, directory: Path, *, steps: int, width: int) -> dict[str, float | str]:
    """Counts of steps saved, shards checked, torn shards (must be 0) and discarded images."""
    figures: dict[str, float | str] = {}
    for name in ("optimizer", "in_place"):
        figures |= {
            f"{name}_{key}": value
            for key, value in _one(device, directory / name, name, steps, width).items()
        }
    return figures


def _one(device: str, directory: Path, name: str, steps: int, width: int) -> dict[str, float | str]:
    import keepstep

    model = nn.ParameterList(torch.zeros(_ROWS, width, device=device) for _ in range(_TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model:
        parameter.grad = torch.full_like(parameter, -1.0)
    change = optimizer.step if name == "optimizer" else _in_place(model)
    sidecar = Sidecar(directory, slots=4, keep=steps + 1)
    try:
        sidecar.start()
        os.environ["KEEPSTEP_SOCKET"] = str(sidecar.socket)
        checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
        checkpointer.restore()
        checkpointer.save(0)
        sidecar.wait_slots()
        for step in range(1, steps):
            change()
            checkpointer.save(step)
            # the change, which the image must not contain, comes at once or while the copy runs
            time.sleep(0.0 if step % 2 else 0.002)
        checkpointer.fence()
        discarded = checkpointer.stats.discarded
        # the last image may have been discarded, which is correct
        with contextlib.suppress(keepstep.NotDurableError):
            checkpointer.close(timeout=60.0)
        checked, torn = _check(directory)
        return {"saved": steps, "checked": checked, "torn": torn, "discarded": discarded}
    finally:
        sidecar.close()


def _in_place(model: nn.ParameterList) -> Callable[[], None]:
    def change() -> None:
        with torch.no_grad():
            for parameter in model:
                parameter.add_(1.0)

    return change


def _check(directory: Path) -> tuple[int, int]:
    """(shards, torn shards)."""
    from keepstep.client.slot import SlotMapping
    from keepstep.image import Section

    checked = torn = 0
    for path in directory.glob("bench/*/rank-*.safetensors"):
        shard = SlotMapping(str(path))
        step = float(shard.control().step)
        parameters = [
            entry for entry in shard.layout.entries.values() if entry.spec.section is Section.PARAMS
        ]
        whole = all(bool((shard.view(entry) == step).all()) for entry in parameters)
        checked, torn = checked + 1, torn + (not whole or not parameters)
    return checked, torn
