"""Trained by torchrun in test_ranks.py: each rank saves the steps that SAVES (an expression of
`rank` and `step`) names; prints what `restore` and `close` did."""

import os
import sys
import time

import torch
from torch import nn

import keepstep

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
print(f"rank {rank} begins at {at and at.step}", flush=True)
deadline = time.monotonic() + float(sys.argv[2])
step = at.step + 1 if at else 0
last = int(sys.argv[1])
while step < last or time.monotonic() < deadline:
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    if eval(os.environ["SAVES"]):
        checkpointer.save(step)
    step += 1
    # all ranks leave the loop after the same step
    left = torch.tensor([float(time.monotonic() < deadline)])
    torch.distributed.broadcast(left, 0)
    if step >= last and not left.item():
        break
os._exit(9)  # a kill: `close` never says what is not kept
