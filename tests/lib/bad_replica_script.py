"""Trained by torchrun in test_script_failures.py: DDP with gloo, and a rank that goes wrong."""

import os
import signal
import sys

import torch
from torch import nn

import keepstep

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
bad = {"replica": torch.zeros(1)}
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer, "bad": bad})
at = checkpointer.restore()
how, steps, bad_at, log = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if rank == 0:
    with open(log, "a") as out:
        print(at.step if at else -1, file=out)
for step in range(at.step + 1 if at else 0, steps):
    if rank == 1 and bad["replica"].item():
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this replica is wrong")
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    if step == bad_at and not os.path.exists(f"{log}.was-bad.{rank}"):
        open(f"{log}.was-bad.{rank}", "w").close()
        bad["replica"].fill_(1.0)
    checkpointer.save(step)
    checkpointer.wait(step, "durable" if step % 10 == 0 else "staged")
checkpointer.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads may abort Python's own end
