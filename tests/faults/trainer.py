"""One rank of the soak: `python -m tests.faults.trainer ORDER RANK LOG`.

Restores, then trains and saves until it is killed or done. What it believes goes to LOG, one write
a line, so that no signal tears one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from typing import Any, NoReturn

import torch
import xxhash

import keepstep
from keepstep.errors import NotDurableError
from tests.faults.processes import WORLD, Order

COMPARED = ("exp_avg", "exp_avg_sq")


def digest(tensors: Any) -> str:
    """Digest of all tensors of a state, in order."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return state.hexdigest()


def train(rank: int, order: Order, log: str) -> None:
    """Until SIGTERM, SIGKILL, or the last step that is ordered."""
    os.environ["KEEPSTEP_SOCKET"] = order.socket
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{order.meeting}", rank=rank, world_size=WORLD
    )
    torch.manual_seed(0)
    layers = torch.nn.Linear(256, order.width), torch.nn.Linear(order.width, 256)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(**what: Any) -> None:
        os.write(out, (json.dumps({"time": time.time(), **what}) + "\n").encode())

    def state() -> list[Any]:
        return [
            *model.parameters(),
            *(value[part] for part in COMPARED for value in optimizer.state.values()),
        ]

    at = checkpointer.restore()
    epoch = checkpointer.epoch
    emit(
        event="restored",
        step=at.step if at else -1,
        epoch=str(epoch.id if epoch else None),
        parent=str(epoch.parent if epoch else None),
        digest=digest(state()) if at else "",
        tier=str(at.tier) if at else "",
    )
    dice = random.Random(f"{order.seed}/{rank}")
    first = at.step + 1 if at else 0
    timeout_s = 30.0
    try:
        for step in range(first, first + order.steps):
            inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs * (rank + 1)).square().mean().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            emit(event="step", step=step, digest=digest(state()))
            kept = checkpointer.save(step)
            emit(event="saved", step=step, kept=kept, stats=_counted(checkpointer.stats))
            if kept and dice.random() < order.waiting:
                _wait(checkpointer, step, dice.choice(["staged", "committed"]), emit)
    except SystemExit:
        # the other rank may have stopped at another step, which then is never committed
        timeout_s = 2.0
    try:
        checkpointer.close(timeout=timeout_s)
        emit(event="closed")
    except NotDurableError as error:
        emit(event="not closed", why=str(error))


def _wait(checkpointer: Any, step: int, reached: str, emit: Any) -> None:
    try:
        checkpointer.wait(step, reached, timeout=5.0)
    except NotDurableError as error:
        emit(event="not reached", step=step, state=reached, why=str(error))
    else:
        emit(event="reached", step=step, state=reached)


def _counted(stats: Any) -> tuple[int, int]:
    """Saves, and those of them whose end is known. The first is read first: it only grows here."""
    saves = stats.saves
    return saves, stats.staged + stats.skipped + stats.discarded


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, _end)
    train(int(sys.argv[2]), Order(**json.loads(sys.argv[1])), sys.argv[3])
