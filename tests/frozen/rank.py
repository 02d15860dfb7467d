"""A rank of a job that trains adapters under DistributedDataParallel: `rank.py SEED STEP OUT`
restores, trains and saves one step more, unless STEP is negative, and rank 0 leaves the step from
which it went on, and the model as it was then and is at the end, in OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep
from tests.frozen.models import made, train


def main() -> None:
    seed, step, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    model, optimizer = made(seed)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    checkpointer = keepstep.Checkpointer(
        {"model": wrapped, "optimizer": optimizer}, strict=True, frozen_once=True
    )
    at = checkpointer.restore()
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    if step >= 0:
        torch.manual_seed(step)
        train(model, optimizer)
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.data, 0)
        checkpointer.save(step)
    checkpointer.close()
    if dist.get_rank() == 0:
        found = {"from": at and at.step, "begin": begin, "end": model.state_dict()}
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
