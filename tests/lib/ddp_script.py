"""Trained by torchrun in test_ranks.py: DDP with gloo; writes the losses of every step."""

import json
import os
import sys
import traceback

import torch
from torch import nn

import keepstep

if os.environ.get("WITHOUT_SIDECAR") == os.environ["RANK"]:
    del os.environ["KEEPSTEP_SOCKET"]
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
asked = os.environ.get("ASKED", "").split()  # by rank
try:
    at = checkpointer.restore(step=int(asked[rank]) if asked else None)
except keepstep.KeepstepError:
    traceback.print_exc()
    torch.distributed.barrier()  # torchrun kills the other ranks as soon as one has failed
    os._exit(1)
steps, die_at, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with open(f"{log}.{rank}", "a") as out:
    for step in range(at.step + 1 if at else 0, steps):
        if step == die_at and rank == 1:
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item().hex()}), file=out, flush=True)
        checkpointer.save(step)
checkpointer.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads may abort Python's own end
