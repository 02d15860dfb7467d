"""Trained by test_21_a_part_is_gone.py: each rank holds a shard of its own, so that no pod has all.

Prints what `tests.e2e.jobs.read_life` reads. Stands alone: it is mounted from a ConfigMap.
"""

import json
import os
import signal
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep

# it is the container's first process, which ignores the signal by default
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
model = fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
first = at.step + 1 if at else 0


def write(**event: object) -> None:
    if rank == 0:
        print(json.dumps({**event, "wall": time.time()}), flush=True)


write(first=first, tier=at and str(at.tier), restore_s=at and at.seconds)
for step in range(first, 100_000):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    checkpointer.save(step)
    time.sleep(0.2)
    write(step=step, loss_hex=loss.item().hex())
